"""What do the leaders tell each other again and again, and what does a replica do about one that falls silent?

    kind "alive"   {"standing": ..., "others": [[replica, began, host, port], ...]}

A heartbeat says where its replica stands (comm/roster.py), and which others it hears of where, so that who came at the
same time as others, or was told of few by the rendezvous, finds the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from noloco_mega.comm.control import Leaders
from noloco_mega.comm.exchange import Exchange
from noloco_mega.comm.roster import Roster, Standing
from noloco_mega.comm.siblings import Siblings
from noloco_mega.comm.terms import Terms
from noloco_mega.comm.wire import Message


class Heartbeats:
    """One leader's heartbeats, and what it hears and misses of the others'."""

    def __init__(
        self,
        terms: Terms,
        leaders: Leaders,
        roster: Roster,
        siblings: Siblings,
        exchange: Exchange,
        *,
        alone: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        """`alone` takes this replica out of the pairs; for the rest see Coordinator."""
        self._terms, self._leaders, self._roster, self._siblings = terms, leaders, roster, siblings
        self._exchange, self._alone, self._warn = exchange, alone, warn
        self._mourned: set[int] = set()
        self._ahead: dict[int, int] = {}
        """The outer steps of those replicas that were found to be further than this one."""
        self._next_beat = 0.0
        self._ticked = time.monotonic()

    @property
    def due_seconds(self) -> float:
        """Until the next heartbeat."""
        return self._next_beat - time.monotonic()

    def tick(self) -> None:
        """Notice a pause of this process and silent siblings, beat if it is time, and part with the dead."""
        now = time.monotonic()
        paused, self._ticked = now - self._ticked, now
        if paused > 0.5 * self._roster.dead_after_seconds:
            self.back(paused)
        well = not self._siblings.silent(self._roster.dead_after_seconds)
        if well != self._roster.own.well:
            self._roster.say(well=well)
            self.beat()
        elif now >= self._next_beat:
            self.beat()
        self._mourn()

    def beat(self) -> None:
        """Tell all others how far this replica is, now."""
        self._next_beat = time.monotonic() + self._terms.heartbeat_seconds
        self._leaders.broadcast("alive", self._message())

    def heard(self, sender: int, message: Message) -> None:
        """Another leader's heartbeat."""
        standing = Standing.of(message)
        if sender == self._terms.replica or not 0 <= sender < self._terms.replicas:
            raise ValueError(f"a heartbeat of replica {sender}")
        if len(standing.ranks) != self._terms.ranks:
            raise ValueError(f"replica {sender} names {len(standing.ranks)} ranks")
        if self._roster.hear(sender, standing):
            self._leaders.learn(sender, standing.ranks[0])
            self.beat()  # a newcomer knows nobody until somebody speaks to it
        self._follow(sender, standing.launched)
        for replica, began, host, port in message["others"]:
            if 0 <= replica < self._terms.replicas and self._roster.is_news(replica, began):
                self._leaders.learn(replica, (str(host), int(port)))
                self._leaders.tell(replica, "alive", self._message())

    def back(self, seconds: float) -> None:
        """This process did not run for a while: what it heard last is old, and others may have gone on without it."""
        self._roster.forgive()
        self._siblings.forgive()
        if seconds > self._roster.dead_after_seconds:
            self._warn(f"this replica did not run for {seconds:.1f} s; the others may have gone on without it")
            self._alone()
        self.beat()

    def _follow(self, replica: int, launched: int) -> None:
        """A replica that has begun a later outer step than this one is not waited for at the earlier ones.

        One that was started again may be behind what it was ahead with.
        """
        told = self._ahead.get(replica, -1)
        if launched != told and (launched > self._roster.own.launched or launched < told):
            self._ahead[replica] = launched
            self._siblings.tell({"reached": replica, "outer_step": launched})
            self._exchange.reached(replica, launched)

    def _message(self) -> Message:
        others = [[replica, began, *where] for replica, (began, where) in self._roster.whereabouts().items()]
        return {**self._roster.say().message(), "others": others}

    def _mourn(self) -> None:
        """Wait no longer for those that have died, and again for those that are back."""
        dead = self._roster.dead()
        for replica in self._mourned - dead.keys():
            # Others may never have missed it, so that nobody announces its return.
            self._mourned.discard(replica)
            self._siblings.tell({"back": replica})
            self._exchange.expect(replica)
        for replica in dead.keys() - self._mourned:
            self._mourned.add(replica)
            standing = self._roster.standing(replica)
            self._siblings.tell({"dead": replica, "reason": dead[replica]})
            self._exchange.give_up(replica, dead[replica])
            if standing is None or not standing.leaving:
                self._warn(f"goes on without replica {replica}: {dead[replica]}")
