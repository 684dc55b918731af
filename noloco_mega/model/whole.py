"""How does one process hold the whole model? For evaluation, generation and merging, away from any run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from noloco_mega import config, device
from noloco_mega.comm import groups
from noloco_mega.grid import Grid, Place
from noloco_mega.model.parameters import parameter_slices
from noloco_mega.model.stage import build_stage


@contextmanager
def whole_model(
    model: config.Model, tensor_of: Callable[[str], torch.Tensor], dtype: torch.dtype = torch.float32
) -> Iterator[GPTModel]:
    """The model unsharded (T = S = 1) in this process, with `tensor_of(global name)` as its weights.

    The process must not have a default process group; a world of one rank exists inside the context.
    """
    grid = Grid(replicas=1)
    world = groups.start_replica(grid, Place(0, 0, 0, 0), device.select(0), dist.HashStore(), timedelta(seconds=60))
    try:
        stage = build_stage(model, config.Topology(replicas=1), world, dtype)
        slices = parameter_slices(stage, world)
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                parameter.copy_(tensor_of(slices[name].name))
        yield stage.eval()
    finally:
        groups.stop_replica()
