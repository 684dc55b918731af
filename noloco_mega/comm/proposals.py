"""Which circuit should there be, and who has formed it so far? The part of a site's lowest replica that is able.

It proposes a circuit of all that are able, hears of each member whether all its ranks have formed the links, and once
all have, commits them to enter it two outer steps after the phase that the furthest is in. A member that a proposal
fails on is left out of the next ones, for longer each time: it stays on its own pipeline, and paired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from noloco_mega.comm.roster import Roster
from noloco_mega.comm.stores import serve_store
from noloco_mega.comm.terms import Terms
from noloco_mega.comm.wire import Message

OUTER_STEPS_AHEAD = 2
"""From the phase that is under way to the one in which a new circuit is entered."""
SPARED_BEATS = 4
"""Heartbeats for which a replica that could not form a circuit is left out of the next; twice as many each time."""
LONGEST_SPARED = 5
"""Doublings."""


@dataclass
class _Proposal:
    """A circuit that this leader has proposed."""

    number: int
    members: tuple[int, ...]
    deadline: float
    stores: list[dist.Store]
    """Kept while the members connect to them."""
    formed: set[int] = field(default_factory=set)
    committed: bool = False


class Proposals:
    """The circuits that one leader proposes, one at a time."""

    def __init__(
        self, terms: Terms, roster: Roster, tell: Callable[[int, Message], None], dissolve: Callable[[int], None]
    ) -> None:
        """`tell` sends a message about circuits to a leader, this one included; `dissolve` ends a circuit for all."""
        self._terms, self._roster, self._tell, self._dissolve = terms, roster, tell, dissolve
        self._proposal: _Proposal | None = None
        self._spared: dict[int, float] = {}
        """Replica -> when (time.monotonic()) it may be a member again."""
        self._failures: dict[int, int] = {}

    def propose(self, members_of: Mapping[int, Sequence[int]]) -> None:
        """Propose the circuit that there should be and is not, if this is for this replica to do, and give up one that
        has not formed in time. `members_of` are the members of the circuits that this replica is or may be on."""
        proposal, now = self._proposal, time.monotonic()
        if proposal is not None and not proposal.committed:
            if now < proposal.deadline:
                return
            self._spare(set(proposal.members) - proposal.formed)
            self._dissolve(proposal.number)
        members, terms = self._wanted(now, members_of), self._terms
        if members is None or self._first_outer_step(members) * terms.inner_steps >= terms.steps:
            return
        standings = self._roster.standings(members).values()
        number = terms.next_number(max(max(s.circuit, s.highest_circuit) for s in standings))
        stores = [serve_store(terms.host, timedelta(seconds=terms.form_seconds)) for _ in range(terms.columns)]
        self._proposal = _Proposal(number, members, now + terms.form_seconds, [store for store, _ in stores])
        message = {"propose": number, "members": list(members), "stores": [list(where) for _, where in stores]}
        for member in members:
            self._tell(member, message)

    def formed(self, member: int, number: int, problem: str | None) -> None:
        """All ranks of a member have formed a circuit, or one of them could not."""
        proposal = self._proposal
        if proposal is None or proposal.number != number or proposal.committed:
            return
        if problem is not None:
            self._spare([member])
            self._dissolve(number)
            return
        proposal.formed.add(member)
        if proposal.formed == set(proposal.members):
            proposal.committed = True
            for member in proposal.members:
                self._failures.pop(member, None)
            from_step = self._first_outer_step(proposal.members) * self._terms.inner_steps
            for member in proposal.members:
                self._tell(member, {"commit": number, "from_step": from_step})

    def called_off(self, sender: int, number: int) -> None:
        """Another leader has dissolved a circuit."""
        proposal = self._proposal
        if proposal is not None and proposal.number == number and not proposal.committed:
            self._spare([sender])  # it takes another member for dead, and would do so again at once

    def dissolved(self, number: int) -> None:
        """A circuit is over."""
        if self._proposal is not None and self._proposal.number == number:
            self._proposal = None

    def _wanted(self, now: float, members_of: Mapping[int, Sequence[int]]) -> tuple[int, ...] | None:
        """The members of the circuit that there should be and is not, if this replica is the one to propose it."""
        self._spared = {replica: until for replica, until in self._spared.items() if until > now}
        members = tuple(r for r in self._roster.able() if r in self._terms.site and r not in self._spared)
        if not self._terms.routes or len(members) < 2 or members[0] != self._terms.replica:
            return None
        numbers = {standing.circuit for standing in self._roster.standings(members).values()}
        settled = len(numbers) == 1 and members_of.get(*numbers) == members
        coming = self._proposal is not None and self._proposal.members == members
        return None if settled or coming else members

    def _first_outer_step(self, members: Sequence[int]) -> int:
        """The phase in which a circuit of these, agreed now, begins."""
        begun = max(standing.launched for standing in self._roster.standings(members).values())
        return begun + 1 + OUTER_STEPS_AHEAD

    def _spare(self, replicas: Iterable[int]) -> None:
        """Leave out replicas for a while that a proposed circuit has failed on."""
        for replica in replicas:
            doublings = self._failures.get(replica, 0)
            beats = SPARED_BEATS * 2**doublings
            self._spared[replica] = time.monotonic() + beats * self._terms.heartbeat_seconds
            self._failures[replica] = min(doublings + 1, LONGEST_SPARED)
