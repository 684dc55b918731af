"""How do leaders agree on a new circuit, and on the end of one?

    lowest -> members   {"propose": circuit, "members", "stores"}   comm/proposals.py
    member -> lowest    {"formed": circuit, "problem"}              all its ranks have its links, or one has failed
    lowest -> members   {"commit": circuit, "from_step"}            enter it at this inner step
    anybody -> all      {"dissolved": circuit}                      it is over

and what comm/hurry.py says; all of kind "circuit". A circuit is dissolved by whoever sees a link of it fail, or a
member die: everybody goes on from its own first unapplied step along its own pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from noloco_mega.comm.circuits import LOCAL, Circuits
from noloco_mega.comm.control import Leaders
from noloco_mega.comm.hurry import Hurry
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.proposals import Proposals
from noloco_mega.comm.roster import Roster
from noloco_mega.comm.siblings import Siblings
from noloco_mega.comm.terms import Terms, count
from noloco_mega.comm.wire import Message


@dataclass
class _Forming:
    """A circuit that the ranks of this replica are connecting to."""

    proposer: int
    ranks: set[int]
    """Those that are not through yet."""


class CircuitProtocol:
    """One leader's knowledge of circuits, as a member of them. `due` is for the training loop, all else for the control
    thread."""

    def __init__(
        self,
        terms: Terms,
        leaders: Leaders,
        roster: Roster,
        siblings: Siblings,
        circuits: Circuits,
        orders: Orders,
        *,
        form: Callable[[Message], None],
        broken: Callable[[int], None],
    ) -> None:
        """`form` forms a proposed circuit on this rank; `broken` lets the control thread end a circuit, whoever calls
        it."""
        self._terms, self._leaders, self._roster, self._siblings = terms, leaders, roster, siblings
        self._circuits, self._orders, self._form = circuits, orders, form
        self._members: dict[int, tuple[int, ...]] = {}
        """Of the circuits that this replica is a member of and that are not over, by number."""
        self._committed: set[int] = set()
        self._dissolved: set[int] = set()
        self.entered = LOCAL
        """The last circuit that this replica has routed on, or does. Set by the training loop."""
        self._forming: dict[int, _Forming] = {}
        self._proposals = Proposals(terms, roster, self._tell, self.dissolve)
        self._hurry = Hurry(terms.replica, self._tell, broken)

    def begin(self, number: int, members: Sequence[int]) -> None:
        """This circuit was formed before training begins, or is the own pipeline."""
        self._members[number] = tuple(members)
        self._committed.add(number)
        self._roster.say(circuit=number, highest_circuit=number)
        self.entered = number

    def tick(self) -> None:
        """Dissolve the circuits that can't go on, and see to it that there is one."""
        dead = self._roster.dead()
        for number, members in list(self._members.items()):
            if number != LOCAL and dead.keys() & set(members) and not self._over(dead, members):
                self.dissolve(number)
        # A circuit that others are on, and this member has not been told to enter, has to end: they would wait.
        for standing in self._roster.standings(self._roster.able()).values():
            number = standing.circuit
            if self._terms.replica in self._members.get(number, ()) and number not in self._committed:
                self.dissolve(number)
        self._proposals.propose(self._members)

    def heard(self, sender: int, message: Message) -> None:
        """A leader's message about circuits, this one's own included."""
        if "propose" in message:
            self._proposed(sender, message)
        elif "formed" in message:
            self._proposals.formed(sender, int(message["formed"]), message.get("problem"))
        elif "commit" in message:
            self._commit(count(message["commit"]), count(message["from_step"]))
        elif "dissolved" in message:
            number = int(message["dissolved"])
            self._proposals.called_off(sender, number)
            self.dissolve(number, tell=False)
        elif "want" in message:
            self.want_haste(count(message["want"]), self._roster.own.step, count(message["outer"]))
        else:
            self._hurry.heard(sender, message)

    def formed(self, number: int, rank: int, problem: str | None) -> None:
        """A rank of this replica has formed a circuit, or could not."""
        forming = self._forming.get(number)
        if forming is None:
            return
        forming.ranks.discard(rank)
        if problem is not None or not forming.ranks:
            del self._forming[number]
            self._tell(forming.proposer, {"formed": number, "problem": problem})

    def dissolve(self, number: int, tell: bool = True) -> None:
        """A circuit is over, which others may have to be told."""
        if number == LOCAL or number in self._dissolved:
            return
        self._dissolved.add(number)
        self._members.pop(number, None)
        self._circuits.break_off(number)
        self._siblings.tell({"break": number})
        if number in self._committed and self._roster.own.circuit != number:
            self._orders.give({"cancel": number})  # entering it would cost a step more
        self._proposals.dissolved(number)
        if tell:
            self._leaders.broadcast("circuit", {"dissolved": number})
        if number == self.entered:  # though it may be on its own pipeline already
            # A member may be dying, which is known only later: the circuit that was to follow would cost a second step.
            for following in sorted(n for n in self._committed if n > number):
                self.dissolve(following)

    def want_haste(self, number: int, step: int, outer_step: int) -> None:
        """In inner step `step`, on circuit `number`: partners of a member wait for it at outer step `outer_step`."""
        if number in self._members and number not in self._dissolved:
            self._hurry.want(number, self._members[number], step, outer_step)

    def due(self, number: int, step: int) -> int:
        """The outer step that inner step `step` is the last one before, as the circuit has agreed; or STAY."""
        return self._hurry.due(number, step)

    def _tell(self, replica: int, message: Message) -> None:
        if replica == self._terms.replica:
            self.heard(replica, message)
        else:
            self._leaders.tell(replica, "circuit", message)

    def _over(self, dead: Collection[int], members: Sequence[int]) -> bool:
        """Whether the only members missing are those that have ended as they should: after the run's last step."""
        missing = self._roster.standings(replica for replica in members if replica in dead)
        return all(standing.leaving for standing in missing.values())

    def _proposed(self, sender: int, message: Message) -> None:
        number, members = int(message["propose"]), tuple(sorted(int(replica) for replica in message["members"]))
        if self._terms.replica not in members or len(message["stores"]) != self._terms.columns:
            raise ValueError("a proposal that is not for this replica")
        if number in self._dissolved:
            return
        # Nobody may be promised to two circuits at once: the members of one would wait for those of the other.
        if number <= self._roster.own.highest_circuit or set(self._roster.lower(sender)) & set(self._terms.site):
            self._tell(sender, {"formed": number, "problem": "it knows of another one, or who proposes before"})
            return
        self._members[number] = members
        self._roster.say(highest_circuit=number)
        self._forming[number] = _Forming(sender, set(range(self._terms.ranks)))
        order = {"form": number, "members": list(members), "stores": message["stores"]}
        self._siblings.tell(order)
        self._form(order)

    def _commit(self, number: int, from_step: int) -> None:
        if number in self._members and number not in self._dissolved:
            self._committed.add(number)
            self._orders.give({"circuit": number, "from_step": from_step})
