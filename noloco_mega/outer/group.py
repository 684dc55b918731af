"""What do the replicas of a small group hold, and who of them counts? One exchange of the masters.

Who does not answer by the deadline is left out; the ranks of a replica agree on who was received, so that the group is
the same for the whole model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from noloco_mega.comm import codec
from noloco_mega.comm.exchange import Missed, Pending, Received
from noloco_mega.outer.base import OuterReport, parts
from noloco_mega.outer.coding import Coding, Message, Read

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
    buffers: Mapping[int, Message]
    pending: Pending
    started_seconds: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Group:
    """The replicas of one group that all ranks of this replica hold whole, itself included."""

    report: OuterReport
    members: Mapping[int, list[torch.Tensor]]
    """Replica -> what its masters held at the launch, as far as its message tells, then its notes; ascending. For this
    rank, those themselves."""
    device: torch.device

    def tensors(self, index: int, part: slice) -> list[torch.Tensor]:
        """A part of master `index` of each member, on this rank's device, ascending by replica: sums depend on the
        order, and this one is the same for all members."""
        return [tensors[index][part].to(self.device) for tensors in self.members.values()]


class GroupExchange:
    """Swaps this rank's masters with those of its twins in the group that the plan draws for an outer step.

    Memory beside the masters: a receive buffer per partner, and the message where it is not the masters themselves.
    """

    def __init__(
        self, masters: Swapped, settings: Noloco, peers: Peers, coding: Coding, notes: Sequence[torch.Tensor] = ()
    ) -> None:
        """`notes` are small tensors on the CPU that travel behind the masters, as they are."""
        self._settings, self._masters, self._peers, self._coding = settings, masters, peers, coding
        self._notes = notes
        self._note_buffers: list[list[torch.Tensor]] = []
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
        buffers = dict(zip(reachable, self._buffers(len(reachable)), strict=True))
        exchange = peers.exchange
        sent_bytes, received_bytes, started_seconds = exchange.sent_bytes, exchange.received_bytes, time.monotonic()
        pending = exchange.launch(
            outer_step,
            [*self._coding.write(outer_step, exchange.rank), *self._notes],
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
        length = self._coding.length
        messages = {partner: flight.buffers[partner][:length] for partner in arrived}
        notes = {partner: flight.buffers[partner][length:] for partner in arrived}
        read = self._coding.read(flight.outer_step, self._peers.exchange.rank, messages)
        own, differences, finite = self._measure(read)
        # A member counts only if all ranks of the replica hold its data: n must be the same for the whole model.
        whole = self._peers.agree(*(finite.get(partner, False) for partner in flight.partners))
        received = tuple(partner for partner, good in zip(flight.partners, whole, strict=True) if good)
        missed = {
            partner: _reason(outcomes.get(partner), finite.get(partner, False), math.isfinite(own))
            for partner in flight.partners
            if partner not in received
        }
        counted = {partner: read[partner] for partner in received}
        self._coding.learn(received)
        spread, wrap_rate = self._spread(own, [differences[partner] for partner in received], counted)
        report = OuterReport(
            outer_step=flight.outer_step,
            asked=flight.partners,
            received=received,
            missed=missed,
            unacknowledged=tuple(partner for partner in received if not arrived[partner].acknowledged),
            exchange_seconds=exchange_seconds,
            sent_bytes=self._peers.exchange.sent_bytes - flight.sent_bytes,
            received_bytes=self._peers.exchange.received_bytes - flight.received_bytes,
            spread=spread,
            wrap_rate=wrap_rate,
        )
        members = {partner: [*found.tensors, *notes[partner]] for partner, found in counted.items()}
        members[self._peers.replica] = [*self._masters.tensors, *self._notes]
        return Group(report, dict(sorted(members.items())), self._masters.tensors[0].device)

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange needs to know of earlier ones."""
        return self._coding.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coding.load_state_dict(state)

    def _buffers(self, count: int) -> list[Message]:
        """Where the messages and notes of `count` partners can go, made on first use and kept."""
        while len(self._note_buffers) < count:
            self._note_buffers.append([torch.empty_like(note) for note in self._notes])
        return [
            [*message, *notes] for message, notes in zip(self._coding.buffers(count), self._note_buffers, strict=False)
        ]

    def _measure(self, arrived: Mapping[int, Read]) -> tuple[float, dict[int, float], dict[int, bool]]:
        """Of this rank: Σ c_i², Σ (c_i − c_j)² per partner, without what a code's noise adds to it on average, and
        whether all of the partner's c_j is finite.

        One replica whose weights have become NaN would hand that on to all others in a few outer steps.
        """
        masters = self._masters.tensors
        device = masters[0].device
        squares = torch.zeros(1 + 2 * len(arrived), dtype=torch.float64, device=device)
        for index, part in parts(masters):
            own = masters[index][part]
            squares[0] += _square(own)
            for position, read in enumerate(arrived.values()):
                other = read.tensors[index][part].to(device)
                squares[1 + 2 * position] += _square(own - other)
                squares[2 + 2 * position] += _square(other)
        own_square, *rest = squares.tolist()
        differences = {p: max(d - arrived[p].noise, 0.0) for p, d in zip(arrived, rest[0::2], strict=True)}
        return own_square, differences, {p: math.isfinite(s) for p, s in zip(arrived, rest[1::2], strict=True)}

    def _spread(
        self, own: float, differences: Sequence[float], counted: Mapping[int, Read]
    ) -> tuple[float | None, float | None]:
        """The spread and the wrap rate over the whole replica. Collective over it where somebody counts."""
        if not counted:
            return None, None
        wrapped, blocks = (
            sum(getattr(found, what) for found in counted.values()) for what in ("wrapped_blocks", "blocks")
        )
        own, wrapped, blocks, *differences = self._peers.total([own, wrapped, blocks, *differences])
        wrap_rate = codec.wrap_rate(round(wrapped), round(blocks)) if blocks else None
        if own == 0:
            return None, wrap_rate
        return sum((difference / own) ** 0.5 for difference in differences) / len(differences), wrap_rate


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean, added up in the order given: with one order all members of a group get the bitwise same one."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        total.add_(other)
    return total.div_(len(tensors))


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """Σ x², float64 []."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _reason(outcome: Received | Missed | None, finite: bool, own_finite: bool) -> str:
    if outcome is None:
        return "no address of it is known"
    if isinstance(outcome, Missed):
        return outcome.reason
    if finite:
        return "another rank of this replica missed it"
    return "its weights are not finite" if own_finite else "this replica's own weights are not finite"
