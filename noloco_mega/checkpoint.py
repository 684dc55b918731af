"""How do weights lie on disk? Per rank one safetensors file, per replica one manifest.json; any slice can be read back.

    runs/NAME/replica_RR/weights/rank_000.safetensors ...   the rank's own tensors, as it holds them
    runs/NAME/replica_RR/weights/manifest.json              global name -> where its pieces lie; written last

A folder is written beside its place and renamed into it once every file is on disk, so a reader sees all of it or
nothing. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.model.parameters import ParameterSlices

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A folder of weights that can't be read, or can't be written; the message names the file."""


def save_weights(
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    slices: Mapping[str, ParameterSlices],
    world: ReplicaWorld,
    facts: Mapping[str, Any],
) -> None:
    """Write a replica's weights into `folder`, replacing an older one. Collective over the replica.

    `parameters` and `slices` are this rank's, by local name; data coordinate 0 writes, the others hold the same.
    `facts` (step, config and so on) go into the manifest as they are.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    entries: list[dict[str, Any]] = []
    if world.place.data == 0:
        file = f"rank_{dist.get_rank():03d}.safetensors"
        tensors = {slices[name].name: tensor.detach().cpu().contiguous() for name, tensor in parameters.items()}
        save_file(tensors, draft / file)
        _sync(draft / file)
        entries = [_entry(file, slices[name], tensors[slices[name].name]) for name in parameters]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, entries)
    if dist.get_rank() == 0:
        manifest = {"format": FORMAT, **facts, "tensors": [entry for part in gathered for entry in part]}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(draft / MANIFEST)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.rename(folder, old)
        os.rename(draft, folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


class Weights:
    """A replica's saved weights, read tensor by tensor in the unsharded shape."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where `folder` holds no complete, readable set of weights."""
        self.folder = Path(folder)
        try:
            self.manifest = json.loads((self.folder / MANIFEST).read_text())
        except OSError as error:
            raise CheckpointError(f"{self.folder} holds no {MANIFEST}: not a folder of weights") from error
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{self.folder / MANIFEST} is damaged: {error}") from error
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.folder} has format {self.manifest.get('format')}; this version reads {FORMAT}"
            )
        self._entries: dict[str, list[dict[str, Any]]] = {}
        for entry in self.manifest["tensors"]:
            self._entries.setdefault(entry["name"], []).append(entry)

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        """One parameter, unsharded, with every part's CRC verified. Raises CheckpointError naming a damaged file."""
        if name not in self._entries:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        entries = self._entries[name]
        whole: torch.Tensor | None = None
        filled = torch.zeros(entries[0]["shape"], dtype=torch.bool)
        for entry in entries:
            part = self._part(entry)
            if whole is None:
                whole = torch.empty(entry["shape"], dtype=part.dtype)
            for local, place in entry["pieces"]:
                whole[_index(place)] = part[_index(local)]
                filled[_index(place)] = True
        assert whole is not None
        if not bool(filled.all()):
            raise CheckpointError(f"{self.folder} holds only a part of {name}: a rank's file is missing")
        return whole

    def _part(self, entry: dict[str, Any]) -> torch.Tensor:
        path = self.folder / entry["file"]
        try:
            with safe_open(path, "pt") as file:
                part = file.get_tensor(entry["name"])
        except Exception as error:  # safetensors raises its own, undocumented kinds
            raise CheckpointError(f"{path} can't be read: {error}") from error
        if _crc(part) != entry["crc"]:
            raise CheckpointError(f"{path} is damaged: {entry['name']} does not match its checksum")
        return part


def mean_tensor(replicas: Sequence[Weights], name: str) -> torch.Tensor:
    """The mean over replicas of one parameter, accumulated in fp32, in the parameter's dtype."""
    total = replicas[0].tensor(name)
    dtype = total.dtype
    total = total.float()
    for weights in replicas[1:]:
        total += weights.tensor(name).float()
    return (total / len(replicas)).to(dtype)


def _entry(file: str, where: ParameterSlices, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": where.name,
        "file": file,
        "shape": list(where.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "pieces": [[list(piece.local), list(piece.whole)] for piece in where.pieces],
        "crc": _crc(tensor),
    }


def _crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def _index(ranges: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
