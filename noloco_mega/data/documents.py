"""What are the documents of these inputs? Text files, folders of them, and lines of .jsonl, in a fixed order.

Reading is in two steps, so that the second one can run in other processes: `records` says where each document is, and
`text` takes it out of there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl")


class BadDocumentError(ValueError):
    """A document that can't be used; the message says why, the record says where."""


class Record(NamedTuple):
    """One document, not yet decoded."""

    path: str
    line: int | None
    """Line number of a .jsonl, from 1; None: the whole file is one document."""
    raw: bytes | None
    """The line; None: still in the file."""
    size_bytes: int

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
            inside = sorted(path for path in name.rglob("*") if path.suffix in SUFFIXES and path.is_file())
            if not inside:
                raise ValueError(f"the folder {name} holds no file that ends in {', '.join(SUFFIXES)}")
            found += inside
        elif not name.exists():
            raise ValueError(f"there is no input {name}")
        elif name.suffix not in SUFFIXES:
            raise ValueError(f"{name}: give a folder or a file that ends in {', '.join(SUFFIXES)}")
        else:
            found.append(name)
    if not found:
        raise ValueError("give at least one input")
    return found


def records(paths: Sequence[Path]) -> Iterator[Record]:
    """Every document of the files, in order. Blank lines of a .jsonl are no documents."""
    for path in paths:
        if path.suffix != ".jsonl":
            yield Record(str(path), None, None, path.stat().st_size)
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Record(str(path), number, line, len(line))


def text(record: Record, key: str) -> str:
    """The text of a document; `key` names the field of a .jsonl line. Raises BadDocumentError."""
    raw = Path(record.path).read_bytes() if record.raw is None else record.raw
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(f"not UTF-8 at byte {error.start}") from error
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
        digest.update(f"{path.suffix}\0{content}\n".encode())
    return digest.hexdigest()
