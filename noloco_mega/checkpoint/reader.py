"""What does a saved replica hold? Any box of any tensor, read back from the files of whatever topology wrote them.

A box is a range of the unsharded parameter; the slices that overlap it are found in the manifest, and of those only the
rows that it needs are read. Nothing is returned from a file whose checksums have not been verified.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from noloco_mega.checkpoint.format import FORMAT, MANIFEST, CheckpointError, advise, content_crc
from noloco_mega.comm.transfer import bytes_of
from noloco_mega.model.parameters import Ranges

CHUNK_BYTES = 4 << 20
"""Read at once; summed on another thread while the next chunk is read."""
CHUNKS_BEHIND = 2
"""That wait for their sum, or are in it."""

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
        """Read one file whole and compare its checksums, if that has not been done yet. Raises CheckpointError."""
        if part["file"] not in self._verified:
            self.load(part, {})

    def load(self, part: Part, targets: Mapping[str, torch.Tensor]) -> None:
        """Read one file whole, once: the tensors that `targets` names by key into these (contiguous, on the CPU), the
        others for their checksums only. Raises CheckpointError naming the file; the targets may be overwritten then.
        """
        path = self.folder / part["file"]
        regions: list[tuple[int, memoryview | None]] = [(part["header_bytes"], None)]
        for tensor in part["tensors"]:
            target = targets.get(tensor["key"])
            assert target is None or (target.dtype, target.numel()) == (_dtype(tensor), tensor["numel"])
            regions.append((_bytes(tensor), None if target is None else bytes_of(target)))
        try:
            header_crc, *crcs = _read_summed(path, regions)
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
            for inside, whole in pieces:
                common = _overlap(whole, box)
                if common is None:
                    continue
                # The local place of the common box, and the whole rows of the local tensor that it lies in.
                at = _shifted(common, whole, inside)
                extents = [max(local[dim][1] for local, _ in pieces) for dim in range(len(inside))]
                rows = self._rows(name, kind, at[0], extents, holders)
                if list(rows.shape) == shape and common == tuple(box):
                    return rows  # the very box: a copy would take as much memory again
                if answer is None:
                    answer = torch.empty(shape, dtype=rows.dtype)
                to = _index(common, [start for start, _ in box])
                answer[to] = rows[_index(at, [at[0][0], *(0 for _ in at[1:])])]
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

    def _rows(
        self, name: str, kind: str, rows: tuple[int, int], extents: Sequence[int], holders: Sequence[Part]
    ) -> torch.Tensor:
        """Some rows (along dim 0) of a local tensor of these extents, put together from the data ranks (or copies) that
        hold parts of it."""
        row = math.prod(extents[1:])
        first, end = rows[0] * row, rows[1] * row
        spans = sorted(
            (offset, numel, index, tensor_offset, position)
            for index, part in enumerate(holders)
            for position, tensor in enumerate(part["tensors"])
            if tensor["kind"] == kind
            for other, tensor_offset, offset, numel in part["layouts"][tensor["layout"]]
            if other == name
        )
        flat: torch.Tensor | None = None
        done = first
        for offset, numel, index, tensor_offset, position in spans:
            stop = min(offset + numel, end)
            if offset > done:
                break
            if stop <= done:
                continue  # before the rows, behind them, or a copy on another rank
            part = holders[index]
            tensor = part["tensors"][position]
            if flat is None:
                flat = torch.empty(end - first, dtype=_dtype(tensor))
            self.read(part, tensor, tensor_offset + done - offset, flat[done - first : stop - first])
            done = stop
        if flat is None or done != end:
            raise CheckpointError(f"{self.folder} holds only a part of {name} ({kind}): a rank's file is not in it")
        return flat.view(rows[1] - rows[0], *extents[1:])


def verify_share(replicas: Sequence[SavedReplica], rank: int, ranks: int) -> None:
    """Verify the share of the replicas' files that falls to `rank` of `ranks`. Raises CheckpointError."""
    for replica in replicas:
        for part in replica.parts[rank::ranks]:
            replica.verify(part)


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


def _shifted(box: Ranges, origin: Ranges, to: Ranges) -> Ranges:
    """A box within `origin`, seen from where that box begins in `to`."""
    return tuple((a - o[0] + t[0], b - o[0] + t[0]) for (a, b), o, t in zip(box, origin, to, strict=True))


def _index(box: Ranges, origin: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first element sits at `origin`."""
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, origin, strict=True))


def _read_summed(path: Path, regions: Sequence[tuple[int, memoryview | None]]) -> list[int]:
    """Read a file's consecutive regions (size in bytes, and where to, None: nowhere); the CRC-32 of each."""
    crcs = [0] * len(regions)

    def add(region: int, chunk: memoryview) -> None:
        crcs[region] = zlib.crc32(chunk, crcs[region])

    spare = min(CHUNK_BYTES, max((size for size, target in regions if target is None), default=0))
    scratch = deque(memoryview(bytearray(spare)) for _ in range(CHUNKS_BEHIND + 1))
    behind: deque[Future[None]] = deque()
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as summing:
        advise(file, "SEQUENTIAL")  # it reads further ahead
        for region, (size, target) in enumerate(regions):
            for start in range(0, size, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, size)
                chunk = scratch[0][: stop - start] if target is None else target[start:stop]
                _read_whole(file, chunk)
                behind.append(summing.submit(add, region, chunk))
                scratch.rotate()
                if len(behind) > CHUNKS_BEHIND:
                    behind.popleft().result()
    return crcs


def _read_whole(file: BinaryIO, target: memoryview) -> None:
    while target:
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("it ends too early")
        target = target[count:]
