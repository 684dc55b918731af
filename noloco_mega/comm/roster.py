"""Which replicas live, where are they, and how far? What the leaders' heartbeats say, as one leader knows it.

A replica is dead once nothing has been heard of it for DEAD_BEATS heartbeats, or its host refuses connections. A late
activation or a missed exchange never makes it so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from noloco_mega.comm.wire import Address, Message, shown

NUMBERS = ("incarnation", "beat", "step", "launched", "circuit", "highest_circuit", "present")
FLAGS = ("ready", "well", "sound", "leaving")
LARGEST = 1 << 62
"""No step and no time in nanoseconds comes this far."""
DEAD_BEATS = 4
"""Heartbeats that may be missing before a replica is taken for dead."""


@dataclass(frozen=True)
class Standing:
    """What a replica's leader says of it with every heartbeat."""

    incarnation: int
    """When the leader's process started (nanoseconds): tells a restarted replica from the one before."""
    beat: int
    """Counts heartbeats, so that one that was overtaken is dropped."""
    ranks: tuple[Address, ...]
    """Where its ranks listen, in the order of their rank in the replica."""
    step: int = 0
    """Inner steps of the run that it has reached."""
    launched: int = -1
    """The last outer step that it has begun, -1 for none."""
    ready: bool = False
    """It trains: its state is the run's."""
    well: bool = True
    """All its ranks run."""
    sound: bool = True
    """Its weights are finite."""
    leaving: bool = False
    """It ends as it should, and is not to be waited for."""
    circuit: int = 0
    """The number of the circuit that it routes on."""
    highest_circuit: int = 0
    """The highest number of a circuit that it has heard of."""
    present: int = 0
    """The number of the last announcement of who is present that it follows."""

    def message(self) -> Message:
        return {"standing": asdict(self)}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Standing:
        """Raises ValueError for what is no standing."""
        fields = message.get("standing")
        if not isinstance(fields, dict):
            raise ValueError("no standing in the message")
        try:
            ranks = tuple((str(host), int(port)) for host, port in fields["ranks"])
            numbers: Any = {name: int(fields[name]) for name in NUMBERS}
            flags: Any = {name: bool(fields[name]) for name in FLAGS}
            if not all(-1 <= number < LARGEST for number in numbers.values()):
                raise ValueError(f"numbers that no run reaches: {shown(numbers)}")
            return cls(ranks=ranks, **numbers, **flags)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"a malformed standing: {shown(error)}") from error


@dataclass(frozen=True)
class _Known:
    standing: Standing
    heard: float
    launched: float
    """When it was heard that the last outer step had begun."""


class Roster:
    """What one leader knows of the others. All methods are safe to call from any thread."""

    def __init__(
        self, replica: int, own: Standing, heartbeat_seconds: float, refused: MutableMapping[int, Address]
    ) -> None:
        """`refused`: the leaders whose host has refused a connection (Leaders.refused); who is heard is taken out."""
        self.replica = replica
        self.dead_after_seconds = DEAD_BEATS * heartbeat_seconds
        self._own = own
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._refused = refused

    @property
    def own(self) -> Standing:
        return self._own

    def say(self, **changes: Any) -> Standing:
        """Change what this replica says of itself; every call is a new beat."""
        with self._lock:
            self._own = replace(self._own, beat=self._own.beat + 1, **changes)
            return self._own

    def hear(self, replica: int, standing: Standing) -> bool:
        """Take a heartbeat; whether it is from a process that was not known before."""
        gone = replica in self.dead()
        with self._lock:
            known, now = self._known.get(replica), time.monotonic()
            launched, restarted = now, True
            if known is not None:
                before = known.standing
                restarted = standing.incarnation != before.incarnation
                if (
                    standing.incarnation < before.incarnation and not gone
                    if restarted
                    else standing.beat <= before.beat
                ):
                    return False
                if standing.launched == before.launched:
                    launched = known.launched
            self._known[replica] = _Known(standing, now, launched)
            self._refused.pop(replica, None)
            return restarted

    def is_news(self, replica: int, incarnation: int) -> bool:
        """Whether this process of a replica's leader is none that was heard of, nor one from before."""
        if replica == self.replica:
            return False
        with self._lock:
            known = self._known.get(replica)
        return known is None or incarnation > known.standing.incarnation

    def whereabouts(self) -> dict[int, tuple[int, Address]]:
        """Of every other replica that lives: when its leader's process started, and where it listens."""
        dead = self.dead()
        with self._lock:
            return {
                replica: (known.standing.incarnation, known.standing.ranks[0])
                for replica, known in self._known.items()
                if replica not in dead
            }

    def forgive(self) -> None:
        """Count every silence from now on: this process itself did not run for a while."""
        now = time.monotonic()
        with self._lock:
            self._known = {replica: replace(known, heard=now) for replica, known in self._known.items()}

    def standing(self, replica: int) -> Standing | None:
        """The last that was heard of a replica; this one's own."""
        if replica == self.replica:
            return self._own
        with self._lock:
            known = self._known.get(replica)
        return None if known is None else known.standing

    def standings(self, replicas: Iterable[int]) -> dict[int, Standing]:
        """The standings of those of these replicas that were ever heard of, in the order given."""
        return {replica: found for replica in replicas if (found := self.standing(replica)) is not None}

    def dead(self) -> dict[int, str]:
        """The replicas that were known and are not to be counted on, each with the reason."""
        now, found = time.monotonic(), {}
        with self._lock:
            for replica, known in self._known.items():
                silent = now - known.heard
                if known.standing.leaving:
                    found[replica] = "it has left the run"
                elif replica in self._refused:
                    found[replica] = "its process has ended"
                elif silent > self.dead_after_seconds:
                    found[replica] = f"nothing was heard of it for {silent:.1f} s"
                elif not known.standing.well:
                    found[replica] = "one of its ranks is silent"
                elif not known.standing.sound:
                    found[replica] = "its weights are not finite"
        return found

    def able(self) -> tuple[int, ...]:
        """The replicas that live, train and are whole, this one included if it is; ascending."""
        dead = self.dead()
        with self._lock:
            others = [r for r, known in self._known.items() if r not in dead and known.standing.ready]
            mine = self._own
            own = [self.replica] if mine.ready and mine.well and mine.sound and not mine.leaving else []
        return tuple(sorted([*others, *own]))

    def lower(self, replica: int) -> list[int]:
        """The able replicas that speak before this one."""
        return [able for able in self.able() if able < replica]

    def waits(self, replicas: Sequence[int], outer_step: int) -> float | None:
        """For how many seconds the first of these replicas has been in outer step `outer_step`: 0 if none has come yet,
        or none lives; None if all that live are past it."""
        dead, now = self.dead(), time.monotonic()
        with self._lock:
            living = [known for r in replicas if r not in dead and (known := self._known.get(r)) is not None]
        if living and all(known.standing.launched > outer_step for known in living):
            return None
        return max((now - known.launched for known in living if known.standing.launched == outer_step), default=0.0)

    def furthest(self) -> int:
        """The highest outer step that another replica is known to have begun; -1 for none."""
        with self._lock:
            return max((known.standing.launched for known in self._known.values()), default=-1)
