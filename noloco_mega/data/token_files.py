"""How do token files get onto the disk, and how does a killed run go on? Megatron's .bin and .idx, and a .json beside.

While they grow they lie in a folder of their own. Its state.json says how much of them is certain and how much of the
input that is; it is replaced as a whole, after the files. A run that goes on cuts the files back to it. PREFIX.idx is
put in place last: a file set is whole or has no .idx.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

INDEX_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, code of the tokens' dtype, number of sequences, number of document ends.
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_VERSION = 1
LENGTH = struct.Struct("<i")
DTYPE_CODES = {"uint16": 8, "int32": 4}
SUFFIXES = (".json", ".bin", ".idx")
"""In the order in which they are put in place: tokens without a .json would look like another program's."""
STATE, LOCK = "state.json", "lock"
SAVE_SECONDS = 10.0
"""Between two states of a growing file set: what a killed run does again at most, beside one batch."""


def narrowest(vocab_size: int) -> np.dtype:
    """The dtype of the ids below `vocab_size`, chosen as megatron-core does."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def state(prefix: str, wanted: str) -> str:
    """One of current, missing, outdated (made from something else), foreign (no .json: not made by this program)."""
    binary, index, sidecar = (Path(prefix + suffix) for suffix in (".bin", ".idx", ".json"))
    if not sidecar.exists():
        return "foreign" if binary.exists() or index.exists() else "missing"
    try:
        facts = json.loads(sidecar.read_text())
        same = facts["fingerprint"] == wanted
        size_bytes = facts["tokens"] * np.dtype(facts["dtype"]).itemsize
    except (json.JSONDecodeError, KeyError, TypeError):
        return "outdated"
    if not (binary.exists() and index.exists() and binary.stat().st_size == size_bytes):
        return "missing"
    return "current" if same else "outdated"


@dataclass
class Counts:
    """What one token file holds."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    max_token: int = 0


@dataclass
class Done:
    """How much of the input is in the files."""

    records: int = 0
    """Documents that were read, usable or not."""
    left_out: int = 0
    """Those of them that were not usable."""
    input_bytes: int = 0
    """Their part of the input files."""


class Growing:
    """One token file while it grows: FOLDER/NAME.bin, and the lengths of its documents in FOLDER/NAME.lengths."""

    def __init__(self, path: Path, dtype: np.dtype, counts: Counts) -> None:
        """Cut the files at `path` back to `counts`."""
        self.counts, self._path, self._dtype = counts, path, dtype
        self._tokens, self._lengths = (_cut_back(*file) for file in _sizes(path, dtype, counts).items())

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document. Raises ValueError for an id that the file's dtype would wrap."""
        largest, limit = int(tokens.max()), np.iinfo(self._dtype).max
        if tokens.min() < 0 or largest > limit:
            raise ValueError(f"token id {largest if largest > limit else tokens.min()} does not fit into {self._dtype}")
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._lengths.write(LENGTH.pack(len(tokens)))
        self.counts.documents += 1
        self.counts.tokens += len(tokens)
        self.counts.text_bytes += text_bytes
        self.counts.max_token = max(self.counts.max_token, largest)

    def sync(self) -> None:
        """Everything added so far is on the disk."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._tokens.close()
        self._lengths.close()

    def complete(self, facts: Mapping[str, Any]) -> None:
        """Write what goes beside the tokens; `facts` are noted in the .json."""
        self.sync()
        lengths = np.fromfile(_beside(self._path, ".lengths"), dtype=np.int32)  # as LENGTH packs them
        count = len(lengths)
        starts = np.zeros(count, dtype=np.int64)
        np.cumsum(lengths[:-1], out=starts[1:])
        starts *= self._dtype.itemsize
        header = INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, DTYPE_CODES[self._dtype.name], count, count + 1)
        arrays = (lengths, starts, np.arange(count + 1, dtype=np.int64))
        _write(_beside(self._path, ".idx"), [header, *(array.data for array in arrays)])
        noted = asdict(self.counts) | {"dtype": self._dtype.name} | dict(facts)
        _write(_beside(self._path, ".json"), [(json.dumps(noted, indent=1) + "\n").encode()])


class Draft:
    """All growing files of one preprocessing, in a folder that this process holds alone.

    As a context manager: what it leaves behind a ValueError (unusable input) is removed, behind anything else kept for
    the next run.
    """

    def __init__(self, folder: Path, prefixes: Sequence[str], dtype: np.dtype, identity: str, *, resume: bool) -> None:
        """Go on where a run with the same `identity` stopped, if `resume` and there is one; else begin.

        `identity` stands for everything that the files are a function of. Raises ValueError where another process
        holds the folder.
        """
        self._folder, self._prefixes, self._identity = folder, prefixes, identity
        self._lock = _lock(folder)
        paths = [folder / Path(prefix).name for prefix in prefixes]
        found = _read(folder / STATE)
        self.resumed = resume and found.get("identity") == identity and _holds(paths, dtype, found)
        """Whether an earlier run is gone on with."""
        self.dropped = bool(found) and not self.resumed
        """Whether an earlier run is not gone on with."""
        if not self.resumed:
            (folder / STATE).unlink(missing_ok=True)
            found = {"files": [{}] * len(prefixes), "done": {}, "complete": False}
        self.done, self.complete = Done(**found["done"]), found["complete"]
        self.counts = [Counts(**counts) for counts in found["files"]]
        self.files: list[Growing] = []
        if not self.complete:  # else some of the files may be in place already
            self.files = [Growing(path, dtype, counts) for path, counts in zip(paths, self.counts, strict=True)]
        self._saved_seconds = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for file in self.files:
            file.close()
        if isinstance(error, ValueError):
            shutil.rmtree(self._folder)
        os.close(self._lock)

    def save_if_due(self) -> None:
        """Every SAVE_SECONDS: what was added so far, and `done` with it, is kept whatever happens next."""
        if time.monotonic() - self._saved_seconds >= SAVE_SECONDS:
            for file in self.files:
                file.sync()
            self._save()

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Put all files in place; `facts` are noted in each .json. Goes on where an earlier run was killed in it."""
        if not self.complete:
            for file in self.files:
                file.complete(facts)
            self.complete = True
            self._save()
        for prefix in self._prefixes:
            path = self._folder / Path(prefix).name
            if _beside(path, ".idx").exists():
                Path(f"{prefix}.idx").unlink(missing_ok=True)
            for suffix in SUFFIXES:
                if _beside(path, suffix).exists():
                    os.replace(_beside(path, suffix), prefix + suffix)
        shutil.rmtree(self._folder)

    def _save(self) -> None:
        files = [asdict(counts) for counts in self.counts]
        state = {"identity": self._identity, "files": files, "done": asdict(self.done), "complete": self.complete}
        _write(self._folder / f"{STATE}.new", [json.dumps(state).encode()])
        os.replace(self._folder / f"{STATE}.new", self._folder / STATE)
        self._saved_seconds = time.monotonic()


def clear(folder: Path) -> None:
    """Remove what a killed run left of files that are in place. Raises ValueError where a process holds the folder."""
    if folder.exists():
        lock = _lock(folder)
        shutil.rmtree(folder)
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder, made if needed, until it is closed or this process ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(f"another process is writing in {folder}; wait for it, or choose another output") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its holder had ended and removed the folder


def _read(path: Path) -> dict[str, Any]:
    """A state; empty where there is none, or none that survived a crash of the machine whole."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sizes(path: Path, dtype: np.dtype, counts: Counts) -> dict[Path, int]:
    """The files of a growing one, and how many of their bytes belong to `counts`."""
    return {
        _beside(path, ".bin"): counts.tokens * dtype.itemsize,
        _beside(path, ".lengths"): counts.documents * LENGTH.size,
    }


def _holds(paths: Sequence[Path], dtype: np.dtype, found: Mapping[str, Any]) -> bool:
    """Whether the growing files hold what their state says; of complete ones some may have gone to their place."""
    sizes = [_sizes(path, dtype, Counts(**counts)) for path, counts in zip(paths, found["files"], strict=True)]
    return found["complete"] or all(
        path.exists() and path.stat().st_size >= size for one in sizes for path, size in one.items()
    )


def _cut_back(path: Path, size_bytes: int) -> BinaryIO:
    """The file, open to append behind its first `size_bytes`."""
    file = path.open("ab")
    file.truncate(size_bytes)
    return file


def _write(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write a file, through to the disk."""
    with path.open("wb") as file:
        for part in content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
