"""What does a saved replica hold? Any box of any tensor, read back from the files of whatever topology wrote them.

A box is a range of the unsharded parameter; the slices that overlap it are found in the manifest, and only those are
read. Nothing is returned from a file whose checksums have not been verified.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, BinaryIO

import torch

from noloco_mega.checkpoint.format import FORMAT, MANIFEST, CheckpointError, content_crc
from noloco_mega.comm.transfer import bytes_of
from noloco_mega.model.parameters import Ranges

CHUNK_BYTES = 1 << 20
"""Read at once while checksums are verified: stays in a core's cache."""
READERS = 4
"""Regions of one file that are verified at once: some wait for the disk while others are summed."""

Part = dict[str, Any]


class SavedReplica:
    """One replica's folder: final weights, or its part of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where `folder` holds no complete set of files; their checksums come later."""
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        try:
            outer = json.loads(path.read_text())
            self.manifest: dict[str, Any] = outer["content"]
            crc = outer["crc"]
        except OSError as error:
            raise CheckpointError(f"{self.folder} holds no {MANIFEST}: nothing complete was saved there") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged, or not of format {FORMAT}: {error}") from error
        if content_crc(self.manifest) != crc:
            raise CheckpointError(f"{path} is damaged: it does not match its checksum")
        if self.manifest["format"] != FORMAT:
            raise CheckpointError(f"{self.folder} has format {self.manifest['format']}; this version reads {FORMAT}")
        self.parts: list[Part] = self.manifest["parts"]
        for part in self.parts:
            self._check_size(part)
        self._verified: set[str] = set()

    @property
    def step(self) -> int:
        """Inner steps done when it was saved."""
        return self.manifest["step"]

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(part["bytes"] for part in self.parts)

    @property
    def kinds(self) -> list[str]:
        """The kinds of tensor that belong to parameters, in the order of the files."""
        return list(dict.fromkeys(t["kind"] for part in self.parts for t in part["tensors"] if t["layout"] is not None))

    @property
    def weight_kind(self) -> str:
        """The kind that the model computes with: weight, or in a checkpoint master."""
        return "weight" if "weight" in self.kinds else "master"

    @property
    def names(self) -> list[str]:
        """The global names of the parameters."""
        return list(dict.fromkeys(name for part in self.parts for name in part["parameters"]))

    def verify(self, part: Part) -> None:
        """Read one file whole and compare its checksums. Raises CheckpointError naming it."""
        if part["file"] in self._verified:
            return
        path = self.folder / part["file"]
        sizes = [part["header_bytes"], *(_bytes(tensor) for tensor in part["tensors"])]
        try:
            header_crc, *crcs = _checksums(path, sizes)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        bad = [t["key"] for t, crc in zip(part["tensors"], crcs, strict=True) if t["crc"] != crc]
        if header_crc != part["header_crc"]:
            bad.insert(0, "its header")
        if bad:
            raise CheckpointError(f"{path} is damaged: {', '.join(bad[:3])} does not match its checksum")
        self._verified.add(part["file"])

    def take_as_verified(self) -> None:
        """Other ranks have verified the files that this one did not."""
        self._verified = {part["file"] for part in self.parts}

    def tensor(self, name: str, kind: str | None = None) -> torch.Tensor:
        """One parameter, unsharded: `kind` of it, or its weight (in a checkpoint: its master).

        Raises CheckpointError naming a damaged file.
        """
        return self.box(name, kind or self.weight_kind, tuple((0, extent) for extent in self.shape(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The unsharded shape of a parameter. Raises CheckpointError where there is none of that name."""
        for part in self.parts:
            if name in part["parameters"]:
                return tuple(part["parameters"][name]["shape"])
        raise CheckpointError(f"{self.folder} holds no parameter {name}")

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `tensor` gives a parameter. Raises CheckpointError where there is none of that name."""
        kind = self.weight_kind
        for part in self.parts:
            for tensor in part["tensors"]:
                if tensor["kind"] == kind and any(span[0] == name for span in part["layouts"][tensor["layout"]]):
                    return _dtype(tensor)
        raise CheckpointError(f"{self.folder} holds no parameter {name}")

    def box(self, name: str, kind: str, box: Ranges) -> torch.Tensor:
        """`kind` of a box of the unsharded parameter `name`, in the box's shape. Raises CheckpointError."""
        shape = [stop - start for start, stop in box]
        answer: torch.Tensor | None = None
        filled = torch.zeros(shape, dtype=torch.bool)
        for pieces, holders in self._slices(name):
            if not any(_overlap(whole, box) for _, whole in pieces):
                continue
            local = self._local(name, kind, pieces, holders)
            if len(pieces) == 1 and list(local.shape) == shape and _overlap(pieces[0][1], box) == tuple(box):
                return local  # the very box: a copy would take as much memory again
            if answer is None:
                answer = torch.empty(filled.shape, dtype=local.dtype)
            for inside, whole in pieces:
                common = _overlap(whole, box)
                if common:
                    to = _index(common, [start for start, _ in box])
                    at = [place[0] - start[0] for place, start in zip(whole, inside, strict=True)]
                    answer[to] = local[_index(common, at)]
                    filled[to] = True
        if answer is None or not bool(filled.all()):
            raise CheckpointError(f"{self.folder} holds only a part of {name} ({kind})")
        return answer

    def read(self, part: Part, tensor: dict[str, Any], first: int, target: torch.Tensor) -> None:
        """Elements from `first` on of a stored tensor into `target`, contiguous on the CPU. Raises CheckpointError."""
        self.verify(part)
        path = self.folder / part["file"]
        assert _dtype(tensor) == target.dtype
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(tensor["offset"] + first * target.element_size())
                _read_whole(file, bytes_of(target))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error

    def _check_size(self, part: Part) -> None:
        path = self.folder / part["file"]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing ({error.strerror})") from error
        if size != part["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {part['bytes']}: it was cut, or is another file")

    def _slices(self, name: str) -> Iterator[tuple[list[tuple[Ranges, Ranges]], list[Part]]]:
        """The different local tensors of a parameter: pieces as (local box, whole box), and the files that hold it."""
        self.shape(name)
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            if name in part["parameters"]:
                found.setdefault(json.dumps(part["parameters"][name]["pieces"]), []).append(part)
        for text, holders in found.items():
            yield json.loads(text), holders

    def _local(self, name: str, kind: str, pieces: list[tuple[Ranges, Ranges]], holders: list[Part]) -> torch.Tensor:
        """One local tensor of a parameter, put together from the data ranks (or copies) that hold parts of it."""
        spans = sorted(
            (offset, numel, index, tensor_offset, position)
            for index, part in enumerate(holders)
            for position, tensor in enumerate(part["tensors"])
            if tensor["kind"] == kind
            for other, tensor_offset, offset, numel in part["layouts"][tensor["layout"]]
            if other == name
        )
        shape = [max(local[dim][1] for local, _ in pieces) for dim in range(len(pieces[0][0]))]
        flat: torch.Tensor | None = None
        done = 0
        for offset, numel, index, tensor_offset, position in spans:
            if offset > done:
                break
            if offset + numel <= done:
                continue  # a copy on another rank
            part = holders[index]
            tensor = part["tensors"][position]
            if flat is None:
                flat = torch.empty(math.prod(shape), dtype=_dtype(tensor))
            self.read(part, tensor, tensor_offset + done - offset, flat[done : offset + numel])
            done = offset + numel
        if flat is None or done != flat.numel():
            raise CheckpointError(f"{self.folder} holds only a part of {name} ({kind}): a rank's file is not in it")
        return flat.view(shape)


def mean_tensor(replicas: Sequence[SavedReplica], name: str) -> torch.Tensor:
    """The mean over replicas of one parameter, accumulated in fp32, in the parameter's dtype."""
    total = replicas[0].tensor(name)
    dtype = total.dtype
    total = total.float()
    for replica in replicas[1:]:
        total += replica.tensor(name).float()
    return (total / len(replicas)).to(dtype)


def _dtype(tensor: dict[str, Any]) -> torch.dtype:
    return getattr(torch, tensor["dtype"])


def _bytes(tensor: dict[str, Any]) -> int:
    return tensor["numel"] * _dtype(tensor).itemsize


def _overlap(one: Ranges, other: Ranges) -> Ranges | None:
    """The box that two boxes share, if they do."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _index(box: Ranges, origin: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first element sits at `origin`."""
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, origin, strict=True))


def _checksums(path: Path, sizes: Sequence[int]) -> list[int]:
    """The CRC-32 of each of a file's consecutive regions, several regions at once."""
    starts = [0, *accumulate(sizes)]
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(_checksum, repeat(path), starts, sizes))


def _checksum(path: Path, start: int, size: int) -> int:
    buffer, crc = memoryview(bytearray(min(size, CHUNK_BYTES))), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while size:
            chunk = buffer[: min(size, CHUNK_BYTES)]
            _read_whole(file, chunk)
            crc = zlib.crc32(chunk, crc)
            size -= len(chunk)
    return crc


def _read_whole(file: BinaryIO, target: memoryview) -> None:
    while target:
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("it ends too early")
        target = target[count:]
