"""What do the replicas of a small group hold, and who of them counts? One exchange of the masters.

Who does not answer by the deadline is left out; the ranks of a replica agree on who was received, so that the group is
the same for the whole model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from noloco_mega.comm.exchange import Missed, Pending, Received
from noloco_mega.outer.base import OuterReport, parts

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco


class Swapped(Protocol):
    """What is swapped: `Masters`."""

    @property
    def tensors(self) -> list[torch.Tensor]: ...


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


@dataclass(frozen=True)
class Group:
    """The replicas of one group that all ranks of this replica hold whole, itself included."""

    report: OuterReport
    members: Mapping[int, list[torch.Tensor]]
    """Replica -> what its masters held at the launch, then its notes; ascending. For this rank, those themselves."""
    device: torch.device

    def tensors(self, index: int, part: slice) -> list[torch.Tensor]:
        """A part of master `index` of each member, on this rank's device, ascending by replica: sums depend on the
        order, and this one is the same for all members."""
        return [tensors[index][part].to(self.device) for tensors in self.members.values()]


class GroupExchange:
    """Swaps this rank's masters with those of its twins in the group that the plan draws for an outer step.

    Memory beside the masters: one receive buffer per partner (on CUDA in pinned host memory, as is one copy of the
    masters to send from).
    """

    def __init__(self, masters: Swapped, settings: Noloco, peers: Peers, notes: Sequence[torch.Tensor] = ()) -> None:
        """`notes` are small tensors on the CPU that travel behind the masters."""
        self._settings, self._masters, self._peers, self._notes = settings, masters, peers, notes
        self._buffers: list[list[torch.Tensor]] = []
        self._pinned: list[torch.Tensor] = []
        self._flight: _Flight | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing was launched that is not finished."""
        return self._flight is None

    def launch(self, outer_step: int, *, but: Collection[int] = (), patience: float = 1.0) -> None:
        """Begin to swap the masters as they are now; nobody may touch them until `finish` has returned.

        Nobody of `but` is asked. The partners are met within `patience` times the deadline of the settings.
        """
        assert self._flight is None, "launched twice without apply"
        peers, settings = self._peers, self._settings
        partners = tuple(partner for partner in peers.partners(outer_step, settings) if partner not in but)
        reachable = [partner for partner in partners if partner in peers.addresses]
        buffers = dict(zip(reachable, self._host_buffers(len(reachable)), strict=True))
        exchange = peers.exchange
        sent_bytes, received_bytes, started_seconds = exchange.sent_bytes, exchange.received_bytes, time.monotonic()
        pending = exchange.launch(
            outer_step,
            self._to_send(),
            buffers,
            {partner: peers.addresses[partner] for partner in reachable},
            patience * settings.exchange_deadline_seconds,
            settings.transfer_cap_seconds,
        )
        self._flight = _Flight(outer_step, partners, buffers, pending, started_seconds, sent_bytes, received_bytes)

    def finish(self) -> Group:
        """Wait for the partners, by the deadline, and agree on who counts. Collective over the replica."""
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
        report = OuterReport(
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
        members = {partner: flight.buffers[partner] for partner in received}
        members[self._peers.replica] = [*self._masters.tensors, *self._notes]
        return Group(report, dict(sorted(members.items())), self._masters.tensors[0].device)

    def _measure(self, arrived: Mapping[int, list[torch.Tensor]]) -> tuple[float, dict[int, float], dict[int, bool]]:
        """Of this rank: Σ c_i², Σ (c_i − c_j)² per partner, and whether all of the partner's c_j is finite.

        One replica whose weights have become NaN would hand that on to all others in a few outer steps.
        """
        masters = self._masters.tensors
        device = masters[0].device
        squares = torch.zeros(1 + 2 * len(arrived), dtype=torch.float64, device=device)
        for index, part in parts(masters):
            own = masters[index][part]
            squares[0] += _square(own)
            for position, tensors in enumerate(arrived.values()):
                other = tensors[index][part].to(device)
                squares[1 + 2 * position] += _square(own - other)
                squares[2 + 2 * position] += _square(other)
        own_square, *rest = squares.tolist()
        differences = dict(zip(arrived, rest[0::2], strict=True))
        return own_square, differences, {p: math.isfinite(s) for p, s in zip(arrived, rest[1::2], strict=True)}

    def _spread(self, own: float, differences: list[float]) -> float | None:
        own, *differences = self._peers.total([own, *differences])
        if own == 0:
            return None
        return sum((difference / own) ** 0.5 for difference in differences) / len(differences)

    def _to_send(self) -> list[torch.Tensor]:
        """The masters, where the network can read them, and the notes."""
        masters = self._masters.tensors
        if not masters[0].is_cuda:
            return [*(theta.detach() for theta in masters), *self._notes]
        if not self._pinned:
            self._pinned = [torch.empty(theta.shape, dtype=theta.dtype, pin_memory=True) for theta in masters]
        for pinned, theta in zip(self._pinned, masters, strict=True):
            pinned.copy_(theta)
        return [*self._pinned, *self._notes]

    def _host_buffers(self, count: int) -> list[list[torch.Tensor]]:
        """Receive buffers for `count` partners, made on first use and kept."""
        while len(self._buffers) < count:
            like = [*self._masters.tensors, *self._notes]
            self._buffers.append([torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in like])
        return self._buffers[:count]


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean, added up in the order given: with one order all members of a group get the bitwise same one."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        total.add_(other)
    return total.div_(len(tensors))


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """Σ x², float64 []."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _reason(outcome: Received | Missed | None, finite: bool) -> str:
    if outcome is None:
        return "no address of it is known"
    if isinstance(outcome, Missed):
        return outcome.reason
    return "another rank of this replica missed it" if finite else "its weights are not finite"
