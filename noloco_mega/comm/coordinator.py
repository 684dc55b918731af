"""Who takes part, and on which circuit? What the leaders of a run agree on while it goes on.

Every leader tells all others where it stands (comm/roster.py). What follows for all is said by the lowest replica that
lives and trains, whoever that is at the moment, and nobody needs it in order to go on:

    present     who is paired, from an outer step on. Whoever has not heard of it in time misses a partner once.
    circuit     a new random circuit of a site: the lowest member proposes it, all members form its links beside
                training and say so, and once all have, it is entered two outer steps later. Whoever can't is left out
                and stays on its own pipeline.
    bad         microbatches whose loss was not finite, and who carried them. A replica on two of them in one step looks
                at its own weights.
    dissolved   a circuit is over: somebody saw a link of it fail, or a member die. Everybody goes on from its own first
                unapplied step along its own pipeline.

All decisions are made by one thread, `run`, so that messages of any order find it in one state at a time.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from noloco_mega.comm.circuits import LOCAL, Circuits
from noloco_mega.comm.control import Leaders
from noloco_mega.comm.hurry import Hurry
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.roster import Roster, Standing
from noloco_mega.comm.siblings import Siblings
from noloco_mega.comm.stores import serve_store
from noloco_mega.comm.wire import MALFORMED, Message

OUTER_STEPS_AHEAD = 2
"""From the phase that is under way to the one in which a new circuit is entered."""
UNKNOWN = -1
"""The announcement that a replica follows which can't know the last one."""
SUSPICIOUS_ROUTES = 2
"""Of microbatches with a loss that is not finite, in one inner step: one may be the data's fault or another's."""
MOST_ROUTES = 1000
"""That one message tells of."""
BAD_STEPS_KEPT = 10
LARGEST = 1 << 50
"""No step and no announcement comes this far."""
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
    formed: set[int] = field(default_factory=set)
    committed: bool = False


@dataclass
class _Forming:
    """A circuit that the ranks of this replica are connecting to."""

    proposer: int
    ranks: set[int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What of the run's configuration decides here."""

    replica: int
    replicas: int
    site: tuple[int, ...]
    routes: bool
    """Whether microbatches are routed between replicas at all."""
    heals: bool
    """Whether a replica can take over a live one's state while the run goes on."""
    columns: int
    """D·T: each column of ranks has links, and a store to form them, of its own."""
    ranks: int
    inner_steps: int
    steps: int
    heartbeat_seconds: float
    form_seconds: float
    """How long a circuit may take to form."""
    host: str


class Coordinator:
    """The control thread of one leader."""

    def __init__(
        self,
        plan: Plan,
        leaders: Leaders,
        roster: Roster,
        siblings: Siblings,
        circuits: Circuits,
        orders: Orders,
        form: Callable[[Message], None],
        give_up: Callable[[int, str], None],
        expect: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        """`form` forms a proposed circuit on this rank, `give_up` waits no longer for a dead replica, `expect` does
        again (the siblings are told of all three by message)."""
        self._plan, self._leaders, self._roster, self._siblings = plan, leaders, roster, siblings
        self._circuits, self._orders, self._form, self._warn = circuits, orders, form, warn
        self._give_up, self._expect = give_up, expect
        self._events: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._present: tuple[int, ...] = ()
        self._members: dict[int, tuple[int, ...]] = {}
        self._committed: set[int] = set()
        self._dissolved: set[int] = set()
        self._forming: dict[int, _Forming] = {}
        self._proposal: _Proposal | None = None
        self._bad: dict[int, int] = {}
        self._spared: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._mourned: set[int] = set()
        self._next_beat = 0.0
        self._reminded = 0.0
        self._ticked = time.monotonic()
        self._closed = threading.Event()
        self._hurry = Hurry(plan.replica, self._tell, self.broken)
        self._wanted_haste: tuple[int, int] | None = None
        handlers = {
            "alive": self._alive,
            "present": self._told_present,
            "circuit": self._circuit,
            "bad": self._told_bad,
        }
        for kind, handler in handlers.items():
            leaders.subscribe(kind, functools.partial(self._post, handler))
        leaders.on_gone.append(lambda: self._post(self._refused))
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self, present: Sequence[int], number: int, circuit: int, members: Sequence[int]) -> None:
        """Begin with these replicas present (announcement `number`) and on this circuit."""
        self._present = tuple(present)
        self._members[circuit] = tuple(members)
        self._committed.add(circuit)
        self._roster.say(present=number, circuit=circuit, highest_circuit=circuit)
        self._thread.start()

    def report(self, **standing: Any) -> None:
        """The training loop: this replica has come so far. Others learn of it at once if an outer step has begun."""
        urgent = any(getattr(self._roster.own, key) != value for key, value in standing.items() if key != "step")
        self._roster.say(**standing)
        if urgent:
            self._post(self._beat)

    def withdraw(self) -> None:
        """This replica's weights are not finite: nobody shall count on it."""
        self.report(sound=False)
        self._post(self._alone)

    def broken(self, number: int) -> None:
        """A rank of this replica saw a link of this circuit fail."""
        self._post(self._dissolve, number, True)

    def hurry(self, number: int, step: int, outer_step: int) -> None:
        """In inner step `step`, on circuit `number`: partners wait for this replica at outer step `outer_step`."""
        if self._wanted_haste != (number, outer_step):  # said once
            self._wanted_haste = (number, outer_step)
            self._post(self._want_haste, number, step, outer_step)

    def due(self, number: int, step: int) -> int:
        """The outer step that inner step `step` is the last one before, as the circuit has agreed; or STAY."""
        return self._hurry.due(number, step)

    def bad(self, step: int, routes: Sequence[Sequence[int]]) -> None:
        """Microbatches of this replica's last stage had a loss that is not finite; `routes` tells who carried them."""
        self._post(self._bad_here, step, routes)

    def heard(self, rank: int, message: Message) -> None:
        """A message of a sibling's."""
        self._post(self._sibling, rank, message)

    def formed(self, number: int, rank: int, problem: str | None) -> None:
        """A rank of this replica has formed a circuit, or could not."""
        self._post(self._rank_formed, number, rank, problem)

    def close(self) -> None:
        """Tell the others that this replica leaves, and end."""
        self._roster.say(leaving=True)
        self._post(self._beat)
        self._closed.set()
        self._post(lambda: None)
        if self._thread.is_alive():
            self._thread.join()
        self._leaders.flush()

    def _post(self, handler: Callable[..., None], *arguments: Any) -> None:
        self._events.put((handler, arguments))

    def _run(self) -> None:
        while True:
            wait = max(0.01, min(self._next_beat - time.monotonic(), 0.5 * self._plan.heartbeat_seconds))
            with contextlib.suppress(queue.Empty):
                while True:  # all that has come, before anything is concluded from silence
                    handler, arguments = self._events.get(timeout=wait)
                    # What a leader of another version says must not end the control thread.
                    with contextlib.suppress(*MALFORMED):
                        handler(*arguments)
                    wait = 0.0
            if self._closed.is_set():
                return
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        paused, self._ticked = now - self._ticked, now
        if paused > 0.5 * self._roster.dead_after_seconds:
            self._back(paused)
        well = not self._siblings.silent(self._roster.dead_after_seconds)
        if well != self._roster.own.well:
            self.report(well=well)
        if now >= self._next_beat:
            self._beat()
        self._mourn()
        self._watch()
        self._announce()
        self._propose(now)

    # Heartbeats

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + self._plan.heartbeat_seconds
        self._leaders.broadcast("alive", self._standing())

    def _standing(self) -> Message:
        """What this replica says of itself, and which others it hears of where: who came at the same time as others, or
        was told of few by the rendezvous, finds the rest."""
        others = [[replica, began, *where] for replica, (began, where) in self._roster.whereabouts().items()]
        return {**self._roster.say().message(), "others": others}

    def _alive(self, sender: int, message: Message) -> None:
        standing = Standing.of(message)
        if sender == self._plan.replica or not 0 <= sender < self._plan.replicas:
            raise ValueError(f"a heartbeat of replica {sender}")
        if len(standing.ranks) != self._plan.ranks:
            raise ValueError(f"replica {sender} names {len(standing.ranks)} ranks")
        if self._roster.hear(sender, standing):
            self._leaders.learn(sender, standing.ranks[0])
            self._beat()  # a newcomer knows nobody until somebody speaks to it
        for replica, began, host, port in message["others"]:
            if 0 <= replica < self._plan.replicas and self._roster.is_news(replica, began):
                self._leaders.learn(replica, (str(host), int(port)))
                self._leaders.tell(replica, "alive", self._standing())

    def _refused(self) -> None:
        for replica in self._leaders.gone:
            self._roster.refused(replica)

    def _back(self, seconds: float) -> None:
        """This process did not run for a while: what it heard last is old, and others may have gone on without it."""
        self._roster.forgive()
        self._siblings.forgive()
        if seconds > self._roster.dead_after_seconds:
            self._warn(f"this replica did not run for {seconds:.1f} s; the others may have gone on without it")
            self._alone()
        self._beat()

    def _alone(self) -> None:
        """Pair with nobody until somebody says who is present."""
        self._follow(UNKNOWN, self._roster.own.launched + 1, (self._plan.replica,), {})

    def _mourn(self) -> None:
        dead = self._roster.dead()
        for replica in self._mourned - dead.keys():
            # Others may never have missed it, so that nobody announces its return.
            self._mourned.discard(replica)
            self._siblings.tell({"back": replica})
            self._expect(replica)
        for replica in dead.keys() - self._mourned:
            self._mourned.add(replica)
            standing = self._roster.standing(replica)
            self._siblings.tell({"dead": replica, "reason": dead[replica]})
            self._give_up(replica, dead[replica])
            if standing is None or not standing.leaving:
                self._warn(f"goes on without replica {replica}: {dead[replica]}")
        for number, members in list(self._members.items()):
            if number != LOCAL and dead.keys() & set(members) and not self._over(dead, members):
                self._dissolve(number, True)

    def _over(self, dead: dict[int, str], members: tuple[int, ...]) -> bool:
        """Whether the only members missing are those that have ended as they should: after the run's last step."""
        missing = self._roster.standings(replica for replica in members if replica in dead)
        return all(standing.leaving for standing in missing.values())

    # Who is present

    def _announce(self) -> None:
        """The lowest able replica says who is present, and says it again to those that do not follow."""
        able = self._roster.able()
        if not able or able[0] != self._plan.replica:
            return
        standings = self._roster.standings(able)
        number, latest = self._roster.own.present, max(standing.present for standing in standings.values())
        # Somebody else may have spoken while it saw nobody lower, and what it said is to be put right.
        changed = set(able) != set(self._present) or latest > number
        if changed:
            number = self._next_number(latest)
        behind = [r for r, standing in standings.items() if standing.present < number and r != self._plan.replica]
        now = time.monotonic()
        if not changed and (not behind or now < self._reminded + self._plan.heartbeat_seconds):
            return
        self._reminded = now
        first = self._roster.own.launched + 2  # the phase that is under way was planned without the change
        ranks = {str(r): [list(where) for where in standing.ranks] for r, standing in standings.items()}
        message = {"number": number, "from": first, "members": list(able), "ranks": ranks}
        for replica in behind:
            self._leaders.tell(replica, "present", message)
        if changed:
            self._follow(number, first, able, ranks)

    def _told_present(self, sender: int, message: Message) -> None:
        number, first = _count(message["number"]), _count(message["from"])
        members = tuple(int(replica) for replica in message["members"])
        # One that leaves this replica out comes from somebody who has lost sight of it, and may have lost more; so may
        # somebody who speaks though a lower one lives.
        if number > self._roster.own.present and self._plan.replica in members and not self._lower(sender):
            self._follow(number, first, members, dict(message["ranks"]))

    def _follow(self, number: int, first: int, members: tuple[int, ...], ranks: dict[str, Any]) -> None:
        self._present = members
        self._roster.say(present=number)
        self._orders.give({"present": list(members), "from": first, "ranks": ranks})

    def _lower(self, sender: int) -> list[int]:
        """The able replicas that speak before `sender`."""
        return [replica for replica in self._roster.able() if replica < sender]

    def _next_number(self, highest: int) -> int:
        """Higher than `highest`, and never the number of another replica's, whoever else may speak at the moment."""
        return (highest // self._plan.replicas + 1) * self._plan.replicas + self._plan.replica

    # Bad numbers

    def _bad_here(self, step: int, routes: Sequence[Sequence[int]]) -> None:
        found = [list(route) for route in routes][:MOST_ROUTES]
        self._leaders.broadcast("bad", {"step": step, "routes": found})
        self._told_bad(self._plan.replica, {"step": step, "routes": found})

    def _told_bad(self, sender: int, message: Message) -> None:
        step, routes = int(message["step"]), message["routes"]
        before = self._bad.get(step, 0)
        now = before + sum(self._plan.replica in route for route in routes)
        self._bad = {**{s: n for s, n in self._bad.items() if s > step - BAD_STEPS_KEPT}, step: now}
        if self._plan.heals and before < SUSPICIOUS_ROUTES <= now:
            self._orders.give({"check": step})

    # Circuits

    def _watch(self) -> None:
        """A circuit that others are on, and this member has not been told to enter, has to end: they would wait."""
        for standing in self._roster.standings(self._roster.able()).values():
            number = standing.circuit
            if self._plan.replica in self._members.get(number, ()) and number not in self._committed:
                self._dissolve(number, True)

    def _dissolve(self, number: int, tell: bool) -> None:
        if number == LOCAL or number in self._dissolved:
            return
        self._dissolved.add(number)
        self._members.pop(number, None)
        self._circuits.break_off(number)
        self._siblings.tell({"break": number})
        if number in self._committed and self._roster.own.circuit != number:
            self._orders.give({"cancel": number})  # entering it would cost a step more
        if self._proposal is not None and self._proposal.number == number:
            self._proposal = None
        if tell:
            self._leaders.broadcast("circuit", {"dissolved": number})
        if number == self._roster.own.circuit:
            # A member may be dying, which is known only later: the circuit that was to follow would cost a second step.
            for following in sorted(n for n in self._committed if n > number):
                self._dissolve(following, True)

    def _propose(self, now: float) -> None:
        plan, proposal = self._plan, self._proposal
        if proposal is not None and not proposal.committed:
            if now < proposal.deadline:
                return
            self._spare(set(proposal.members) - proposal.formed)
            self._dissolve(proposal.number, True)
        members = self._wanted(now)
        if members is None or self._first_outer_step(members) * plan.inner_steps >= plan.steps:
            return
        standings = self._roster.standings(members).values()
        highest = max(max(s.circuit, s.highest_circuit) for s in standings)
        number = self._next_number(highest)
        stores = [serve_store(plan.host, timedelta(seconds=plan.form_seconds)) for _ in range(plan.columns)]
        self._proposal = _Proposal(number, members, now + plan.form_seconds, [store for store, _ in stores])
        message = {"propose": number, "members": list(members), "stores": [list(where) for _, where in stores]}
        for member in members:
            self._tell(member, message)

    def _spare(self, replicas: Iterable[int]) -> None:
        """Leave out replicas for a while that a proposed circuit has failed on."""
        for replica in replicas:
            doublings = self._failures.get(replica, 0)
            beats = SPARED_BEATS * 2**doublings
            self._spared[replica] = time.monotonic() + beats * self._plan.heartbeat_seconds
            self._failures[replica] = min(doublings + 1, LONGEST_SPARED)

    def _wanted(self, now: float) -> tuple[int, ...] | None:
        """The members of the circuit that there should be and is not, if this replica is the one to propose it."""
        self._spared = {replica: until for replica, until in self._spared.items() if until > now}
        members = tuple(r for r in self._roster.able() if r in self._plan.site and r not in self._spared)
        if not self._plan.routes or len(members) < 2 or members[0] != self._plan.replica:
            return None
        numbers = {standing.circuit for standing in self._roster.standings(members).values()}
        settled = len(numbers) == 1 and self._members.get(*numbers) == members
        coming = self._proposal is not None and self._proposal.members == members
        return None if settled or coming else members

    def _first_outer_step(self, members: Sequence[int]) -> int:
        """The phase in which a circuit of these, agreed now, begins."""
        begun = max(standing.launched for standing in self._roster.standings(members).values())
        return begun + 1 + OUTER_STEPS_AHEAD

    def _tell(self, replica: int, message: Message) -> None:
        if replica == self._plan.replica:
            self._circuit(replica, message)
        else:
            self._leaders.tell(replica, "circuit", message)

    def _circuit(self, sender: int, message: Message) -> None:
        if "propose" in message:
            self._proposed(sender, message)
        elif "formed" in message:
            self._member_formed(sender, int(message["formed"]), message.get("problem"))
        elif "commit" in message:
            self._commit(_count(message["commit"]), _count(message["from_step"]))
        elif "want" in message:
            self._want_haste(_count(message["want"]), self._roster.own.step, _count(message["outer"]))
        elif "hurry" in message:
            self._hurry.asked(sender, *(_count(message[key]) for key in ("hurry", "at", "outer")))
        elif "able" in message:
            self._hurry.able(sender, _count(message["able"]), _count(message["at"]))
        elif "do" in message or "stay" in message:
            self._hurry.told(_count(message.get("do", message.get("stay"))), _count(message["at"]), "do" in message)
        elif "dissolved" in message:
            number, proposal = int(message["dissolved"]), self._proposal
            if proposal is not None and proposal.number == number and not proposal.committed:
                self._spare([sender])  # it takes another member for dead, and would do so again at once
            self._dissolve(number, False)

    def _want_haste(self, number: int, step: int, outer_step: int) -> None:
        if number in self._members and number not in self._dissolved:
            self._hurry.want(number, self._members[number], step, outer_step)

    def _proposed(self, sender: int, message: Message) -> None:
        number, members = int(message["propose"]), tuple(sorted(int(replica) for replica in message["members"]))
        if self._plan.replica not in members or len(message["stores"]) != self._plan.columns:
            raise ValueError("a proposal that is not for this replica")
        if number in self._dissolved:
            return
        # Nobody may be promised to two circuits at once: the members of one would wait for those of the other.
        if number <= self._roster.own.highest_circuit or set(self._lower(sender)) & set(self._plan.site):
            self._tell(sender, {"formed": number, "problem": "it knows of another one, or who proposes before"})
            return
        self._members[number] = members
        self._roster.say(highest_circuit=number)
        self._forming[number] = _Forming(sender, set(range(self._plan.ranks)))
        order = {"form": number, "members": list(members), "stores": message["stores"]}
        self._siblings.tell(order)
        self._form(order)

    def _sibling(self, rank: int, message: Message) -> None:
        if "formed" in message:
            self._rank_formed(int(message["formed"]), rank, message.get("problem"))
        elif "broken" in message:
            self._dissolve(int(message["broken"]), True)
        elif "bad" in message:
            self._bad_here(int(message["bad"]), message["routes"])

    def _rank_formed(self, number: int, rank: int, problem: str | None) -> None:
        forming = self._forming.get(number)
        if forming is None:
            return
        forming.ranks.discard(rank)
        if problem is not None or not forming.ranks:
            del self._forming[number]
            self._tell(forming.proposer, {"formed": number, "problem": problem})

    def _member_formed(self, member: int, number: int, problem: str | None) -> None:
        proposal = self._proposal
        if proposal is None or proposal.number != number or proposal.committed:
            return
        if problem is not None:
            self._spare([member])
            self._dissolve(number, True)
            return
        proposal.formed.add(member)
        if proposal.formed == set(proposal.members):
            proposal.committed = True
            for member in proposal.members:
                self._failures.pop(member, None)
            from_step = self._first_outer_step(proposal.members) * self._plan.inner_steps
            for member in proposal.members:
                self._tell(member, {"commit": number, "from_step": from_step})

    def _commit(self, number: int, from_step: int) -> None:
        if number in self._members and number not in self._dissolved:
            self._committed.add(number)
            self._orders.give({"circuit": number, "from_step": from_step})


def _count(value: Any) -> int:
    """A number of steps or announcements that a run can reach. Raises ValueError."""
    count = int(value)
    if not 0 <= count < LARGEST:
        raise ValueError(f"{count} is no count of this run's")
    return count
