"""What megatron-core 0.16.1 needs to run without CUDA; nothing is touched where CUDA exists.

Each patched site is pinned by tests/unit/test_mcore_compat.py, so that another version fails there and not in a run.
"""

from __future__ import annotations

import types
from typing import Any

import torch


class _TorchWithoutCuda(types.ModuleType):
    """`torch` as the schedules see it: the literal device="cuda" of their token counter means the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)


def prepare() -> None:
    """Make megatron-core usable in this process; safe to call again.

    Without CUDA: `torch.cuda.current_device` names the CPU (rotary embedding, utils), the schedules get a `torch`
    whose "cuda" is the CPU, and the RNG tracker becomes megatron-core's own no-op one (every dropout here is 0).
    """
    if torch.cuda.is_available():
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as mcore_random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if not isinstance(schedules.torch, _TorchWithoutCuda):
        schedules.torch = _TorchWithoutCuda("torch")
        mcore_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
