"""What do the ranks of one replica do about the other replicas, between two inner steps?

After the forward and backward passes of a step all ranks of a replica agree (one reduction): were all links good, has
somebody asked to stop, which orders has the leader given, does this phase have to end early. So whatever the leader
learned, at any time, takes effect between the same two steps on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from noloco_mega.comm.circuits import Circuits
from noloco_mega.comm.control import NEVER, StopAgreement
from noloco_mega.comm.coordinator import Coordinator
from noloco_mega.comm.membership import Peers
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.roster import Roster
from noloco_mega.comm.routed_p2p import Circuit
from noloco_mega.comm.siblings import Siblings
from noloco_mega.comm.wire import Message
from noloco_mega.plan import lag
from noloco_mega.plan.lag import STAY

if TYPE_CHECKING:
    from noloco_mega.config import Noloco

CONFIRM_SECONDS = 15.0
"""How long a stopping replica waits for silent ones: launchers kill what has not ended 30 s after their own SIGTERM."""


@dataclass(frozen=True)
class Agreed:
    """What the ranks of a replica agreed on after the passes of an inner step; equal on all of them."""

    links_good: bool
    """Nobody lost a link: the gradients are whole."""
    nobody_asked: bool
    """Nobody was asked to stop."""
    leaves: bool
    """Somebody was asked to leave the run, which goes on."""
    stop_step: int
    """The step that the run stops at, NEVER if none is known."""
    hurry_to: int
    """The outer step that this inner step is to be the last one before, or STAY."""


class Wanted(Protocol):
    """Whether a replica that joins waits for this one's state; checkpoint/donor.py's Donor is one."""

    @property
    def wanted(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Lead:
    """What only the leader of a replica has."""

    coordinator: Coordinator
    roster: Roster
    stopping: StopAgreement
    donor: Wanted


class Steering:
    """One rank's part. All ranks of a replica call `agree` after every step, and everything else alike."""

    def __init__(
        self,
        settings: Noloco,
        peers: Peers,
        circuits: Circuits,
        siblings: Siblings,
        orders: Orders,
        lead: Lead | None,
        rank: int,
        catches_up: bool,
        steps: int,
    ) -> None:
        """`lead` is the leader's; `catches_up`: whether this replica may skip inner steps to meet its partners;
        `steps`: how many the run has."""
        self._last_outer_step = steps // settings.inner_steps - 1
        self._settings, self._peers, self._circuits = settings, peers, circuits
        self._siblings, self._orders, self._lead, self._rank = siblings, orders, lead, rank
        self._catches_up = catches_up
        self.donates = False
        """Whether somebody waits for a copy of this replica's state, as it will be after the next outer step."""
        self._asked_to_donate = False
        self.suspected = False
        """Whether this replica's weights are to be looked at: it was on the way of several bad microbatches."""
        self._phase: tuple[int, float] = (-1, 0.0)
        self._on_order: dict[str, Callable[[Message], None]] = {
            "present": self._follow,
            "circuit": self._schedule,
            "cancel": self._cancel,
            "donate": self._donate,
            "check": self._suspect,
        }
        """What to do about an order, by the key that tells its kind."""

    @property
    def circuit(self) -> Circuit:
        """What microbatches take."""
        return self._circuits.current

    @property
    def routed(self) -> tuple[int, ...]:
        """The replicas that microbatches are routed among; none on the own pipeline."""
        return self._circuits.members

    @property
    def local(self) -> Circuit:
        """The ordinary pipeline of this replica."""
        return self._circuits.local

    def enter(self, step: int) -> None:
        """At the start of inner step `step`: change over to a circuit that was agreed on for it. Raises LinkBroken."""
        phase = step // self._settings.inner_steps
        if phase != self._phase[0]:
            self._phase = (phase, time.monotonic())
            self._circuits.tidy()
        self._circuits.enter(step)
        if self._lead is not None:
            self._lead.coordinator.report(step=step, circuit=self._circuits.number)

    def broke(self) -> None:
        """A link of this rank's broke: nobody else shall wait for it."""
        if self._lead is not None:
            self._lead.coordinator.broken(self._circuits.number)
        else:
            self._siblings.tell({"broken": self._circuits.number})

    def leave_circuit(self) -> None:
        """From now on the own pipeline, until another circuit is agreed on.

        Raises LinkBroken where that is what broke: then a rank of the replica is gone, and so is the replica.
        """
        number = self._circuits.leave()
        if self._lead is not None:
            self._lead.coordinator.broken(number)

    def agree(self, step: int, links_good: bool, asked: bool, leaves: bool = False) -> Agreed:
        """After the passes of inner step `step`: whether this rank's links were good, and whether it was asked to stop
        the run, or to leave it. Where the others could not go on without this replica, nor take it in again, that is
        the same. Collective over the replica."""
        lead = self._lead
        if not self._catches_up:
            asked, leaves = asked or leaves, False
        stop_step = orders = hurry_to = NEVER
        if lead is not None:
            if lead.donor.wanted and not self._asked_to_donate:
                self._asked_to_donate = True
                self._orders.give({"donate": True})
            stop_step, orders, hurry_to = lead.stopping.decide(step), self._orders.count, self._hurry_to(step)
        good, nobody_asked, stays, stop_step, orders, hurry_to = self._peers.agree(
            links_good, not asked, not leaves, stop_step, orders, hurry_to
        )
        for order in self._orders.take(orders):
            for kind in order.keys() & self._on_order.keys():
                self._on_order[kind](order)
        if not good:
            hurry_to = STAY
        if lead is not None and good:
            last = hurry_to != STAY or (step + 1) % self._settings.inner_steps == 0
            if last:
                lead.coordinator.report(launched=max(hurry_to, step // self._settings.inner_steps))
        return Agreed(bool(good), bool(nobody_asked), not stays, stop_step, hurry_to)

    def bad_step(self, step: int, routes: Sequence[Sequence[int]]) -> None:
        """In inner step `step` microbatches along these routes had a loss that is not finite, as seen here."""
        if routes and self._lead is not None:
            self._lead.coordinator.bad(step, routes)
        elif routes:
            self._siblings.tell({"bad": step, "routes": [list(route) for route in routes]})

    def cleared(self, finite: bool) -> bool:
        """This rank's weights are finite, or not; whether those of the whole replica are. Collective over it.

        A replica whose weights are not leaves the circuits, and the pairs, until it is `ready` again.
        """
        self.suspected = False
        (sound,) = self._peers.agree(finite)
        if not sound:
            if self._lead is not None:
                self._lead.coordinator.withdraw()
            self._withdraw()
        return bool(sound)

    def donated(self) -> None:
        """Who waited for this replica's state can have it now."""
        self.donates = self._asked_to_donate = False

    def choose_donor(self, but: Collection[int] = ()) -> int:
        """The replica to take the state from: the furthest, and of those the nearest in number. NEVER if there is none.

        Not one of `but`. Collective over the replica.
        """
        choice = NEVER
        if self._lead is not None:
            roster, own = self._lead.roster, self._peers.replica
            able = [r for r in roster.able() if r != own and r not in but and r in self._peers.addresses]
            standings = roster.standings(able)
            choice = min(standings, key=lambda r: (-standings[r].launched, abs(r - own)), default=NEVER)
        return self._peers.agree(choice)[0]

    def ready(self, step: int) -> None:
        """This replica has the run's state and trains from inner step `step` on: it may be paired and routed."""
        if self._lead is not None:
            launched = step // self._settings.inner_steps - 1
            self._lead.coordinator.report(step=step, launched=launched, ready=True, sound=True)

    def propose_stop(self, step: int) -> None:
        """Somebody in this replica was asked to stop; `step` inner steps are done."""
        if self._lead is not None:
            self._lead.stopping.propose(step)

    def leave(self) -> None:
        """This replica ends while the run goes on: nobody shall count on it, nor send microbatches its way."""
        if self._lead is not None:
            self._lead.coordinator.report(leaving=True)
        self._withdraw()

    def confirm_stop(self, step: int) -> bool:
        """At stop step `step`: whether all replicas stop here. Collective over the replica."""
        lead = self._lead
        return bool(self._peers.agree(lead is None or lead.stopping.confirm(step, CONFIRM_SECONDS))[0])

    def close(self) -> None:
        """Tell everybody that this rank ends as it should."""
        if self._lead is not None:
            self._lead.coordinator.close()
        self._siblings.leave()
        self._circuits.close()

    def _withdraw(self) -> None:
        """Leave the circuit, and enter none that was agreed on: all of them end, for everybody."""
        for number in self._circuits.withdraw():
            if self._lead is not None:
                self._lead.coordinator.broken(number)

    def _hurry_to(self, step: int) -> int:
        """On the leader: the outer step to end this phase for after inner step `step`, or STAY."""
        assert self._lead is not None
        number, phase = self._circuits.number, step // self._settings.inner_steps
        agreed = self._lead.coordinator.due(number, step)
        if not self._catches_up or (step + 1) % self._settings.inner_steps == 0:
            return STAY
        if agreed >= phase:
            return agreed
        wanted = self._wanted_at(phase)
        if wanted != STAY and number:
            # Coupled with others on the circuit, which must leave out the same steps.
            self._lead.coordinator.hurry(number, step, wanted)
            return STAY
        return wanted

    def _wanted_at(self, phase: int) -> int:
        """On the leader: the outer step that this replica is late for, or STAY."""
        assert self._lead is not None
        settings, roster = self._settings, self._lead.roster
        seconds = time.monotonic() - self._phase[1]
        if settings.inner_phase_seconds is not None and seconds >= settings.inner_phase_seconds:
            return phase
        furthest = min(max(roster.furthest(), self._peers.exchange.latest_outer_step), self._last_outer_step)
        due = self._circuits.due
        if due is not None:  # a circuit has to be entered at its very step
            furthest = min(furthest, due // settings.inner_steps - 1)

        def waited(outer_step: int) -> float | None:
            partners = self._peers.partners(outer_step, settings)
            if partners:
                return roster.waits(partners, outer_step)
            # Alone there is nobody to be late for, but for all the others.
            return None if furthest > outer_step else 0.0

        return lag.hurry_to(phase, furthest, waited, 0.5 * settings.exchange_deadline_seconds)

    def _follow(self, order: Message) -> None:
        twins = {int(replica): ranks[self._rank] for replica, ranks in order["ranks"].items()}
        addresses = {replica: (str(host), int(port)) for replica, (host, port) in twins.items()}
        for replica in order["present"]:
            self._peers.exchange.expect(replica)
        self._peers.follow(order["present"], order["from"] * self._settings.inner_steps, addresses)

    def _donate(self, order: Message) -> None:
        self.donates = True

    def _suspect(self, order: Message) -> None:
        self.suspected = True

    def _schedule(self, order: Message) -> None:
        self._circuits.schedule(order["circuit"], order["from_step"])

    def _cancel(self, order: Message) -> None:
        self._circuits.cancel(order["cancel"])
