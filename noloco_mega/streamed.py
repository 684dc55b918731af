"""How do more tensors than memory holds get into a folder that is whole or not there?

Files are written in safetensors' format, tensor after tensor: a length, a JSON header that says where each tensor lies,
and the tensors' bytes one behind the other (https://huggingface.co/docs/safetensors, "Format"). The header is known
from shapes and dtypes alone, so nothing but the tensor being written is in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from noloco_mega.checkpoint import format
from noloco_mega.checkpoint.format import RankContent, Span
from noloco_mega.comm.transfer import bytes_of
from noloco_mega.model.parameters import ParameterSlices, Piece

DTYPES = {code: dtype for dtype, code in format.DTYPES.items() if dtype.is_floating_point}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Written(NamedTuple):
    """What a file turned out to be."""

    head: bytes
    """Its header, with the length before it."""
    sums: list[int]
    """The CRC-32 of each tensor's bytes."""


class Planned(NamedTuple):
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def size_bytes(text: str) -> int:
    """The bytes of a size such as 5GB, 500MB or 2GiB. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]i?|)B?", text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no size; write e.g. 5GB or 500MB")
    return int(float(match[1]) * UNITS[match[2]])


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, synced and renamed to it at the end; removed if anything fails.

    Raises ValueError if `folder` exists.
    """
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists; choose another output folder, or move it away")
    draft = folder.absolute().with_name(f".{folder.name}.draft-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in [*(path for path in draft.rglob("*") if path.is_file()), draft]:
            format.sync(path)
        os.rename(draft, folder)
        format.sync(draft.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def into_shards(planned: Iterable[Planned], max_bytes: int) -> list[list[Planned]]:
    """Cut a list of tensors into runs of at most `max_bytes`; a tensor larger than that has a run of its own."""
    shards: list[list[Planned]] = [[]]
    filled = 0
    for tensor in planned:
        if shards[-1] and filled + tensor.size_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size_bytes
    return shards


def write_shard(
    path: Path, planned: Sequence[Planned], tensors: Iterator[torch.Tensor], advance: Callable[[int], object]
) -> Written:
    """Write `planned`, taking the tensors in this order from an iterator.

    `advance` is told the bytes written, tensor by tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for plan in planned:
        stop = start + plan.size_bytes
        header[plan.name] = {
            "dtype": format.DTYPES[plan.dtype],
            "shape": list(plan.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = struct.pack("<Q", len(encoded)) + encoded
    sums = []
    with path.open("wb") as file:
        file.write(head)
        for plan in planned:
            tensor = next(tensors)
            assert tuple(tensor.shape) == plan.shape and tensor.dtype == plan.dtype, f"{plan} is {tensor.shape}"
            content = bytes_of(tensor.contiguous())
            file.write(content)
            sums.append(zlib.crc32(content))
            advance(plan.size_bytes)
            del tensor, content  # or it would be held while the next one is made
    return Written(head, sums)


def write_weights(
    folder: Path,
    planned: Sequence[Planned],
    tensors: Iterator[torch.Tensor],
    facts: dict[str, Any],
    max_bytes: int,
    title: str,
) -> None:
    """A replica's weights, unsharded, as checkpoint.reader.SavedReplica reads them, into an existing folder.

    Each shard is what a rank of the pipeline would have written.
    """
    parts = []
    shards = into_shards(planned, max_bytes)
    with progress(title, planned) as advance:
        for number, shard in enumerate(shards):
            written = write_shard(folder / format.file_name(number), shard, tensors, advance)
            parts.append(_part(number, shard, written))
    format.write_manifest(folder, parts, facts)


def _part(number: int, shard: Sequence[Planned], written: Written) -> dict[str, Any]:
    """What the manifest says of a file of whole tensors."""
    entries, layouts, slices, offset = [], {}, [], len(written.head)
    for plan, crc in zip(shard, written.sums, strict=True):
        entries.append(
            {
                "key": plan.name,
                "kind": "weight",
                "dtype": str(plan.dtype).removeprefix("torch."),
                "numel": math.prod(plan.shape),
                "offset": offset,
                "layout": plan.name,
                "crc": crc,
            }
        )
        layouts[plan.name] = [Span(plan.name, 0, 0, math.prod(plan.shape))]
        box = tuple((0, extent) for extent in plan.shape)
        slices.append(ParameterSlices(plan.name, plan.shape, (Piece(box, box),)))
        offset += plan.size_bytes
    content = RankContent(tensors=[], layouts=layouts, slices=slices, numbers={})
    return format.part_of(number, written.head, offset, entries, content)


@contextmanager
def progress(title: str, planned: Sequence[Planned]) -> Iterator[Callable[[int], object]]:
    """A bar over the bytes of some tensors, on a terminal; nothing elsewhere. Gives what advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=sum(plan.size_bytes for plan in planned))
        yield lambda count: bar.advance(task, count)
