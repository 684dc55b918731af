"""What strikes a run, and when: a pure function of a seed.

    kill         SIGKILL to one rank; its replica stays dead until a `restart`
    restart      all ranks of a dead replica are started again
    suspend      SIGSTOP to one rank, SIGCONT `seconds` later
    cut          no packet leaves or reaches a replica for `seconds`
    part         no packet gets from one replica to another for `seconds`; all others are reached
    rendezvous   SIGKILL to the rendezvous, and a new one on the same port `seconds` later

What takes a while may still be going on when the next event strikes, and is over before the one after that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = {"kill": 4, "restart": 4, "suspend": 3, "cut": 2, "part": 2, "rendezvous": 2}
"""How often, in proportion, each is drawn where it is possible."""
STEPS_BETWEEN = (4, 16)
SECONDS_BETWEEN = (2.0, 8.0)
SECONDS = (2.0, 10.0)
LEAST_ALIVE = 2


@dataclass(frozen=True)
class Event:
    kind: str
    steps_before: int
    """Inner steps that the run takes between the event before and this one, at least."""
    seconds_before: float
    """That pass between the two, at least."""
    replica: int = -1
    rank: int = -1
    """In the replica."""
    other: int = -1
    """The second replica of a `part`."""
    seconds: float = 0.0

    def hits(self) -> frozenset[int]:
        """The replicas that it strikes."""
        return frozenset({self.replica, self.other} - {-1})

    def takes_out(self) -> frozenset[int]:
        """Of those the ones that others have to do without for a while: the two of a `part` still reach all others."""
        return frozenset() if self.kind == "part" else self.hits()


def draw(seed: int, count: int, replicas: int, ranks: int) -> list[Event]:
    """`count` events that leave nobody dead, kill replica 0 too, and are of every kind; of `ranks` per replica."""
    source = random.Random(seed)
    while True:
        events = list(_draw_once(source, count, replicas, ranks))
        killed = {event.replica for event in events if event.kind == "kill"}
        kinds = {event.kind for event in events}
        if not _dead_after(events) and 0 in killed and kinds == set(KINDS):
            return events


def _draw_once(source: random.Random, count: int, replicas: int, ranks: int) -> Iterator[Event]:
    events: list[Event] = []
    for _ in range(count):
        dead = _dead_after(events)
        before = events[-1] if events else Event("", 0, 0.0)
        alive = replicas - len(dead | before.takes_out())
        fit = sorted(set(range(replicas)) - dead - before.hits())
        possible = ["rendezvous"] if before.kind != "rendezvous" else []
        if dead:
            possible.append("restart")
        if fit and alive > LEAST_ALIVE:
            possible += ["kill", "suspend", "cut"]
        if len(fit) > 1 and alive > LEAST_ALIVE and before.kind != "part":
            possible.append("part")
        if not possible:
            return
        kind = source.choices(possible, [KINDS[kind] for kind in possible])[0]
        pool = {"restart": sorted(dead), "rendezvous": []}.get(kind, fit)
        replica, other = [*source.sample(pool, min(2, len(pool))), -1, -1][:2]
        events.append(
            Event(
                kind=kind,
                steps_before=source.randint(*STEPS_BETWEEN),
                seconds_before=source.uniform(*SECONDS_BETWEEN),
                replica=replica,
                rank=source.randrange(ranks) if kind in ("kill", "suspend") else -1,
                other=other if kind == "part" else -1,
                seconds=source.uniform(*SECONDS) if kind not in ("kill", "restart") else 0.0,
            )
        )
        yield events[-1]


def _dead_after(events: Sequence[Event]) -> frozenset[int]:
    dead: set[int] = set()
    for event in events:
        if event.kind == "kill":
            dead.add(event.replica)
        elif event.kind == "restart":
            dead.remove(event.replica)
    return frozenset(dead)
