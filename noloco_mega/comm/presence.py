"""Who is present, that is, paired, and from which outer step on?

The lowest replica that lives and trains says so, and says it again to those that do not follow:

    kind "present"   {"number", "from": outer step, "members": [replica, ...], "ranks": {replica: [address, ...]}}

Nobody needs it in order to go on: whoever has not heard of it in time misses a partner once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from noloco_mega.comm.control import Leaders
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.roster import Roster
from noloco_mega.comm.terms import Terms, count
from noloco_mega.comm.wire import Message

UNKNOWN = -1
"""The announcement that a replica follows which can't know the last one."""


class Presence:
    """The announcements of one leader, and those that it follows."""

    def __init__(self, terms: Terms, leaders: Leaders, roster: Roster, orders: Orders) -> None:
        self._terms, self._leaders, self._roster, self._orders = terms, leaders, roster, orders
        self._present: tuple[int, ...] = ()
        self._reminded = 0.0

    def begin(self, present: Sequence[int], number: int) -> None:
        """These replicas are present from the first step on, by announcement `number`."""
        self._present = tuple(present)
        self._roster.say(present=number)

    def alone(self) -> None:
        """Pair with nobody until somebody says who is present."""
        self._follow(UNKNOWN, self._roster.own.launched + 1, (self._terms.replica,), {})

    def announce(self) -> None:
        """Say who is present, if this is for this replica to say and it is not known."""
        able = self._roster.able()
        if not able or able[0] != self._terms.replica:
            return
        standings = self._roster.standings(able)
        number, latest = self._roster.own.present, max(standing.present for standing in standings.values())
        # Somebody else may have spoken while it saw nobody lower, and what it said is to be put right.
        changed = set(able) != set(self._present) or latest > number
        if changed:
            number = self._terms.next_number(latest)
        behind = [r for r, standing in standings.items() if standing.present < number and r != self._terms.replica]
        now = time.monotonic()
        if not changed and (not behind or now < self._reminded + self._terms.heartbeat_seconds):
            return
        self._reminded = now
        first = self._roster.own.launched + 2  # the phase that is under way was planned without the change
        ranks = {str(r): [list(where) for where in standing.ranks] for r, standing in standings.items()}
        message = {"number": number, "from": first, "members": list(able), "ranks": ranks}
        for replica in behind:
            self._leaders.tell(replica, "present", message)
        if changed:
            self._follow(number, first, able, ranks)

    def heard(self, sender: int, message: Message) -> None:
        """Another leader says who is present."""
        number, first = count(message["number"]), count(message["from"])
        members = tuple(int(replica) for replica in message["members"])
        # One that leaves this replica out comes from somebody who has lost sight of it, and may have lost more; so may
        # somebody who speaks though a lower one lives.
        if number > self._roster.own.present and self._terms.replica in members and not self._roster.lower(sender):
            self._follow(number, first, members, dict(message["ranks"]))

    def _follow(self, number: int, first: int, members: tuple[int, ...], ranks: dict[str, Any]) -> None:
        self._present = members
        self._roster.say(present=number)
        self._orders.give({"present": list(members), "from": first, "ranks": ranks})
