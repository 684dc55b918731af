"""How are a replica's final weights written?

runs/NAME/replica_RR/weights/     in the format of a checkpoint, with the one kind "weight"
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
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
    `facts` (step, config and so on) go into the manifest as they are.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    rank, grid = dist.get_rank(), world.grid
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    if world.place.data == 0:
        write_rank(draft, rank, _content({slices[name]: tensor for name, tensor in parameters.items()}))
    dist.barrier()
    if rank == 0:
        commit(draft, folder, range(grid.stages * grid.tensor), facts)
    dist.barrier()


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
