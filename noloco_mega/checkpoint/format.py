"""How do a replica's tensors lie on disk? Per rank one safetensors file, per replica one manifest.json, written last.

    FOLDER/rank_000.safetensors ...   flat tensors (or whole parameters), as the rank holds them
    FOLDER/manifest.json              what each of them is, and facts about the replica

    manifest   {"crc": ..., "content": {"format": 2, FACTS ..., "parts": [PART per file]}}
    PART       {"rank", "file", "bytes", "header_bytes", "header_crc", "tensors", "layouts", "parameters", "numbers"}
      tensors     {"key", "kind", "dtype", "numel", "offset", "crc", "layout"}: a tensor of the file; `offset` in bytes
      layouts     {LAYOUT: [[parameter, tensor_offset, parameter_offset, numel], ...]}: which elements of a tensor are
                  which elements of a rank's flattened local parameter
      parameters  {parameter: {"shape", "pieces"}}: where the local parameter sits in the unsharded one, see
                  model/parameters.py
      numbers     what else belongs to the rank

Several kinds (master, exp_avg, ...) share one layout. While a folder is being written it is a draft beside its place.
Every rank leaves rank_RRR.json, its PART, once its file is on disk; when all are there, one rank gathers them into the
manifest and renames the draft. So a reader sees all of it or nothing, and no rank needs more than the file system to
know. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from noloco_mega.comm.transfer import bytes_of
from noloco_mega.model.parameters import ParameterSlices

FORMAT = 2
MANIFEST = "manifest.json"
WRITE_BYTES = 16 << 20
"""After each such piece of a file the disk is set to work on it."""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.uint8: "U8"}
"""safetensors' names of the dtypes that are written."""


class CheckpointError(ValueError):
    """Something on disk that can't be read, or can't be used; the message names the file or the fields."""


class Span(NamedTuple):
    """`numel` elements that a stored tensor and a flattened local parameter share."""

    parameter: str
    """Global name."""
    tensor_offset: int
    parameter_offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor to write: contiguous, on the CPU."""

    key: str
    """Its name in the safetensors file."""
    kind: str
    """What of a parameter it holds: weight, master, exp_avg, phi, ..."""
    tensor: torch.Tensor
    layout: str | None
    """Which of the rank's layouts says what its elements are; None: they belong to no parameter."""


@dataclass(frozen=True, kw_only=True)
class RankContent:
    """Everything that one rank writes."""

    tensors: Sequence[Stored]
    layouts: Mapping[str, Sequence[Span]]
    slices: Sequence[ParameterSlices]
    """Of every parameter that a layout names."""
    numbers: Mapping[str, Any]
    """Anything JSON."""


def file_name(rank: int) -> str:
    return f"rank_{rank:03d}.safetensors"


def described(content: RankContent) -> dict[str, Any]:
    """The layouts and parameters of a PART, as JSON returns them: equal for ranks that hold the same slices."""
    return json.loads(
        json.dumps(
            {
                "layouts": {name: [list(span) for span in spans] for name, spans in content.layouts.items()},
                "parameters": {
                    each.name: {"shape": each.shape, "pieces": [[piece.local, piece.whole] for piece in each.pieces]}
                    for each in content.slices
                },
            }
        )
    )


def write_rank(draft: Path, rank: int, content: RankContent) -> None:
    """Write a rank's file into the draft and, once it is on disk, its PART beside it. Raises OSError."""
    path = draft / file_name(rank)
    head = _header(content.tensors)
    tensors, crcs, offset = [], [], len(head)
    # One thread takes the checksums: more of them would take the processor from the one that writes, and from training.
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as checksums:
        _write_whole(file, memoryview(head))
        for stored in content.tensors:
            data = bytes_of(stored.tensor)
            # Both let go of the interpreter, so that the sums cost no time where writing is the slower one.
            crcs.append(checksums.submit(zlib.crc32, data))
            _write_whole(file, data)
            tensors.append(
                {
                    "key": stored.key,
                    "kind": stored.kind,
                    "dtype": str(stored.tensor.dtype).removeprefix("torch."),
                    "numel": stored.tensor.numel(),
                    "offset": offset,
                    "layout": stored.layout,
                }
            )
            offset += len(data)
        os.fsync(file.fileno())
        for entry, crc in zip(tensors, crcs, strict=True):
            entry["crc"] = crc.result()
    part = _part_path(draft, rank)
    unfinished = part.with_suffix(".draft")
    # Not synced: it is read again by this run only, never after a power failure.
    unfinished.write_text(json.dumps(part_of(rank, head, offset, tensors, content)))
    os.replace(unfinished, part)


def part_of(
    rank: int, head: bytes, size: int, tensors: Sequence[Mapping[str, Any]], content: RankContent
) -> dict[str, Any]:
    """The PART of a file of `size` bytes that begins with `head`, given the entries of its tensors.

    Of `content` everything but the tensors themselves is used.
    """
    return {
        "rank": rank,
        "file": file_name(rank),
        "bytes": size,
        "header_bytes": len(head),
        "header_crc": zlib.crc32(head),
        "tensors": tensors,
        **described(content),
        "numbers": content.numbers,
    }


def parts_missing(draft: Path, ranks: Sequence[int]) -> bool:
    """Whether some rank's PART is not there yet."""
    return not all(_part_path(draft, rank).exists() for rank in ranks)


def commit(draft: Path, folder: Path, ranks: Sequence[int], facts: Mapping[str, Any]) -> None:
    """Make a whole draft the folder, in place of an older one. Raises OSError; the older one is then still there."""
    parts = [json.loads(_part_path(draft, rank).read_text()) for rank in ranks]
    for rank in ranks:
        _part_path(draft, rank).unlink()
    write_manifest(draft, parts, facts)  # which syncs the draft, with the names of all ranks' files
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(draft, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(folder: Path, parts: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the manifest of a folder that holds these PARTs' files. Raises OSError."""
    content = {"format": FORMAT, **facts, "parts": parts}
    write_synced(folder / MANIFEST, json.dumps({"crc": content_crc(content), "content": content}))


def content_crc(content: Mapping[str, Any]) -> int:
    """The checksum of a manifest's content, whatever white space its file has."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def write_synced(path: Path, text: str) -> None:
    """Replace a small file: a reader sees the old one or the whole new one, also after a power failure."""
    draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _part_path(draft: Path, rank: int) -> Path:
    return draft / f"rank_{rank:03d}.json"


def _header(tensors: Sequence[Stored]) -> bytes:
    """The head of a safetensors file: its own length (8 bytes, little endian) and where each tensor lies."""
    entries, offset = {}, 0
    for stored in tensors:
        assert stored.tensor.is_contiguous() and stored.tensor.device.type == "cpu"
        end = offset + stored.tensor.numel() * stored.tensor.element_size()
        entries[stored.key] = {
            "dtype": DTYPES[stored.tensor.dtype],
            "shape": list(stored.tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    return struct.pack("<Q", len(text)) + text


def _write_whole(file: BinaryIO, data: memoryview) -> None:
    """Append to a file. The kernel begins to write each piece out at once, not only when it is synced, and lets go of
    what is written: a checkpoint that is not read again must not drive from memory what training reads."""
    while data:
        start = file.tell()
        count = file.write(data[:WRITE_BYTES])
        advise(file, "DONTNEED", start, count)
        data = data[count:]


def advise(file: BinaryIO, how: str, start: int = 0, count: int = 0) -> None:
    """Tell the kernel how `count` bytes of a file (0: all) will be used: POSIX_FADV_`how`, if the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, count, getattr(os, f"POSIX_FADV_{how}"))
