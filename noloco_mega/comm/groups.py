"""Which groups exist: one replica is one torch.distributed world, on a store of its own.

Nothing here spans replicas, so a dead replica cannot hang another one in a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from noloco_mega import mcore_compat
from noloco_mega.device import Device
from noloco_mega.grid import Grid, Place

# megatron-core's default order puts dp before pp; this one is Grid's.
MCORE_ORDER = "tp-cp-ep-pp-dp"


@dataclass(frozen=True)
class ReplicaWorld:
    """The process groups of one rank's replica. `store` is the replica's own and serves nobody else."""

    grid: Grid
    place: Place
    device: Device
    store: dist.Store
    mcore: ProcessGroupCollection
    tensor: dist.ProcessGroup
    """The T ranks that share this rank's replica, data coordinate and stage."""
    pipeline: dist.ProcessGroup
    """The S stages of this rank's replica, data and tensor coordinate."""
    data: dist.ProcessGroup
    """The D ranks that hold the same parameters."""
    model: dist.ProcessGroup
    """The S·T ranks that together hold one copy of the model."""
    replica: dist.ProcessGroup
    """All D·S·T ranks of the replica: its world."""


def start_replica(grid: Grid, place: Place, device: Device, store: dist.Store, timeout: timedelta) -> ReplicaWorld:
    """Create this process's default world, which is its replica, and megatron-core's groups inside it.

    `store` must be shared by exactly the replica's D·S·T ranks: a PrefixStore on a store of several replicas does not
    isolate them under NCCL, whose watchdog strips prefixes. Collective over the replica.
    """
    mcore_compat.prepare()
    dist.init_process_group(
        device.backend,
        store=store,
        rank=grid.replica_rank(place),
        world_size=grid.replica_size,
        timeout=timeout,
        device_id=device.device if device.is_cuda else None,
    )
    parallel_state.initialize_model_parallel(
        grid.tensor,
        grid.stages,
        order=MCORE_ORDER,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    mcore = ProcessGroupCollection.use_mpu_process_groups()
    replica = dist.group.WORLD
    assert replica is not None
    world = ReplicaWorld(
        grid=grid,
        place=place,
        device=device,
        store=store,
        mcore=mcore,
        tensor=mcore.tp,
        pipeline=mcore.pp,
        data=mcore.dp,
        model=mcore.mp,
        replica=replica,
    )
    assert dist.get_rank(world.tensor) == place.tensor and dist.get_world_size(world.tensor) == grid.tensor
    assert dist.get_rank(world.pipeline) == place.stage and dist.get_world_size(world.pipeline) == grid.stages
    assert dist.get_rank(world.data) == place.data and dist.get_world_size(world.data) == grid.data
    return world


def stop_replica() -> None:
    """Leave the replica's world; the process may start another one afterwards."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
