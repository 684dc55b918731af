"""What became of a run that was struck: figures from its rows, and when they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from tests.chaos.fleet import Stamped
from tests.chaos.strike import Struck


@dataclass(frozen=True)
class Verdict:
    """Rows by arrival, and the events that struck meanwhile."""

    rows: Sequence[Stamped]
    log: Sequence[Struck]

    def of(self, replica: int) -> list[Stamped]:
        return [stamped for stamped in self.rows if stamped.row["replica"] == replica]

    @property
    def replicas(self) -> list[int]:
        return sorted({stamped.row["replica"] for stamped in self.rows})

    def out(self, replica: int, since: float, until: float, kinds: Sequence[str]) -> bool:
        """Whether an event of these kinds had a replica out of action in some of that time."""
        return any(
            first < until and last > since
            for struck in self.log
            if replica in struck.event.hits() and struck.event.kind in kinds
            for first, last in [self._span(struck)]
        )

    def _span(self, struck: Struck) -> tuple[float, float]:
        """From when to when an event has its replicas out of action."""
        if struck.event.kind == "kill":
            back = [s.at for s in self.of(struck.event.replica) if s.at > self._restarted(struck)]
            return struck.at, min(back, default=float("inf"))
        return struck.at, float("inf") if struck.over is None else struck.over

    def _restarted(self, killed: Struck) -> float:
        again = [
            struck.at
            for struck in self.log
            if struck.event.kind == "restart" and struck.event.replica == killed.event.replica and struck.at > killed.at
        ]
        return min(again, default=float("inf"))

    def stalls(self) -> dict[int, float]:
        """Per replica: the longest time (seconds) between two of its rows, those apart between which it was dead, and
        without the time for which one of its ranks was suspended."""
        found = {}
        for replica in self.replicas:
            gaps = [
                after.at - before.at - self._suspended(replica, before.at, after.at)
                for before, after in pairwise(self.of(replica))
                if not self.out(replica, before.at, after.at, ["kill", "restart"])
            ]
            found[replica] = max(gaps, default=0.0)
        return found

    def _suspended(self, replica: int, since: float, until: float) -> float:
        spans = [
            self._span(struck) for struck in self.log
            if struck.event.kind == "suspend" and struck.event.replica == replica
        ]  # fmt: skip
        return sum(max(0.0, min(last, until) - max(first, since)) for first, last in spans)

    def exchanges(self) -> list[tuple[Stamped, bool]]:
        """The exchanges between replicas that both lived, ran and reached each other: (row, whether it succeeded)."""
        return [(stamped, good) for stamped, good in self._attempts() if not self._disturbed(stamped)]

    def _attempts(self) -> list[tuple[Stamped, bool]]:
        """All exchanges: (row, whether it succeeded)."""
        paired = [s for s in self.rows if s.row["outer_step"] is not None and s.row["partner"] is not None]
        return [(stamped, stamped.row["missed"] == 0) for stamped in paired]

    def _disturbed(self, exchange: Stamped) -> bool:
        """Whether one of the pair was out of action."""
        row = exchange.row
        # From a step before its launch, when the pair was drawn, to its row.
        begun = exchange.at - row["exchange_seconds"] - 2.0
        kinds = ("kill", "restart", "suspend", "cut", "part")
        return any(self.out(replica, begun, exchange.at, kinds) for replica in (row["replica"], row["partner"]))

    def redone_after(self, struck: Struck) -> dict[int, int]:
        """Inner steps that each other replica took twice between a death and the next event."""
        after = [other.at for other in self.log if other.at > struck.at]
        until = min(after, default=float("inf"))
        return {
            replica: sum(s.row["redone_steps"] or 0 for s in self.of(replica) if struck.at < s.at < until)
            for replica in self.replicas
            if replica not in struck.event.hits()
        }

    def met_after(self, struck: Struck) -> list[bool]:
        """Of a replica that was started again: whether each of its first three exchanges succeeded, those apart that
        failed because one of the pair was struck. Shorter where it was struck anew before."""
        replica = struck.event.replica
        again = [o.at for o in self.log if o.at > struck.at and replica in o.event.hits()]
        until = min(again, default=float("inf"))
        return [
            good for stamped, good in self._attempts()
            if stamped.row["replica"] == replica and struck.at < stamped.at < until
            if good or not self._disturbed(stamped)
        ][:3]  # fmt: skip

    def steps_trained(self) -> int:
        """Inner steps of all replicas together, with those that died unsaved."""
        return len(self.rows)

    def spread(self, outer_steps: int) -> float:
        """Mean over the last outer steps of those exchanges that took place."""
        last = max(stamped.row["outer_step"] or 0 for stamped in self.rows)
        rows = [s.row for s in self.rows if s.row["spread"] is not None]
        return mean(row["spread"] for row in rows if row["outer_step"] > last - outer_steps)

    def validation_loss(self) -> float:
        """Mean over the replicas, of each one's last."""
        return mean(
            [s.row["val_loss"] for s in self.of(replica) if s.row["val_loss"] is not None][-1]
            for replica in self.replicas
        )
