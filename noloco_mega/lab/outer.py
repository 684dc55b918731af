"""How do N replicas take an outer step in one process? The outer optimizers' own formulas on stacked weights [N, P].

Every optimizer here is the one of the same name in outer/, without the network: whoever would have been asked has
answered.

Letters: N replicas, P parameters of the model, n members of a group; θ fast and φ slow weights, Δ = θ − φ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from noloco_mega import costs
from noloco_mega.comm import codec
from noloco_mega.config import Noloco
from noloco_mega.outer import coding, noloco
from noloco_mega.outer.group import mean
from noloco_mega.outer.slow import momentum_step_
from noloco_mega.plan import keys, pairing


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one outer step was, for each replica."""

    partners: list[tuple[int, ...]]
    """The other members of its group, ascending."""
    payload_bytes: list[int]
    """What a run's metrics would count (journal.py): sent to partners, or handed to all-reduces since the last step."""
    sent_bytes: list[int]
    """What it would send in this step, an all-reduce going around a ring."""
    spread: list[float | None]
    """‖x_i − x_j‖ / ‖x_i‖ of what the group exchanged, the mean over the others; None without others."""
    wrap_rate: list[float | None]
    """As a run's metrics have it; None without a codec or without others."""


class Outer(Protocol):
    """An outer optimizer on N replicas."""

    settings: Noloco
    """Those of the next outer step: between outer steps others may take their place that differ in γ."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        """`theta` [N, P] are the fast weights, which it keeps and changes in place; all rows are equal at the start."""

    def average_gradients(self, gradients: Tensor) -> list[int]:
        """Before every inner step: what crosses between replicas then, in place on [N, P]; the bytes each has sent."""
        return [0] * len(gradients)

    def step(self, outer_step: int) -> Exchanged:
        """Outer step `outer_step`, counted from 0."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its tensors by name, live."""
        return {}


class NoLoCo(Outer):
    """Groups of n and the modified Nesterov step (outer/noloco.py)."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings
        self._form = noloco.FORMS[settings.combine]
        self._phi = theta.clone()
        self._delta = torch.zeros_like(theta)
        self._swap = Swap(theta, settings, self._phi, self._form.at_rest(settings))

    @torch.no_grad()
    def step(self, outer_step: int) -> Exchanged:
        settings, theta, phi, delta = self.settings, self._theta, self._phi, self._delta
        self._form.contribute_(theta, phi, delta, settings)
        held, exchanged = self._swap.take(outer_step, _groups(settings, outer_step, len(theta)))
        for member, contributions in enumerate(held):
            self._form.update_(phi[member], delta[member], theta[member], contributions, settings)
        theta.copy_(self._phi)
        return exchanged

    def state(self) -> dict[str, Tensor]:
        return {"phi": self._phi, "delta": self._delta, **self._swap.state()}


class DiLoCo(Outer):
    """One group of everybody (outer/diloco.py). All replicas hold the same φ and δ, so that one row of them is kept.

    With `codec` "absmax", which no run has, every replica's Δ and what rounding left of it last time is rounded first:

        Δ̂_j = Q(Δ_j + r_j),   r_j ← Δ_j + r_j − Δ̂_j

    Q draws between the two nearest of 2^bits equal steps from −max|·| to +max|·| of each block of weights. Bytes
    count as those of a ring that adds up codes at no loss, which is the best that an all-reduce could do with them.
    """

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings
        self._phi = theta[0].clone()
        self._delta = torch.zeros_like(self._phi)
        self._left = torch.zeros_like(theta) if settings.codec == "absmax" else None

    @torch.no_grad()
    def step(self, outer_step: int) -> Exchanged:
        settings = self.settings
        if self._left is not None:
            for replica, (theta, left) in enumerate(zip(self._theta, self._left, strict=True)):
                wanted = left.add_(theta).sub_(self._phi)
                key = keys.key(settings.seed, "absmax", outer_step, replica)
                rounded = absmax_rounded(wanted, codec.dither(key, len(wanted), wanted.device), settings.codec_bits)
                left.sub_(rounded)
                torch.add(self._phi, rounded, out=theta)
        move = (self._theta.mean(0) - self._phi).mul_(settings.outer_lr)
        momentum_step_(
            self._phi,
            self._delta,
            move,
            alpha=settings.outer_momentum,
            beta=settings.outer_lr,
            weight_decay=settings.weight_decay,
            nesterov=settings.nesterov,
        )
        self._theta.copy_(self._phi)
        return _everybody(self._theta, 1, self.settings)

    def state(self) -> dict[str, Tensor]:
        left = {} if self._left is None else {"left": self._left}
        return {"phi": self._phi, "delta": self._delta, **left}


class Gossip(Outer):
    """Groups of n and no momentum: θ_i ← the mean over the group of θ_j."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings
        self._coded = settings.codec != "none"
        self._phi = theta.clone() if self._coded else theta
        self._swap = Swap(theta, settings, self._phi, gamma=1.0)

    @torch.no_grad()
    def step(self, outer_step: int) -> Exchanged:
        theta = self._theta
        held, exchanged = self._swap.take(outer_step, _groups(self.settings, outer_step, len(theta)))
        theta.copy_(torch.stack([mean(contributions) for contributions in held]))
        if self._coded:
            self._phi.copy_(theta)
        return exchanged

    def state(self) -> dict[str, Tensor]:
        return {"phi": self._phi, **self._swap.state()} if self._coded else {}


class AllReduce(Outer):
    """Gradients averaged over all replicas at every inner step; outer steps only report what those have moved."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings
        self._inner_steps = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def average_gradients(self, gradients: Tensor) -> list[int]:
        gradients.copy_(gradients.mean(0))
        self._inner_steps += 1
        return _ring_bytes(gradients, self.settings)

    def step(self, outer_step: int) -> Exchanged:
        reductions = int(self._inner_steps)
        self._inner_steps.zero_()
        exchanged = _everybody(self._theta, reductions, self.settings)
        return replace(exchanged, sent_bytes=[0] * len(self._theta))  # counted where they were sent

    def state(self) -> dict[str, Tensor]:
        return {"inner_steps": self._inner_steps}


class Local(Outer):
    """Every replica trains alone; outer steps are only counted."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._replicas, self.settings = len(theta), settings

    def step(self, outer_step: int) -> Exchanged:
        return _nobody(self._replicas)


OPTIMIZERS: dict[str, type[Outer]] = {
    "noloco": NoLoCo,
    "diloco": DiLoCo,
    "gossip": Gossip,
    "allreduce": AllReduce,
    "local": Local,
}


def _groups(settings: Noloco, outer_step: int, replicas: int) -> pairing.Groups:
    """Of a step in which everybody is present."""
    return pairing.groups(settings.seed, outer_step, range(replicas), settings.group_size, settings.pairing)


class Swap:
    """What each member of a group takes for the others' rows of [N, P]: a run's own coding (outer/coding.py).

    A replica of the simulator has all its weights in one tensor, as a run's has with T = S = D = 1. Where a run is cut
    into more ranks its blocks and its dither are others, and its rounding errors alike.
    """

    def __init__(self, tensors: Tensor, settings: Noloco, rest: Tensor, gamma: float) -> None:
        """`rest` [N, P] · `gamma` is what a replica would bring that has not moved; it stays where it is."""
        self._tensors, self._settings = tensors, settings
        self._codings = [
            coding.build(settings, [tensors[replica]], replica, [rest[replica]], gamma)
            for replica in range(len(tensors))
        ]

    def take(self, outer_step: int, groups: list[tuple[int, ...]]) -> tuple[list[list[Tensor]], Exchanged]:
        """For each replica the rows of its group, ascending, as it takes them; and what the exchange was."""
        tensors, codings = self._tensors, self._codings
        messages = [each.write(outer_step, rank=0) for each in codings]
        held: list[list[Tensor]] = [[row] for row in tensors]
        partners: list[tuple[int, ...]] = [()] * len(tensors)
        spread: list[float | None] = [None] * len(tensors)
        wrap_rate: list[float | None] = [None] * len(tensors)
        for group in groups:
            for member in group:
                own, others = tensors[member], tuple(other for other in group if other != member)
                read = codings[member].read(outer_step, 0, {other: messages[other] for other in others})
                rows = {other: found.tensors[0] for other, found in read.items()} | {member: own}
                partners[member], held[member] = others, [rows[replica] for replica in group]
                squares = [
                    max(float((own - found.tensors[0]).norm()) ** 2 - found.noise, 0.0) for found in read.values()
                ]
                codings[member].learn(others)
                norm = float(own.norm())
                if others and norm > 0:
                    spread[member] = sum(square**0.5 for square in squares) / norm / len(others)
                wrapped, blocks = (
                    sum(getattr(found, what) for found in read.values()) for what in ("wrapped_blocks", "blocks")
                )
                wrap_rate[member] = codec.wrap_rate(wrapped, blocks) if blocks else None
        sent = [costs.message_bytes(self._settings, tensors.shape[1]) * len(others) for others in partners]
        return held, Exchanged(
            partners=partners, payload_bytes=sent, sent_bytes=sent, spread=spread, wrap_rate=wrap_rate
        )

    def state(self) -> dict[str, Tensor]:
        """What the codings know of the pairs' differences, live."""
        found = {}
        for replica, each in enumerate(self._codings):
            if isinstance(each, coding.Modulo):
                found[f"pair_squares.{replica}"] = each.estimate.squares[0]
                found[f"pair_numbers.{replica}"] = each.estimate.numbers
        return found


def absmax_rounded(values: Tensor, u: Tensor, bits: int) -> Tensor:
    """Q(values) with the dither u: 2^bits steps per block, from −max|·| to +max|·|; without bias. fp32 [E]."""
    rows = codec.blocks(values)
    largest = rows.abs().amax(1, keepdim=True)
    step = 2 * largest / (2**bits - 1)
    # Shifted by half a step from 0, as 2^bits is even; beyond the last one only by rounding of the sum.
    numbers = (rows + largest).div_(step).add_(u.view_as(rows)).round_().clamp_(0, 2**bits - 1).nan_to_num_(0.0)
    return numbers.mul_(step).sub_(largest).view(-1)[: len(values)]


def _everybody(tensors: Tensor, reductions: int, settings: Noloco) -> Exchanged:
    """`reductions` all-reduces of one row of [N, P] over all replicas."""
    replicas, size = tensors.shape
    return Exchanged(
        partners=[tuple(other for other in range(replicas) if other != member) for member in range(replicas)],
        payload_bytes=[costs.message_bytes(settings, size) * reductions if replicas > 1 else 0] * replicas,
        sent_bytes=_ring_bytes(tensors, settings),
        spread=[None] * replicas,
        wrap_rate=[None] * replicas,
    )


def _nobody(replicas: int) -> Exchanged:
    zeros = [0] * replicas
    none: list[float | None] = [None] * replicas
    return Exchanged(partners=[()] * replicas, payload_bytes=zeros, sent_bytes=zeros, spread=none, wrap_rate=none)


def _ring_bytes(tensors: Tensor, settings: Noloco) -> list[int]:
    """What each replica sends in a ring all-reduce of one row of [N, P]: 2·(N − 1)/N of it (reduce, then gather)."""
    replicas, size = tensors.shape
    return [round(2 * (replicas - 1) / replicas * costs.message_bytes(settings, size))] * replicas
