"""Which device, dtype, backend and stream? With mcore_compat.py the only file that says `torch.cuda`."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Mapping
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

    def copy_to_host(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (host tensor, source) and return when all are there; on a GPU the copies are queued together."""
        for host, source in pairs:
            host.copy_(source, non_blocking=self.is_cuda)
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def host_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous CPU tensor of this shape and dtype, page-locked where a GPU will copy into it."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.is_cuda)

    def generator_states(self) -> dict[str, torch.Tensor]:
        """The states of torch's random generators in this process: uint8 tensors on the CPU."""
        states = {"cpu": torch.get_rng_state()}
        if self.is_cuda:
            states["device"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_generator_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go on from a `generator_states` of the same kind of device."""
        torch.set_rng_state(states["cpu"])
        if self.is_cuda and "device" in states:
            torch.cuda.set_rng_state(states["device"], self.device)


def select(local_rank: int, wanted: str = "auto") -> Device:
    """The device of a process: its node's GPU number `local_rank` where CUDA exists, else the CPU.

    A launcher that gives each task one GPU of its own (SLURM's --gpus-per-task) names it in CUDA_VISIBLE_DEVICES; the
    process then knows it as number 0, whatever its local rank. Must run before any process group exists: it sets what
    NCCL's watchdog reads once. `wanted` is the config's run.device. Raises ValueError if the node has fewer GPUs than
    local ranks, or none although "cuda" is wanted.
    """
    if wanted == "cpu":
        return Device(torch.device("cpu"), "gloo")
    if not torch.cuda.is_available():
        if wanted == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise ValueError(
                f'run.device is "cuda", but this process on {socket.gethostname()} sees no GPU: '
                f"CUDA_VISIBLE_DEVICES is {visible} and torch {torch.__version__}"
                + (f" was built for CUDA {torch.version.cuda}" if torch.version.cuda else " was built without CUDA")
                + '. Ask the scheduler for GPUs, install a CUDA build of torch, or set run.device to "auto"'
            )
        return Device(torch.device("cpu"), "gloo")
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    index = 0 if len(named) == 1 else local_rank
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


def bound_nccl(seconds: float) -> None:
    """Let no NCCL call of this process stay in progress for longer than `seconds`, rounded up to whole ones.

    A communicator in non-blocking mode connects, and launches, while PyTorch waits for it; that wait does not know the
    timeout of the operation, only TORCH_NCCL_NONBLOCKING_TIMEOUT (half an hour unless set). PyTorch reads it once: call
    this before any process group exists. A value that the user has set stays.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, math.ceil(seconds))))
