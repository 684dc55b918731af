"""How do a few replicas step together? NoLoCo's modified Nesterov step, one exchange among n replicas.

NoLoCo (arXiv 2506.10911v1), Eq. 1 to 3, for the members j of replica i's group and Δ_j = θ_j − φ_j:

    δ_i ← α·δ_i + (β/n)·Σ_j Δ_j − γ·(φ_i − (1/n)·Σ_j φ_j)
    φ_i ← φ_i + δ_i
    θ_i ← φ_i

Deviations, each on purpose:
- The sign of β. Eq. 2 prints −β with Δ = θ − φ, which walks away from θ; Eq. 32 of the appendix has +β, as here.
- One tensor travels instead of two. The sums need only c_j = β·Δ_j + γ·φ_j, and the first line becomes
  δ_i ← α·δ_i + (1/n)·Σ_j c_j − γ·φ_i. A replica alone (n = 1) takes δ ← α·δ + β·Δ in the same form.
- Decoupled weight decay λ, absent from the paper: φ ← φ + δ − β·λ·φ.

Shapes: all tensors are flat, [P] with P the elements of one master; c_j lives in θ_j's own memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from noloco_mega.comm.exchange import Missed, Pending, Received
from noloco_mega.outer.base import OuterOptimizer, OuterReport

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters

CHUNK_ELEMENTS = 1 << 20
"""Elements that one pass of the update works on: bounds its temporaries, which are of this size."""


def contribution_(theta: torch.Tensor, phi: torch.Tensor, *, beta: float, gamma: float) -> None:
    """θ ← c = β·Δ + γ·φ = β·θ + (γ − β)·φ, in place: what one member brings to its group."""
    theta.mul_(beta).add_(phi, alpha=gamma - beta)


def update_(
    phi: torch.Tensor,
    delta: torch.Tensor,
    contributions: Sequence[torch.Tensor],
    *,
    alpha: float,
    beta: float,
    gamma: float,
    weight_decay: float,
) -> None:
    """δ ← α·δ + (1/n)·Σ_j c_j − γ·φ and φ ← φ + δ − β·λ·φ, in place; the contributions are only read.

    All members must pass them in the same order, their own included: floating-point sums depend on it, and with one
    order all members add the bitwise same mean.
    """
    mean = contributions[0].clone()
    for other in contributions[1:]:
        mean.add_(other)
    mean.div_(len(contributions))
    delta.mul_(alpha).add_(mean.sub_(phi, alpha=gamma))
    phi.mul_(1 - beta * weight_decay).add_(delta)


@dataclass(frozen=True)
class _Flight:
    """An exchange under way."""

    outer_step: int
    partners: tuple[int, ...]
    buffers: Mapping[int, list[torch.Tensor]]
    pending: Pending
    started_seconds: float
    sent_bytes: int
    received_bytes: int


class NoLoCo(OuterOptimizer):
    """The outer step on one rank's masters: slow weights φ and outer momentum δ shard exactly as they do.

    Memory beside the masters: φ, δ, and one receive buffer per partner (on CUDA in pinned host memory, as is one copy
    of c to send from). There is no look-ahead evaluation, so with one group of all replicas this is DiLoCo with
    heavy-ball momentum.
    """

    catches_up = True

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        self.settings = settings
        self.phi = [theta.detach().clone() for theta in masters.tensors]
        self.delta = [torch.zeros_like(phi) for phi in self.phi]
        self._masters = masters
        self._peers = peers
        self._buffers: list[list[torch.Tensor]] = []
        self._pinned: list[torch.Tensor] = []
        self._flight: _Flight | None = None

    @torch.no_grad()
    def launch(self, outer_step: int) -> None:
        assert self._flight is None, "launched twice without apply"
        peers, settings = self._peers, self.settings
        partners = peers.partners(outer_step, settings)
        for theta, phi in zip(self._masters.tensors, self.phi, strict=True):
            contribution_(theta, phi, beta=settings.outer_lr, gamma=settings.gamma)
        reachable = [partner for partner in partners if partner in peers.addresses]
        buffers = dict(zip(reachable, self._host_buffers(len(reachable)), strict=True))
        exchange = peers.exchange
        sent_bytes, received_bytes, started_seconds = exchange.sent_bytes, exchange.received_bytes, time.monotonic()
        pending = exchange.launch(
            outer_step,
            self._to_send(),
            buffers,
            {partner: peers.addresses[partner] for partner in reachable},
            settings.exchange_deadline_seconds,
            settings.transfer_cap_seconds,
        )
        self._flight = _Flight(outer_step, partners, buffers, pending, started_seconds, sent_bytes, received_bytes)

    @torch.no_grad()
    def apply(self) -> OuterReport:
        assert self._flight is not None, "apply without launch"
        flight, self._flight = self._flight, None
        outcomes = flight.pending.wait()
        exchange_seconds = time.monotonic() - flight.started_seconds
        arrived = {partner: outcome for partner, outcome in outcomes.items() if isinstance(outcome, Received)}
        own, differences, finite = self._measure({partner: flight.buffers[partner] for partner in arrived})
        # A member counts only if all ranks of the replica hold its data: n must be the same for the whole model.
        whole = self._peers.agree(*(finite.get(partner, False) for partner in flight.partners))
        received = tuple(partner for partner, good in zip(flight.partners, whole, strict=True) if good)
        missed = {
            partner: _reason(outcomes.get(partner), finite.get(partner, False))
            for partner in flight.partners
            if partner not in received
        }
        self._step({partner: flight.buffers[partner] for partner in received})
        self._masters.publish()
        return OuterReport(
            outer_step=flight.outer_step,
            asked=flight.partners,
            received=received,
            missed=missed,
            unacknowledged=tuple(partner for partner in received if not arrived[partner].acknowledged),
            exchange_seconds=exchange_seconds,
            sent_bytes=self._peers.exchange.sent_bytes - flight.sent_bytes,
            received_bytes=self._peers.exchange.received_bytes - flight.received_bytes,
            spread=self._spread(own, [differences[partner] for partner in received]) if received else None,
        )

    def state_dict(self) -> dict[str, Any]:
        assert self._flight is None, "the state is only whole between outer steps"
        return {"phi": self.phi, "delta": self.delta}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, own in (("phi", self.phi), ("delta", self.delta)):
            sizes = [tensor.numel() for tensor in own]
            loaded = [tensor.numel() for tensor in state[name]]
            if loaded != sizes:
                raise ValueError(
                    f"the outer optimizer's {name} has tensors of {sizes} elements on this rank, the state to load "
                    f"{loaded}; load it with the topology that saved it"
                )
            for tensor, value in zip(own, state[name], strict=True):
                tensor.copy_(value)

    def _measure(self, arrived: Mapping[int, list[torch.Tensor]]) -> tuple[float, dict[int, float], dict[int, bool]]:
        """Of this rank: Σ c_i², Σ (c_i − c_j)² per partner, and whether all of the partner's c_j is finite.

        One replica whose weights have become NaN would hand that on to all others in a few outer steps.
        """
        device = self.phi[0].device
        squares = torch.zeros(1 + 2 * len(arrived), dtype=torch.float64, device=device)
        for index, part in self._parts():
            own = self._masters.tensors[index][part]
            squares[0] += _square(own)
            for position, tensors in enumerate(arrived.values()):
                other = tensors[index][part].to(device)
                squares[1 + 2 * position] += _square(own - other)
                squares[2 + 2 * position] += _square(other)
        own_square, *rest = squares.tolist()
        differences = dict(zip(arrived, rest[0::2], strict=True))
        return own_square, differences, {p: math.isfinite(s) for p, s in zip(arrived, rest[1::2], strict=True)}

    def _step(self, received: Mapping[int, list[torch.Tensor]]) -> None:
        """Take the step with these members: θ, which holds c, becomes φ."""
        settings, replica, device = self.settings, self._peers.replica, self.phi[0].device
        members = sorted([replica, *received])
        for index, part in self._parts():
            own, phi = self._masters.tensors[index][part], self.phi[index][part]
            update_(
                phi,
                self.delta[index][part],
                [own if member == replica else received[member][index][part].to(device) for member in members],
                alpha=settings.outer_momentum,
                beta=settings.outer_lr,
                gamma=settings.gamma,
                weight_decay=settings.weight_decay,
            )
            own.copy_(phi)

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """All masters in pieces of CHUNK_ELEMENTS: (index of the master, elements of it)."""
        for index, phi in enumerate(self.phi):
            for start in range(0, phi.numel(), CHUNK_ELEMENTS):
                yield index, slice(start, start + CHUNK_ELEMENTS)

    def _spread(self, own: float, differences: list[float]) -> float | None:
        own, *differences = self._peers.total([own, *differences])
        if own == 0:
            return None
        return sum((difference / own) ** 0.5 for difference in differences) / len(differences)

    def _to_send(self) -> list[torch.Tensor]:
        """The masters, which hold c by now, where the network can read them."""
        masters = self._masters.tensors
        if not masters[0].is_cuda:
            return [theta.detach() for theta in masters]
        if not self._pinned:
            self._pinned = [torch.empty(theta.shape, dtype=theta.dtype, pin_memory=True) for theta in masters]
        for pinned, theta in zip(self._pinned, masters, strict=True):
            pinned.copy_(theta)
        return self._pinned

    def _host_buffers(self, count: int) -> list[list[torch.Tensor]]:
        """Receive buffers for `count` partners, made on first use and kept."""
        while len(self._buffers) < count:
            self._buffers.append([torch.empty(phi.shape, dtype=phi.dtype, pin_memory=phi.is_cuda) for phi in self.phi])
        return self._buffers[:count]


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """Σ x², float64 []."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _reason(outcome: Received | Missed | None, finite: bool) -> str:
    if outcome is None:
        return "no address of it is known"
    if isinstance(outcome, Missed):
        return outcome.reason
    return "another rank of this replica missed it" if finite else "its weights are not finite"
