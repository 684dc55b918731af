"""Where are the fp32 masters of one rank, and which parameter is which part of them?

Under ZeRO stage 1 the inner optimizer steps one flat fp32 tensor [P] per parameter group: the group's parameters laid
end to end and cut into D equal partitions of P elements, of which this data rank holds its own; zeros pad the last one.
The model's own weights (bf16, or a second fp32 copy) follow from it. DeepSpeed has two classes for this: BF16_Optimizer
for bf16 weights with fp32 gradient accumulation, DeepSpeedZeroOptimizer for all else.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


CHUNK_ELEMENTS = 1 << 20
"""Elements per data rank that travel at once where gradients are gathered."""


class Segment(NamedTuple):
    """`numel` elements that a parameter (flattened, from `parameter_offset`) and a master share."""

    parameter: str
    master: int
    """Index into Masters.tensors."""
    master_offset: int
    parameter_offset: int
    numel: int


class Masters:
    """The masters of a DeepSpeed engine with ZeRO stage 1.

    Raises ValueError for an engine that keeps them elsewhere (other stages, offload) or not in fp32.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        _refuse_other_engines(engine)
        self._engine = engine
        self._names: dict[torch.nn.Parameter, str] = engine.param_names

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the inner optimizer steps (its state's keys), one per parameter group: fp32 [P].

        Write them in place only, under torch.no_grad.
        """
        return [group["params"][0] for group in self._engine.basic_optimizer.param_groups]

    @torch.no_grad()
    def publish(self) -> None:
        """Make the model's weights follow the masters. Collective over the inner data-parallel group."""
        self._engine.optimizer.update_lp_params()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What the coming inner step will clip and use: the gradients of this data rank's masters, in pieces.

        Fp32, or what the engine accumulates in. They exist between the engine's reduction and its step. Write them in
        place, and have `publish_gradients` called after that. Raises ValueError where the engine has none.
        """
        optimizer = self._engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            return list(optimizer.fp32_groups_gradient_flat_partition)
        pieces = [optimizer.averaged_gradients.get(group) for group in range(len(self.tensors))]
        if any(group is None for group in pieces):
            raise ValueError(
                "this engine has no reduced gradients before its step: call engine.backward first, and leave "
                '"managed_gradient_accumulation" out'
            )
        return [piece for group in pieces for piece in group]

    @torch.no_grad()
    def publish_gradients(self) -> None:
        """Make what the engine clips by follow the gradients. Collective over the inner data-parallel group.

        DeepSpeedZeroOptimizer takes the norm of all partitions together. BF16_Optimizer takes it of the whole flat
        gradient that each data rank has, whose other partitions this brings up to date.
        """
        optimizer = self._engine.optimizer
        if not isinstance(optimizer, BF16_Optimizer):
            return
        for whole, own, group in zip(
            optimizer.fp32_groups_gradients_flat,
            optimizer.fp32_groups_gradient_flat_partition,
            optimizer.real_dp_process_group,
            strict=True,
        ):
            ranks = dist.get_world_size(group)
            partitions = whole.view(ranks, -1)
            for start in range(0, own.numel() if ranks > 1 else 0, CHUNK_ELEMENTS):
                part = own[start : start + CHUNK_ELEMENTS]
                gathered = part.new_empty(ranks, part.numel())
                dist.all_gather_into_tensor(gathered.view(-1), part.contiguous(), group=group)
                partitions[:, start : start + CHUNK_ELEMENTS].copy_(gathered)

    def probe(self, count: int = 256) -> torch.Tensor:
        """At most `count` evenly spaced elements of this rank's masters laid end to end: fp32 [count], on the CPU.

        Twins of all replicas read the same places, so the spread of the replicas can be estimated from their probes.
        """
        tensors = self.tensors
        total = sum(tensor.numel() for tensor in tensors)
        places = torch.arange(min(count, total)) * total // min(count, total)
        picked, first = [], 0
        for tensor in tensors:
            inside = places[(places >= first) & (places < first + tensor.numel())] - first
            picked.append(tensor.detach()[inside.to(tensor.device)])
            first += tensor.numel()
        return torch.cat(picked).cpu()

    def segments(self) -> list[Segment]:
        """What this data rank's masters hold, in order; padding belongs to no segment.

        A parameter across the border of two partitions appears in part, here and on the next data rank.
        """
        optimizer, found = self._engine.optimizer, []
        for index, (master, parameters, offsets) in enumerate(zip(self.tensors, *_layout(optimizer), strict=True)):
            size = master.numel()
            start = size * dist.get_rank(optimizer.real_dp_process_group[index])
            for parameter, offset in zip(parameters, offsets, strict=True):
                first, last = max(offset, start), min(offset + parameter.numel(), start + size)
                if first < last:
                    name = self._names[parameter]
                    found.append(Segment(name, index, first - start, first - offset, last - first))
        return found


def _layout(optimizer: Any) -> tuple[list[list[torch.nn.Parameter]], list[list[int]]]:
    """Per parameter group: its parameters in the order of the flat tensor, and where each begins in it."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
    groups = optimizer.bf16_groups
    return groups, [[0, *accumulate(p.numel() for p in parameters[:-1])] for parameters in groups]


def _refuse_other_engines(engine: DeepSpeedEngine) -> None:
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage != 1:
        raise ValueError(
            f"this engine runs ZeRO stage {stage}; the outer step works on the fp32 masters of stage 1: "
            'set "zero_optimization": {"stage": 1}'
        )
    if engine.zero_use_cpu_optimizer():
        raise ValueError(
            "this engine offloads its masters, but the outer step works on them in place: remove "
            "zero_optimization.offload_optimizer"
        )
    if not isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        raise ValueError(
            f"this engine's optimizer is a {type(optimizer).__name__}, which keeps no fp32 masters; give "
            "deepspeed.initialize an optimizer, in its config or as an argument"
        )
    dtypes = {tensor.dtype for group in engine.basic_optimizer.param_groups for tensor in group["params"]}
    if dtypes != {torch.float32}:
        raise ValueError(
            f"this engine keeps its masters in {', '.join(sorted(map(str, dtypes)))}, but the outer step needs fp32: "
            'remove "bf16_master_weights_and_grads" or "fp16_master_weights_and_grads"'
        )


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the names and bytes of a rank's parameters; twins of different replicas compare it at the start."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        data = parameter.detach().cpu().contiguous()
        digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
        digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()
