"""Lets a plan's events strike a fleet, and makes sure that each did while the run was training."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.fleet import Fleet, Stamped
from tests.chaos.plan import Event

LIMIT_SECONDS = 240.0
"""Of every single wait, on a machine that does other things too."""


@dataclass
class Struck:
    """An event, when it struck, and when it was over (monotonic seconds)."""

    event: Event
    at: float
    over: float | None = None
    """For a `restart`: when the replica trained again, or was struck anew."""
    step: int = 0
    """The furthest inner step then."""


@dataclass
class _Held:
    struck: Struck
    ready: Callable[[], bool]
    end: Callable[[], None]


@dataclass
class Striker:
    """Plays a plan. `log` holds what has struck so far."""

    fleet: Fleet
    log: list[Struck] = field(default_factory=list)
    _held: list[_Held] = field(default_factory=list)

    def play(self, events: Sequence[Event]) -> None:
        """Let all events strike, one after the other, and wait until the last one is over."""
        self._wait(lambda: self._trained_since(0.0, range(self.fleet.replicas)), "the run's start")
        for event in events:
            self._let_pass(event.steps_before, event.seconds_before)
            self._end_all_but(self.log[-1:])
            self._strike(event)
        self._end_all_but([])

    def recover(self, outer_steps: int) -> None:
        """Wait until microbatches are routed among all replicas again, and for some outer steps beyond."""
        everybody = list(range(self.fleet.replicas))
        self._wait(
            lambda: all(s is not None and s.row["routed"] == everybody for s in map(self._newest, everybody)),
            "random routes among all replicas",
        )
        self._let_pass(outer_steps * self.fleet.config.noloco.inner_steps)

    def stop(self) -> None:
        """Ask the run to stop, by a signal to one rank, and wait until all processes have ended."""
        self.fleet.signal(self.fleet.replicas - 1, 0, signal.SIGTERM)
        self._wait(lambda: all(map(self.fleet.ended, range(self.fleet.replicas))), "the run's end")

    def _strike(self, event: Event) -> None:
        fleet, kind = self.fleet, event.kind
        since = time.monotonic()
        self._wait(lambda: bool(self._others_rows(since, event)), "a row of a replica that is not struck")
        if kind == "restart":
            self._wait(lambda: fleet.ended(event.replica), f"the end of what is left of replica {event.replica}")
        else:
            assert all(fleet.runs(replica, rank) for replica in event.hits() for rank in range(fleet.ranks)), event
        struck = Struck(event, time.monotonic(), step=fleet.step())
        print(f"{time.strftime('%X')} step {struck.step}: {event}", file=sys.stderr, flush=True)
        {
            "kill": self._kill, "restart": self._restart, "suspend": self._suspend, "cut": self._cut,
            "part": self._part, "rendezvous": self._end_rendezvous,
        }[kind](struck)  # fmt: skip
        self.log.append(struck)
        self._wait(lambda: bool(self._others_rows(struck.at, event)), f"a row of the others after {event}")

    def _others_rows(self, since: float, event: Event) -> list[Stamped]:
        return [stamped for stamped in self.fleet.rows_since(since) if stamped.row["replica"] not in event.hits()]

    def _kill(self, struck: Struck) -> None:
        event = struck.event
        self.fleet.signal(event.replica, event.rank, signal.SIGKILL)
        self._wait(lambda: not self.fleet.runs(event.replica, event.rank), "a process's end")
        struck.over = struck.at
        for held in list(self._held):  # it may have been on its way back
            if held.struck.event.kind == "restart" and held.struck.event.replica == event.replica:
                self._end(held)

    def _restart(self, struck: Struck) -> None:
        replica = struck.event.replica
        self.fleet.start(replica)
        self._hold(struck, lambda: self._trains_again(struck.at, replica), lambda: None)

    def _suspend(self, struck: Struck) -> None:
        event = struck.event
        self.fleet.signal(event.replica, event.rank, signal.SIGSTOP)
        self._wait(lambda: self.fleet.suspended(event.replica, event.rank), "a process's suspension")
        self._hold_seconds(struck, lambda: self.fleet.signal(event.replica, event.rank, signal.SIGCONT))

    def _cut(self, struck: Struck) -> None:
        replica, network = struck.event.replica, self.fleet.network
        network.cut(replica)
        assert not network.reaches(replica, (replica + 1) % self.fleet.replicas)
        self._hold_seconds(struck, lambda: network.mend(replica))

    def _part(self, struck: Struck) -> None:
        one, other, network = struck.event.replica, struck.event.other, self.fleet.network
        network.part(one, other)
        assert not network.reaches(one, other)
        self._hold_seconds(struck, lambda: network.unite(one, other))

    def _end_rendezvous(self, struck: Struck) -> None:
        self.fleet.end_rendezvous()
        self._hold_seconds(struck, self.fleet.serve_rendezvous)

    def _hold_seconds(self, struck: Struck, end: Callable[[], None]) -> None:
        self._hold(struck, lambda: time.monotonic() > struck.at + struck.event.seconds, end)

    def _hold(self, struck: Struck, ready: Callable[[], bool], end: Callable[[], None]) -> None:
        self._held.append(_Held(struck, ready, end))

    def _end(self, held: _Held) -> None:
        self._held.remove(held)
        held.end()
        held.struck.over = time.monotonic()

    def _tend(self) -> None:
        for held in list(self._held):
            if held.ready():
                self._end(held)

    def _end_all_but(self, spared: Sequence[Struck]) -> None:
        def over() -> bool:
            return all(any(held.struck is struck for struck in spared) for held in self._held)

        self._wait(over, f"the end of {[held.struck.event for held in self._held]}")

    def _let_pass(self, steps: int, seconds: float = 0.0) -> None:
        step, at = self.fleet.step() + steps, time.monotonic() + seconds
        self._wait(lambda: self.fleet.step() >= step and time.monotonic() >= at, f"inner step {step}")

    def _newest(self, replica: int) -> Stamped | None:
        rows = self.fleet.rows_since(0.0, replica)
        return rows[-1] if rows else None

    def _trains_again(self, at: float, replica: int) -> bool:
        assert not self.fleet.ended(replica), f"replica {replica} could not come back\n{self.fleet.outputs()}"
        return self._trained_since(at, [replica])

    def _trained_since(self, at: float, replicas: Sequence[int]) -> bool:
        return all(self.fleet.rows_since(at, replica) for replica in replicas)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.fleet.wait(ready, what, LIMIT_SECONDS, self._tend)
