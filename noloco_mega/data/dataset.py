"""What tokens are sample i? One token file in Megatron's .bin/.idx format, cut into samples of equal length.

The file is one stream of tokens, document after document, each with an end-of-document token. With S = seq_length,
sample i is tokens i·S .. (i + 1)·S of that stream, both ends included: S inputs, and one more so that each input has
a next token. These are the samples that megatron-core's GPTDataset cuts from one epoch with the documents in the
file's order; which order they are read in is plan/sampling.py's business. GPTDataset itself would bring nothing but
its own shuffle and, to hold it, an index cache that only rank 0 of a world builds, while a run has many worlds that
may all start on one empty folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from noloco_mega.data.token_files import INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION

SCAN_TOKENS = 1 << 24
DIGEST_TOKENS = 1 << 19


class Dataset:
    """The samples of one token file. `read` is random access; nothing is kept in memory but the two maps of the file.

    Raises ValueError where the file is missing, broken, or holds fewer than S + 1 tokens.
    """

    def __init__(self, prefix: str | Path, seq_length: int) -> None:
        self.prefix, self.seq_length = str(prefix), seq_length
        # Views of an IndexedDataset's maps outlive it and crash the process: everything read here is copied, and the
        # object is kept as long as this one.
        self._indexed = _open_indexed(self.prefix)
        self._dtype = np.dtype(self._indexed.index.dtype)
        self.tokens = os.path.getsize(f"{self.prefix}.bin") // self._dtype.itemsize
        self.documents = len(self._indexed.document_indices) - 1
        if self.tokens < seq_length + 1:
            raise ValueError(
                f"{self.prefix}.bin holds {self.tokens} tokens, but one sample takes seq_length + 1 = "
                f"{seq_length + 1}; give more data or a smaller model.seq_length"
            )

    def __len__(self) -> int:
        return (self.tokens - 1) // self.seq_length

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Inputs and next tokens of some samples: int64 [count, S + 1]."""
        rows = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            assert 0 <= index < len(self), f"sample {index} of {len(self)}"
            row[:] = self._tokens(index * self.seq_length, self.seq_length + 1)
        return rows

    def __getitem__(self, index: int) -> np.ndarray:
        """Inputs and next tokens of one sample: int64 [S + 1]. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        return self.read(np.array([index]))[0]

    def digest(self) -> str:
        """SHA-256 over the sizes and both ends of the token file: tells two different files apart, without reading
        all of them."""
        found = hashlib.sha256(f"{self.tokens} {self.documents} {self._dtype.name}".encode())
        count = min(self.tokens, DIGEST_TOKENS)
        for start in (0, self.tokens - count):
            found.update(np.ascontiguousarray(self._tokens(start, count)).data)
        return found.hexdigest()

    def token_range(self) -> tuple[int, int]:
        """The smallest and largest token id, by reading the whole file."""
        starts = range(0, self.tokens, SCAN_TOKENS)
        blocks = [self._tokens(start, min(SCAN_TOKENS, self.tokens - start)) for start in starts]
        return int(min(block.min() for block in blocks)), int(max(block.max() for block in blocks))

    def _tokens(self, start: int, count: int) -> np.ndarray:
        """A view into the file's map: [count] of the file's own dtype."""
        return self._indexed.bin_reader.read(self._dtype, count, start * self._dtype.itemsize)


def open_dataset(
    prefix: str | Path,
    seq_length: int,
    *,
    vocab_size: int,
    tokenizer_digest: str | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """The data set of PREFIX.bin and PREFIX.idx, checked against the model's vocabulary and its tokenizer.

    What is known about the tokens is read from PREFIX.json, which tools/preprocess_data.py writes. A file without one
    is scanned for its largest token id, once: the finding is kept in the folder `cache`, by default the file's own.
    Any number of processes may do this at the same time. Raises ValueError.
    """
    data = Dataset(prefix, seq_length)
    facts = _sidecar(data) or _scan(data, Path(cache) if cache else Path(prefix).parent)
    if facts["max_token"] >= vocab_size or facts["min_token"] < 0:
        raise ValueError(
            f"{prefix}.bin holds token ids {facts['min_token']} .. {facts['max_token']}, but model.vocab_size = "
            f"{vocab_size}; it was written with another tokenizer"
        )
    written_with = facts["tokenizer_sha256"]
    if tokenizer_digest and written_with and tokenizer_digest != written_with:
        raise ValueError(
            f"{prefix}.bin was written with another tokenizer than data.tokenizer (SHA-256 {written_with[:12]}… "
            f"against {tokenizer_digest[:12]}…); name that one, or run tools/preprocess_data.py again"
        )
    return data


def _open_indexed(prefix: str) -> IndexedDataset:
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
        if not path.is_file():
            raise ValueError(f"there is no {path}; write it with tools/preprocess_data.py, or correct the path prefix")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: no document was tokenized into it")
    _check_index(Path(f"{prefix}.idx"))
    indexed = IndexedDataset(prefix)
    itemsize, lengths = indexed.index.dtype_size, indexed.sequence_lengths
    indexed_bytes = int(lengths.sum(dtype=np.int64)) * itemsize
    last_byte = int(indexed.index.sequence_pointers[-1]) + int(lengths[-1]) * itemsize
    size = os.path.getsize(f"{prefix}.bin")
    if not indexed_bytes == last_byte == size:
        raise ValueError(
            f"{prefix}.idx describes {indexed_bytes} bytes of tokens, but {prefix}.bin has {size}; the two do not "
            "belong together, write them again with tools/preprocess_data.py"
        )
    return indexed


def _check_index(path: Path) -> None:
    """Raise ValueError unless the file is a whole index: IndexedDataset would stop half-way in one that is not."""
    with path.open("rb") as index:
        header = index.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size or header[: len(INDEX_MAGIC)] != INDEX_MAGIC:
        raise ValueError(f"{path} is not an index in Megatron's format")
    _, version, _, sequences, documents = INDEX_HEADER.unpack(header)
    if version != INDEX_VERSION:
        raise ValueError(f"{path} is an index of version {version}; only version {INDEX_VERSION} is known")
    wanted = INDEX_HEADER.size + sequences * (4 + 8) + documents * 8
    if path.stat().st_size < wanted or not sequences:
        raise ValueError(f"{path} is damaged: {path.stat().st_size} of {wanted} bytes, {sequences} sequences")


def _sidecar(data: Dataset) -> Mapping[str, Any] | None:
    """What tools/preprocess_data.py noted about the tokens; None where nothing is noted."""
    path = Path(f"{data.prefix}.json")
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text())
        tokens, largest, digest = facts["tokens"], facts["max_token"], facts["tokenizer_sha256"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error!r}); delete it to have {data.prefix}.bin scanned") from error
    if tokens != data.tokens:
        raise ValueError(
            f"{path} describes {tokens} tokens, but {data.prefix}.bin holds {data.tokens}; run "
            "tools/preprocess_data.py again, or delete the .json to have the file scanned"
        )
    return {"min_token": 0, "max_token": largest, "tokenizer_sha256": digest}


def _scan(data: Dataset, folder: Path) -> Mapping[str, Any]:
    """The token range of a file that has no sidecar, from the finding kept in `folder` or from the file itself."""
    source = Path(f"{data.prefix}.bin").resolve()
    state = source.stat()
    identity = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns, "dtype": data._dtype.name}
    # Two data sets of one name may share the cache folder.
    kept = folder / f"{source.stem}.{hashlib.sha256(str(source).encode()).hexdigest()[:12]}.scan.json"
    facts = _finding(kept)
    if facts.get("of") == identity:
        return facts
    smallest, largest = data.token_range()
    facts = {"of": identity, "min_token": smallest, "max_token": largest, "tokenizer_sha256": None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Written privately and renamed: processes that start together write the same finding, and none reads half.
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{kept.name}.", delete=False) as beside:
            json.dump(facts, beside)
        os.chmod(beside.name, 0o644)
        os.replace(beside.name, kept)
    except OSError as error:
        raise ValueError(
            f"cannot keep the scan of {source} in {folder} ({error.strerror}); set data.cache to a folder that can be "
            "written"
        ) from error
    return facts


def _finding(path: Path) -> Mapping[str, Any]:
    """A finding kept earlier; empty where there is none, or none that survived a crash of the machine whole."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
