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

from noloco_mega.checkpoint import FORMAT, MANIFEST

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


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
            _sync(path)
        os.rename(draft, folder)
        _sync(draft.parent)
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
) -> list[int]:
    """Write `planned`, taking the tensors in this order from an iterator; the CRC-32 of each one's bytes.

    `advance` is told the bytes written, tensor by tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for plan in planned:
        stop = start + plan.size_bytes
        header[plan.name] = {"dtype": CODES[plan.dtype], "shape": list(plan.shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    sums = []
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for plan in planned:
            tensor = next(tensors)
            assert tuple(tensor.shape) == plan.shape and tensor.dtype == plan.dtype, f"{plan} is {tensor.shape}"
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(content)
            sums.append(zlib.crc32(content))
            advance(plan.size_bytes)
            del tensor, content  # or it would be held while the next one is made
    return sums


def write_weights(
    folder: Path,
    planned: Sequence[Planned],
    tensors: Iterator[torch.Tensor],
    facts: dict[str, Any],
    max_bytes: int,
    title: str,
) -> None:
    """A replica's weights, unsharded, in the format of checkpoint.Weights, into an existing folder."""
    entries = []
    shards = into_shards(planned, max_bytes)
    with progress(title, planned) as advance:
        for number, shard in enumerate(shards):
            file = f"rank_{number:03d}.safetensors"
            sums = write_shard(folder / file, shard, tensors, advance)
            for plan, crc in zip(shard, sums, strict=True):
                box = [[0, extent] for extent in plan.shape]
                entries.append(
                    {
                        "name": plan.name,
                        "file": file,
                        "shape": list(plan.shape),
                        "dtype": str(plan.dtype).removeprefix("torch."),
                        "pieces": [[box, box]],
                        "crc": crc,
                    }
                )
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **facts, "tensors": entries}, indent=1))


@contextmanager
def progress(title: str, planned: Sequence[Planned]) -> Iterator[Callable[[int], object]]:
    """A bar over the bytes of some tensors, on a terminal; nothing elsewhere. Gives what advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=sum(plan.size_bytes for plan in planned))
        yield lambda count: bar.advance(task, count)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
