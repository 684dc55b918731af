"""How are a replica's final weights written?

runs/NAME/replica_RR/weights/     in the format of a checkpoint, with the one kind "weight"
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from noloco_mega.checkpoint.format import RankContent, Span, Stored, commit, write_rank
from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.model.parameters import ParameterSlices


def save_weights(
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    slices: Mapping[str, ParameterSlices],
    world: ReplicaWorld,
    facts: Mapping[str, Any],
) -> None:
    """Write a replica's weights into `folder`, replacing an older one. Collective over the replica.

    `parameters` and `slices` are this rank's, by local name; data coordinate 0 writes, the others hold the same.
    `facts` (step, config and so on) go into the manifest as they are. Where a rank fails to write, all of them raise
    OSError, and nothing of it is left on disk.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    rank, grid = dist.get_rank(), world.grid

    def begin() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    try:
        _together(rank == 0, begin)
        named = {slices[name]: tensor for name, tensor in parameters.items()}
        _together(world.place.data == 0, lambda: write_rank(draft, rank, _content(named)))
        _together(rank == 0, lambda: commit(draft, folder, range(grid.stages * grid.tensor), facts))
    except OSError as error:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise OSError(f"the weights could not be written into {folder}: {error}") from error


def _together(mine: bool, work: Callable[[], None]) -> None:
    """Let the ranks whose work this is do it. Raises OSError on all ranks where one of them does."""
    problem: str | None = None
    if mine:
        try:
            work()
        except OSError as error:
            problem = str(error)
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, problem)
    for rank, text in enumerate(told):
        if text is not None:
            raise OSError(f"rank {rank}: {text}")


def _content(parameters: Mapping[ParameterSlices, torch.Tensor]) -> RankContent:
    tensors = []
    for where, parameter in parameters.items():
        tensor = parameter.detach().cpu().contiguous()
        tensors.append(Stored(key=where.name, kind="weight", tensor=tensor, layout=where.name))
    return RankContent(
        tensors=tensors,
        layouts={where.name: [Span(where.name, 0, 0, tensor.numel())] for where, tensor in parameters.items()},
        slices=list(parameters),
        numbers={},
    )
