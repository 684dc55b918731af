"""How do N replicas take an outer step in one process? The outer optimizers' own formulas on stacked weights [N, P].

Every optimizer here is the one of the same name in outer/, without the network: whoever would have been asked has
answered.

Letters: N replicas, P parameters of the model, n members of a group; θ fast and φ slow weights, Δ = θ − φ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from noloco_mega.config import Noloco
from noloco_mega.outer import noloco
from noloco_mega.outer.group import mean
from noloco_mega.outer.slow import momentum_step_
from noloco_mega.plan import pairing

BYTES = 4
"""Of one fp32 element on the wire."""


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

    @torch.no_grad()
    def step(self, outer_step: int) -> Exchanged:
        settings, theta, phi, delta = self.settings, self._theta, self._phi, self._delta
        self._form.contribute_(theta, phi, delta, settings)
        groups = _groups(settings, outer_step, len(theta))
        exchanged = _exchanged(theta, groups)
        for group in groups:
            contributions = [theta[member] for member in group]
            for member in group:
                self._form.update_(phi[member], delta[member], theta[member], contributions, settings)
        theta.copy_(self._phi)
        return exchanged

    def state(self) -> dict[str, Tensor]:
        return {"phi": self._phi, "delta": self._delta}


class DiLoCo(Outer):
    """One group of everybody (outer/diloco.py). All replicas hold the same φ and δ, so that one row of them is kept."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings
        self._phi = theta[0].clone()
        self._delta = torch.zeros_like(self._phi)

    @torch.no_grad()
    def step(self, outer_step: int) -> Exchanged:
        settings = self.settings
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
        return _everybody(self._theta, 1, _ring_bytes(self._theta))

    def state(self) -> dict[str, Tensor]:
        return {"phi": self._phi, "delta": self._delta}


class Gossip(Outer):
    """Groups of n and no momentum: θ_i ← the mean over the group of θ_j."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings

    @torch.no_grad()
    def step(self, outer_step: int) -> Exchanged:
        theta = self._theta
        groups = _groups(self.settings, outer_step, len(theta))
        exchanged = _exchanged(theta, groups)
        for group in groups:
            theta[list(group)] = mean([theta[member] for member in group])
        return exchanged


class AllReduce(Outer):
    """Gradients averaged over all replicas at every inner step; outer steps only report what those have moved."""

    def __init__(self, theta: Tensor, settings: Noloco) -> None:
        self._theta, self.settings = theta, settings
        self._inner_steps = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def average_gradients(self, gradients: Tensor) -> list[int]:
        gradients.copy_(gradients.mean(0))
        self._inner_steps += 1
        return _ring_bytes(gradients)

    def step(self, outer_step: int) -> Exchanged:
        reductions = int(self._inner_steps)
        self._inner_steps.zero_()
        return _everybody(self._theta, reductions, sent_bytes=[0] * len(self._theta))

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


def _exchanged(tensors: Tensor, groups: list[tuple[int, ...]]) -> Exchanged:
    """An exchange of one row of `tensors` [N, P] by each replica within its group."""
    partners: list[tuple[int, ...]] = [()] * len(tensors)
    spread: list[float | None] = [None] * len(tensors)
    for group in groups:
        for member in group:
            others = partners[member] = tuple(other for other in group if other != member)
            own = float(tensors[member].norm())
            if others and own > 0:
                differences = [float((tensors[member] - tensors[other]).norm()) for other in others]
                spread[member] = sum(differences) / own / len(others)
    sent = [BYTES * tensors.shape[1] * len(others) for others in partners]
    return Exchanged(partners=partners, payload_bytes=sent, sent_bytes=sent, spread=spread)


def _everybody(tensors: Tensor, reductions: int, sent_bytes: list[int]) -> Exchanged:
    """`reductions` all-reduces of one row of [N, P] over all replicas."""
    replicas, size = tensors.shape
    return Exchanged(
        partners=[tuple(other for other in range(replicas) if other != member) for member in range(replicas)],
        payload_bytes=[BYTES * size * reductions if replicas > 1 else 0] * replicas,
        sent_bytes=sent_bytes,
        spread=[None] * replicas,
    )


def _nobody(replicas: int) -> Exchanged:
    zeros = [0] * replicas
    return Exchanged(partners=[()] * replicas, payload_bytes=zeros, sent_bytes=zeros, spread=[None] * replicas)


def _ring_bytes(tensors: Tensor) -> list[int]:
    """What each replica sends in a ring all-reduce of one row of [N, P]: 2·(N − 1)/N of it (reduce, then gather)."""
    replicas, size = tensors.shape
    return [round(2 * (replicas - 1) / replicas * BYTES * size)] * replicas
