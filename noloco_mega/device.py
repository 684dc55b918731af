"""Which device, dtype, backend and stream? With mcore_compat.py the only file that says `torch.cuda`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """What one rank computes on and which torch.distributed backend reaches it."""

    device: torch.device
    backend: str

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device's queued work; on the CPU nothing is ever queued."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def select(local_rank: int) -> Device:
    """The device of a process: its node's GPU number `local_rank` where CUDA exists, else the CPU.

    Must run before any process group exists: it sets what NCCL's watchdog reads once. Raises ValueError if the node
    has fewer GPUs than local ranks.
    """
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "gloo")
    count = torch.cuda.device_count()
    # A launcher that gives each task one visible GPU (SLURM's --gpus-per-task) numbers it 0 for every task.
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU: this node shows {count}; start at most {count} ranks per node"
        )
    torch.cuda.set_device(index)
    # A watchdog that dumps or spreads an error would end every replica's processes for one replica's fault.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_PROPAGATE_ERROR", "0")
    # megatron-core's overlap relies on one hardware queue per connection order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return Device(torch.device("cuda", index), "nccl")
