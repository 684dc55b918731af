"""What are the documents of these inputs? Text files, lines of .jsonl, rows of .parquet, and folders, in a fixed order.

Text files and .jsonl may be compressed (.gz, .zst).

Reading is in two steps, so that the second one can run in other processes: `records` says where each document is, and
`text` takes it out of there.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
COMPRESSED = (".gz", ".zst")
PACKABLE = (*TEXT_SUFFIXES, ".jsonl")
SUFFIXES = (*PACKABLE, *(kind + end for kind in PACKABLE for end in COMPRESSED), ".parquet")
PARQUET_ROWS = 1024
READ_BYTES = 1 << 18
# What reading a damaged compressed file raises.
DAMAGE = (EOFError, OSError, zlib.error, zstandard.ZstdError)


KINDS = f"{', '.join(PACKABLE)} (these also as {', '.join(COMPRESSED)}) or .parquet"


class BadDocumentError(ValueError):
    """A document that can't be used; the message says why, the record says where."""


class Record(NamedTuple):
    """One document, not yet decoded."""

    path: str
    line: int | None
    """Line of a .jsonl or row of a .parquet, from 1; None: the whole file is one document."""
    raw: bytes | None
    """The line, or the row's text; None: still in the file, or a row without text."""
    size_bytes: int
    """The part that it has in the size of its file."""

    @property
    def where(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


def files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files of the inputs: each input in the order given, a folder's files sorted by path.

    Raises ValueError for a missing input, a suffix that is not known, or a folder without a file that is.
    """
    found: list[Path] = []
    for name in map(Path, inputs):
        if name.is_dir():
            inside = sorted(path for path in name.rglob("*") if kind(path) in SUFFIXES and path.is_file())
            if not inside:
                raise ValueError(f"the folder {name} holds no file that ends in {KINDS}")
            found += inside
        elif not name.exists():
            raise ValueError(f"there is no input {name}")
        elif kind(name) not in SUFFIXES:
            raise ValueError(f"{name}: give a folder or a file that ends in {KINDS}")
        else:
            found.append(name)
    if not found:
        raise ValueError("give at least one input")
    return found


def kind(path: Path) -> str:
    """What tells how a file is read: its suffix, with the one in front of a compression's."""
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED else path.suffix


def records(paths: Sequence[Path], key: str = "text") -> Iterator[Record]:
    """Every document of the files, in order; `key` names the column of a .parquet. Blank lines of a .jsonl are none.

    Raises ValueError naming a file that is damaged: what follows in it can't be told.
    """
    for path in paths:
        if kind(path) == ".parquet":
            yield from _rows(path, key)
        elif kind(path).startswith(".jsonl"):
            yield from _lines(path)
        else:
            yield Record(str(path), None, None, path.stat().st_size)


def _lines(path: Path) -> Iterator[Record]:
    number = before = 0
    with path.open("rb") as file, _plain(path, file) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                # A compressed file is taken in by blocks: the line that needs a new one counts it.
                position = file.tell() if path.suffix in COMPRESSED else before + len(line)
                if line.strip():
                    yield Record(str(path), number, line, position - before)
                    before = position
        except DAMAGE as error:
            raise ValueError(f"{path} is damaged behind line {number}: {error}") from error


def _rows(path: Path, key: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if key not in file.schema_arrow.names:
                raise ValueError(f'{path} has no column "{key}"; it has {", ".join(file.schema_arrow.names)}')
            column = file.schema_arrow.field(key).type
            if not (pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)):
                raise ValueError(f'{path}: the column "{key}" holds {column}, not text')
            share = path.stat().st_size // max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(PARQUET_ROWS, columns=[key]):
                for row in batch.column(0):
                    number += 1
                    yield Record(str(path), number, row.as_buffer().to_pybytes() if row.is_valid else None, share)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged behind row {number}: {error}") from error


@contextmanager
def _plain(path: Path, file: io.BufferedIOBase) -> Iterator[io.BufferedIOBase]:
    """The content of an open file, decompressed as it is read."""
    if path.suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as plain:
            yield plain
    elif path.suffix == ".zst":
        yield io.BufferedReader(_Zstd(file), READ_BYTES)
    else:
        yield file


class _Zstd(io.RawIOBase):
    """The content of a .zst. A file that ends inside a frame is an error, which zstandard's own reader passes over."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file, self._new = file, zstandard.ZstdDecompressor().decompressobj
        self._frame, self._packed, self._ready = self._new(), b"", b""
        self._fresh = True

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(READ_BYTES)
            if not self._packed:
                if not self._fresh:
                    raise EOFError("it ends inside a compressed frame")
                return 0
            self._ready = self._frame.decompress(self._packed)
            self._fresh, self._packed = self._frame.eof, b""
            if self._fresh:
                self._packed, self._frame = self._frame.unused_data, self._new()
        count = min(len(target), len(self._ready))
        target[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _whole(path: Path) -> bytes:
    """A whole file, decompressed. Raises BadDocumentError where it is damaged."""
    try:
        with path.open("rb") as file, _plain(path, file) as plain:
            return plain.read()
    except DAMAGE as error:
        raise BadDocumentError(f"damaged: {error}") from error


def text(record: Record, key: str) -> str:
    """The text of a document; `key` names the field of a .jsonl line. Raises BadDocumentError."""
    raw = record.raw
    if raw is None and record.line is not None:
        raise BadDocumentError(f'no text in the column "{key}"')
    if raw is None:
        raw = _whole(Path(record.path))
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(f"not UTF-8 at byte {error.start}") from error
    if kind(Path(record.path)) == ".parquet":
        return content
    if record.line is None:
        return content
    try:
        fields = json.loads(content)
    except json.JSONDecodeError as error:
        raise BadDocumentError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadDocumentError("not JSON that can be read: nested too deeply") from error
    if not isinstance(fields, dict) or not isinstance(fields.get(key), str):
        raise BadDocumentError(f'no text under the key "{key}"')
    return fields[key]


def fingerprint(paths: Sequence[Path]) -> str:
    """SHA-256 over the kinds and contents of the files: what their documents are made of, and nothing else."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{kind(path)}\0{content}\n".encode())
    return digest.hexdigest()
