"""How do the members of a circuit end an inner phase early, all at the same step?

Replicas on one circuit are coupled microbatch by microbatch, so that none of them can leave out inner steps alone.
Where partners of theirs, on another circuit, wait (plan/lag.py), the lowest member proposes a step a little ahead; all
others say that they have not come so far; then it tells them to do it. Whoever said so and was not told in time ends
the circuit: the others may be about to leave out steps without it.

    any member -> lowest     {"want": circuit, "outer": t}
    lowest -> all            {"hurry": circuit, "at": step, "outer": t}
    member -> lowest         {"able": circuit, "at": step}
    lowest -> all            {"do": circuit, "at": step, "outer": t}, or {"stay": circuit, "at": step}
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from noloco_mega.comm.terms import count
from noloco_mega.comm.wire import Message
from noloco_mega.plan.lag import STAY

MARGIN = 3
"""Steps between a proposal and the step that it is for: the messages' way, there and back and there."""


@dataclass
class _Haste:
    """The early end of a phase that one circuit is agreeing on."""

    number: int
    at: int
    outer_step: int
    others: frozenset[int] = frozenset()
    """On the lowest member: the rest."""
    able: set[int] = field(default_factory=set)
    agreed: bool = False


class Hurry:
    """One leader's part. `due` is for the training loop, all else for the control thread."""

    def __init__(self, replica: int, tell: Callable[[int, Message], None], dissolve: Callable[[int], None]) -> None:
        """`tell` sends to another leader; `dissolve` ends a circuit."""
        self._replica, self._tell, self._dissolve = replica, tell, dissolve
        self._lock = threading.Lock()
        self._haste: _Haste | None = None
        self._passed = -1

    def want(self, number: int, members: Sequence[int], step: int, outer_step: int) -> None:
        """At inner step `step` somebody on this circuit is late for outer step `outer_step`."""
        lowest = min(members)
        if lowest != self._replica:
            self._tell(lowest, {"want": number, "outer": outer_step})
            return
        with self._lock:
            if self._haste is not None and self._haste.number == number:
                return
            haste = self._haste = _Haste(number, step + MARGIN, outer_step, frozenset(members) - {self._replica})
        for member in haste.others:
            self._tell(member, {"hurry": number, "at": haste.at, "outer": outer_step})

    def heard(self, sender: int, message: Message) -> None:
        """A message of the lowest member's, or of another one's to the lowest."""
        if "hurry" in message:
            self.asked(sender, *(count(message[key]) for key in ("hurry", "at", "outer")))
        elif "able" in message:
            self.able(sender, count(message["able"]), count(message["at"]))
        elif "do" in message or "stay" in message:
            self.told(count(message.get("do", message.get("stay"))), count(message["at"]), "do" in message)

    def asked(self, sender: int, number: int, at: int, outer_step: int) -> None:
        """The lowest member proposes."""
        with self._lock:
            able = at > self._passed
            if able:
                self._haste = _Haste(number, at, outer_step)
        if able:
            self._tell(sender, {"able": number, "at": at})

    def able(self, sender: int, number: int, at: int) -> None:
        """A member has not come to that step yet."""
        with self._lock:
            haste = self._haste
            if haste is None or (haste.number, haste.at) != (number, at) or haste.agreed:
                return
            haste.able.add(sender)
            haste.agreed = bool(haste.others) and haste.able >= haste.others
        for member in haste.others if haste.agreed else ():
            self._tell(member, {"do": number, "at": at, "outer": haste.outer_step})

    def told(self, number: int, at: int, agreed: bool) -> None:
        """The lowest member has decided."""
        with self._lock:
            haste = self._haste
            if haste is not None and (haste.number, haste.at) == (number, at) and not haste.others:
                haste.agreed = agreed
                if not agreed:
                    self._haste = None

    def due(self, number: int, step: int) -> int:
        """The outer step that inner step `step` is the last one before, as this circuit has agreed; or STAY."""
        with self._lock:
            self._passed = max(self._passed, step)
            haste = self._haste
            if haste is None or haste.at > step:
                return STAY
            self._haste = None
            if haste.number != number:
                return STAY
            if haste.agreed and haste.at == step:
                return haste.outer_step
        if not haste.others:
            self._dissolve(number)
        for member in haste.others:
            self._tell(member, {"stay": number, "at": haste.at})
        return STAY
