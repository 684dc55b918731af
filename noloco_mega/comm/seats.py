"""Where does a dialer wait until its partner has launched the outer step that it is at?

Each launch opens a seat per partner that dials. Who comes for a later outer step is parked; who comes for an earlier
one, or belongs to another run, is refused and told why.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_mega.comm.wire import Channel, Message, shown

MAX_PARKED = 64
"""Partners that may wait at once for us to launch the outer step they are at."""
MAX_OUTER_STEPS = 1 << 40
"""More than any run takes: whoever is at a later one does not tell the truth."""
AFTER_TRAINING = 1 << 39
"""Exchanges numbered from here on follow the last inner step: nobody has to hurry for them."""
REFUSING_SECONDS = 2.0
"""How long a dialer that is refused may take to hear why."""


@dataclass(frozen=True)
class Caller:
    """A connected dialer and its hello."""

    channel: Channel
    hello: Message


Seat = queue.SimpleQueue[Caller | str]
"""Where a launch waits for its dialer: the caller, or the reason why none will come."""


class Seats:
    """The listening side of one rank's exchanges. All methods are safe to call from any thread."""

    def __init__(self, identity: Message) -> None:
        """`identity` is what every hello of this rank's says: kind, run, fingerprint, replica, rank."""
        self._identity = identity
        self._replica = identity["replica"]
        self._lock = threading.Lock()
        self._outer_step = -1
        self.latest_outer_step = -1
        """The highest of the training that any twin of this rank has shown us, ours included."""
        self.latest_after_training = -1
        """The same for exchanges numbered from AFTER_TRAINING on."""
        self._seats: dict[tuple[int, int], Seat] = {}  # by (outer step, partner): launched, its dialer not here yet
        self._parked: dict[tuple[int, int], Caller] = {}  # by (outer step, partner): dialers of later outer steps
        self._given_up: dict[int, str] = {}  # dead partners, and why
        self._reached: dict[int, int] = {}  # the outer steps of partners that are known to be further than this rank
        self._closed = False

    def open(self, outer_step: int, dialers: Sequence[int]) -> None:
        """Make `outer_step` the current one; dialers that are here already take their seats, stale ones go. Raises
        ValueError if it does not follow the one before."""
        with self._lock:
            if self._closed:
                raise ValueError("this exchange is closed")
            if outer_step <= self._outer_step:
                raise ValueError(f"outer step {outer_step} was launched already; the latest is {self._outer_step}")
            self._outer_step = outer_step
            self._note(outer_step)
            self._drop_gone()
            for partner in dialers:
                seat = self._seats[outer_step, partner] = Seat()
                if (reason := self._given_up.get(partner)) is not None:
                    seat.put(reason)
                elif (caller := self._parked.pop((outer_step, partner), None)) is not None:
                    seat.put(caller)
                elif (reached := self._reached.get(partner, -1)) > outer_step:
                    self._tell_passed_by(reached, partner)
            stale = [self._parked.pop(key) for key in list(self._parked) if key[0] <= outer_step]
        for caller in stale:
            self._turn_away(caller, self._stale(caller.hello))

    def take(self, outer_step: int, partner: int, timeout_seconds: float) -> Caller | str:
        """The partner's caller, as soon as it is here, or the reason why none came. Its seat is gone then."""
        seat = self._seats[outer_step, partner]
        try:
            caller = seat.get(timeout=timeout_seconds)
        except queue.Empty:
            caller = f"replica {partner} did not connect by the deadline"
        with self._lock:
            del self._seats[outer_step, partner]
        while not seat.empty():
            if isinstance(late := seat.get(), Caller):
                self._turn_away(late, self._stale(late.hello))
        return caller

    def arrived(self, channel: Channel, hello: Message) -> None:
        """A dialer is here: to its seat if the launch it belongs to is waiting, else parked or refused."""
        caller = Caller(channel, hello)
        step, partner = _step_in(hello), hello.get("replica")
        if step is None or not isinstance(partner, int):
            self._turn_away(caller, "a malformed hello")
            return
        key, replaced = (step, partner), None
        with self._lock:
            self._drop_gone()
            self.see(hello)
            reason = self.other_run(hello)
            if key in self._seats:
                self._seats[key].put(caller)  # whatever is wrong with it, the launch that waits for it shall know
                return
            if self._closed:
                reason = self._leaving
            elif reason is None and step <= self._outer_step:
                reason = self._stale(hello)
            elif reason is None and len(self._parked) >= MAX_PARKED and key not in self._parked:
                reason = f"replica {self._replica} keeps {MAX_PARKED} waiting already"
            if reason is None:
                self._tell_passed_by(step, partner)
                replaced = self._parked.pop(key, None)
                self._parked[key] = caller
        if reason is not None:
            self._turn_away(caller, reason)
        if replaced is not None:
            replaced.channel.close()

    def given_up(self, partner: int) -> str | None:
        """Why a partner is not to be waited for; None if it is."""
        return self._given_up.get(partner)

    def give_up(self, partner: int, reason: str) -> None:
        """A partner is dead: nobody waits for it, until `expect` says that it is back."""
        with self._lock:
            self._given_up[partner] = reason
            for (_, replica), seat in self._seats.items():
                if replica == partner:
                    seat.put(reason)

    def expect(self, partner: int) -> None:
        """A partner that was given up is back."""
        with self._lock:
            self._given_up.pop(partner, None)

    def reached(self, partner: int, outer_step: int) -> None:
        """A partner has begun this outer step: nobody waits for it at earlier ones."""
        with self._lock:
            self._reached[partner] = outer_step
            self._tell_passed_by(outer_step, partner)

    def close(self) -> None:
        """Let nobody wait any more: neither the launches, nor the dialers that are here or come."""
        with self._lock:
            self._closed = True
            parked, self._parked = list(self._parked.values()), {}
            for seat in self._seats.values():
                seat.put("this exchange was closed")
        for caller in parked:
            self._turn_away(caller, self._leaving)

    def see(self, message: Message) -> None:
        """Learn from a hello or a refusal which outer step a twin is at."""
        step = _step_in(message)
        if self.other_run(message) is None and step is not None:
            self._note(step)

    def other_run(self, hello: Message) -> str | None:
        """Why this hello can't be our twin's, whatever the outer step; None if it can."""
        for name in ("run_id", "fingerprint", "rank"):
            if hello.get(name) != self._identity[name]:
                own = self._identity[name]
                return f"{name} {shown(hello.get(name))} meets {name} {own!r} of replica {self._replica}"
        return None

    def refuse(self, channel: Channel, reason: str) -> None:
        """Tell the other side why; one that is gone needs no telling."""
        with contextlib.suppress(OSError):
            channel.send({**self._identity, "kind": "refused", "reason": reason, "outer_step": self._outer_step})

    @property
    def _leaving(self) -> str:
        return f"replica {self._replica} is leaving"

    def _turn_away(self, caller: Caller, reason: str) -> None:
        caller.channel.expire_in(REFUSING_SECONDS)
        self.refuse(caller.channel, reason)
        caller.channel.close()

    def _drop_gone(self) -> None:
        """Forget the dialers that have given up: they hang up at their own deadline."""
        for key in [key for key, caller in self._parked.items() if caller.channel.hung_up()]:
            self._parked.pop(key).channel.close()

    def _stale(self, hello: Message) -> str:
        step = hello["outer_step"]
        return f"replica {self._replica} is at outer step {self._outer_step} and has no seat for step {step}"

    def _note(self, outer_step: int) -> None:
        if outer_step < AFTER_TRAINING:
            self.latest_outer_step = max(self.latest_outer_step, outer_step)
        else:
            self.latest_after_training = max(self.latest_after_training, outer_step)

    def _tell_passed_by(self, outer_step: int, partner: int) -> None:
        """A partner that is at a later outer step will not come for the earlier ones."""
        for (waiting, replica), seat in self._seats.items():
            if replica == partner and waiting < outer_step:
                seat.put(f"replica {partner} is at outer step {outer_step} already")


def _step_in(message: Message) -> int | None:
    """The outer step that a hello or a refusal names, None where it names none."""
    step = message.get("outer_step")
    return step if isinstance(step, int) and 0 <= step < MAX_OUTER_STEPS else None
