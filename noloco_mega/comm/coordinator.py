"""Who takes part, and on which circuit? What the leaders of a run agree on while it goes on.

Every leader runs one control thread. It hands each message to the protocol that it belongs to, and at every tick lets
each of them conclude what follows from what was heard, and from silence:

    heartbeats.py         who lives, and how far everybody is
    presence.py           who is paired, from an outer step on
    circuit_protocol.py   on which circuit microbatches are routed, from an inner step on
    bad_numbers.py        whose weights are to be looked at

What follows for all is said by the lowest replica that lives and trains, whoever that is at the moment, and nobody
needs it in order to go on. All decisions are made by the one thread, so that messages of any order find a protocol in
one state at a time, and what the training loop calls returns at once.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from noloco_mega.comm.bad_numbers import BadNumbers
from noloco_mega.comm.circuit_protocol import CircuitProtocol
from noloco_mega.comm.circuits import LOCAL, Circuits
from noloco_mega.comm.control import Leaders
from noloco_mega.comm.exchange import Exchange
from noloco_mega.comm.heartbeats import Heartbeats
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.presence import Presence
from noloco_mega.comm.roster import Roster
from noloco_mega.comm.siblings import Siblings
from noloco_mega.comm.terms import Terms
from noloco_mega.comm.wire import MALFORMED, Message


class Coordinator:
    """The control thread of one leader. All methods are safe to call from any thread."""

    def __init__(
        self,
        terms: Terms,
        leaders: Leaders,
        roster: Roster,
        siblings: Siblings,
        circuits: Circuits,
        orders: Orders,
        exchange: Exchange,
        form: Callable[[Message], None],
        warn: Callable[[str], None],
    ) -> None:
        """`form` forms a proposed circuit on this rank, whose `exchange` learns how far partners are and which of them
        have died; the siblings are told of both by message."""
        self._leaders, self._roster = leaders, roster
        self._longest_wait_seconds = 0.5 * terms.heartbeat_seconds
        self._events: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._presence = Presence(terms, leaders, roster, orders)
        self._heartbeats = Heartbeats(terms, leaders, roster, siblings, exchange, alone=self._presence.alone, warn=warn)
        self._circuits = CircuitProtocol(
            terms, leaders, roster, siblings, circuits, orders, form=form, broken=self.broken
        )  # fmt: skip
        self._bad_numbers = BadNumbers(terms, leaders, orders)
        handlers = {
            "alive": self._heartbeats.heard,
            "present": self._presence.heard,
            "circuit": self._circuits.heard,
            "bad": self._bad_numbers.heard,
        }
        for kind, handler in handlers.items():
            leaders.subscribe(kind, functools.partial(self._post, handler))
        leaders.on_refused.append(self._wake)
        self._wanted_haste: tuple[int, int] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self, present: Sequence[int], number: int, circuit: int, members: Sequence[int]) -> None:
        """Begin with these replicas present (announcement `number`) and on this circuit."""
        self._presence.begin(present, number)
        self._circuits.begin(circuit, members)
        self._thread.start()

    def report(self, **standing: Any) -> None:
        """The training loop: this replica has come so far. Others learn of it at once if more than its step is new."""
        if standing.get("circuit", LOCAL) != LOCAL:
            self._circuits.entered = standing["circuit"]
        urgent = any(getattr(self._roster.own, key) != value for key, value in standing.items() if key != "step")
        self._roster.say(**standing)
        if urgent:
            self._post(self._heartbeats.beat)

    def withdraw(self) -> None:
        """This replica's weights are not finite: nobody shall count on it."""
        self.report(sound=False)
        self._post(self._presence.alone)

    def broken(self, number: int) -> None:
        """A rank of this replica saw a link of this circuit fail."""
        self._post(self._circuits.dissolve, number)

    def formed(self, number: int, rank: int, problem: str | None) -> None:
        """A rank of this replica has formed a circuit, or could not."""
        self._post(self._circuits.formed, number, rank, problem)

    def hurry(self, number: int, step: int, outer_step: int) -> None:
        """In inner step `step`, on circuit `number`: partners wait for this replica at outer step `outer_step`."""
        if self._wanted_haste != (number, outer_step):  # said once
            self._wanted_haste = (number, outer_step)
            self._post(self._circuits.want_haste, number, step, outer_step)

    def due(self, number: int, step: int) -> int:
        """The outer step that inner step `step` is the last one before, as the circuit has agreed; or STAY."""
        return self._circuits.due(number, step)

    def bad(self, step: int, routes: Sequence[Sequence[int]]) -> None:
        """Microbatches of this replica's last stage had a loss that is not finite; `routes` tells who carried them."""
        self._post(self._bad_numbers.seen, step, routes)

    def heard(self, rank: int, message: Message) -> None:
        """A message of a sibling's."""
        self._post(self._sibling, rank, message)

    def close(self) -> None:
        """Tell the others that this replica leaves, and end."""
        self._roster.say(leaving=True)
        self._post(self._heartbeats.beat)
        self._closed.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self._leaders.flush()

    def _sibling(self, rank: int, message: Message) -> None:
        if "formed" in message:
            self._circuits.formed(int(message["formed"]), rank, message.get("problem"))
        elif "broken" in message:
            self._circuits.dissolve(int(message["broken"]))
        elif "bad" in message:
            self._bad_numbers.seen(int(message["bad"]), message["routes"])

    def _post(self, handler: Callable[..., None], *arguments: Any) -> None:
        self._events.put((handler, arguments))

    def _wake(self) -> None:
        """Let the thread tick now."""
        self._post(lambda: None)

    def _run(self) -> None:
        while True:
            wait = max(0.01, min(self._heartbeats.due_seconds, self._longest_wait_seconds))
            with contextlib.suppress(queue.Empty):
                while True:  # all that has come, before anything is concluded from silence
                    handler, arguments = self._events.get(timeout=wait)
                    # What a leader of another version says must not end the control thread.
                    with contextlib.suppress(*MALFORMED):
                        handler(*arguments)
                    wait = 0.0
            if self._closed.is_set():
                return
            self._heartbeats.tick()
            self._circuits.tick()
            self._presence.announce()
