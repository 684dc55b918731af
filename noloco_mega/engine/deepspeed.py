"""How does DeepSpeed step one stage, when megatron-core's schedule runs its forward and backward passes?

One inner step of one rank:

    begin(engine)                       gradients only accumulate from here on
    ... the schedule runs engine.module over M microbatches ...
    agree(group, device, links_good)    any rank says no: drop_gradients(engine), and the schedule runs again
    apply(engine, world)                reduce over the inner data-parallel group, clip, step

The learning rate is a function of the run's own step: `set_learning_rate(engine, step)` before the step it is for.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist

from noloco_mega import checks
from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.config import Config
from noloco_mega.device import Device
from noloco_mega.engine.weights import Masters
from noloco_mega.model.stage import sum_partial_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class ModelParallelUnit:
    """A replica's groups under the names that DeepSpeed asks for ("mpu"); every one lies inside the replica."""

    def __init__(self, world: ReplicaWorld) -> None:
        self._world = world

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._world.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._world.data)

    def get_data_parallel_world_size(self) -> int:
        return self._world.grid.data

    def get_data_parallel_rank(self) -> int:
        return self._world.place.data

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._world.model

    def get_model_parallel_world_size(self) -> int:
        return self._world.grid.stages * self._world.grid.tensor

    def get_model_parallel_rank(self) -> int:
        return self._world.place.stage * self._world.grid.tensor + self._world.place.tensor

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._world.tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._world.grid.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self._world.place.tensor

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self._world.tensor, 0)

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._world.pipeline

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._world.grid.stages

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._world.place.stage


def build_engine(model: torch.nn.Module, config: Config, world: ReplicaWorld) -> DeepSpeedEngine:
    """The engine that steps `model`, this rank's stage, whose parameters already hold their initial values in fp32, or
    in bf16 where the config says so. Collective over the replica.

    Raises ValueError for settings under which the hand-off from the schedule would go wrong.
    """
    settings = engine_settings(config, world.device)
    _prepare_process(world.device)
    # Its bf16 optimizer prints a dozen blocks about memory while it is built, whatever the log level.
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=settings,
            mpu=ModelParallelUnit(world),
        )
    Masters(engine)
    return engine


def engine_settings(config: Config, device: Device) -> dict[str, Any]:
    """The JSON for deepspeed.initialize on this device.

    Without CUDA the inner optimizer is torch's own unless the config says otherwise: DeepSpeed's would have to be
    compiled first.
    """
    settings = checks.deepspeed_settings(config)
    optimizer = settings["optimizer"]
    if not device.is_cuda:
        settings["optimizer"] = {**optimizer, "params": {"torch_adam": True, **optimizer.get("params", {})}}
    return settings


def begin(engine: DeepSpeedEngine) -> None:
    """Before the schedule: backward passes accumulate gradients and reduce nothing."""
    engine.set_gradient_accumulation_boundary(False)


def drop_gradients(engine: DeepSpeedEngine) -> None:
    """Forget what was accumulated since the last step, as if its microbatches had never run."""
    engine.optimizer.zero_grad(set_to_none=True)


def accumulated_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Where DeepSpeed keeps a parameter's gradient between microbatches: fp32, [numel] or the parameter's shape.

    None where no backward pass has reached the parameter.
    """
    high_precision = getattr(parameter, "_hp_grad", None)
    return parameter.grad if high_precision is None else high_precision


def apply(engine: DeepSpeedEngine, world: ReplicaWorld) -> float:
    """After the schedule: reduce, clip by the whole replica's norm, step. Collective over the replica.

    Returns that norm before clipping; inf where DeepSpeed skipped the step because a gradient was not finite.
    """
    sum_partial_gradients(engine.module, world, accumulated_gradient)
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()
    engine.step()
    return float(engine.get_global_grad_norm())


def set_learning_rate(engine: DeepSpeedEngine, step: int) -> float:
    """Set and return the learning rate of inner step `step` (counted from 0), whatever was skipped or redone before.

    DeepSpeed advances its scheduler behind every step that it did not skip. All its schedulers take the number of the
    last step done, so that an undisturbed run sees the rates that DeepSpeed alone would give. Without a scheduler the
    optimizer's own rate stays.
    """
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step(step - 1)
    return float(engine.get_lr()[0])


def _prepare_process(device: Device) -> None:
    """Set what DeepSpeed reads from the process instead of from its arguments."""
    given = os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    # It takes the GPU of this number; a launcher that shows each process one GPU still numbers the processes.
    local_rank = str(device.device.index) if device.is_cuda else given
    os.environ["LOCAL_RANK"] = local_rank
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = local_rank
    if not device.is_cuda:
        # Its shared-memory all-reduce would be compiled first, and gloo does the same work here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
