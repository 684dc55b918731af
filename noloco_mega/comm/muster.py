"""With which replicas does a run begin, or is it under way?

With topology.start_replicas a run begins with those that are there once there are enough, and settled: the lowest of
them says who they are in one record, `founders`, which the rendezvous takes from one alone. Who is not among them waits
until the run is under way, and joins it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

from noloco_mega.comm.directory import PlaceTaken
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousTimeout
from noloco_mega.comm.wire import spoken

LOOK_SECONDS = 1.0
"""Between two looks at who has come."""
PAUSE_SECONDS = 0.1
"""Before looking again, where the last look was answered at once."""


class Muster:
    """What one rank of replica `replica` finds out at the rendezvous of who is there."""

    def __init__(
        self,
        client: RendezvousClient,
        *,
        replica: int,
        replicas: int,
        ranks: int,
        enough: int,
        settle_seconds: float,
        timeout_seconds: float,
    ) -> None:
        """`ranks`: of each replica; `enough`: how many begin the run; `settle_seconds`: how long they wait for
        more."""
        self._client, self._replica, self._replicas, self._ranks = client, replica, replicas, ranks
        self._enough, self._settle_seconds, self._timeout_seconds = enough, settle_seconds, timeout_seconds

    def running(self) -> tuple[int, ...]:
        """The other replicas that train, ascending. Raises as RendezvousClient.look."""
        others = [(replica, 0) for replica in range(self._replicas) if replica != self._replica]
        return tuple(sorted(replica for replica, _ in self._client.look("running", others))) if others else ()

    def wait(self) -> tuple[tuple[int, ...], bool]:
        """The replicas that begin the run, this one among them, or those that train already; and whether it is that.

        Raises RendezvousTimeout, and StartFailed as soon as somebody failed whom the run counts on.
        """
        deadline = time.monotonic() + self._timeout_seconds
        enough_since = math.inf
        while True:
            if running := self.running():
                return running, True
            founders = self._founders()
            if self._replica in founders:
                return founders, False
            here, now = self._here(), time.monotonic()
            if not founders and len(here) >= self._enough:
                if self._enough == self._replicas:
                    if self.running():
                        continue  # they have told a rendezvous that was started anew of both, since we looked
                    return here, False
                enough_since = min(enough_since, now)
                settled = len(here) == self._replicas or now - enough_since > self._settle_seconds
                if settled and self._replica == here[0]:
                    with contextlib.suppress(PlaceTaken):  # another one was quicker: the next look finds what it said
                        self._client.announce("founders", 0, 0, {"members": list(here)})
                    continue
            if now > deadline:
                raise self._in_vain(founders, here)
            time.sleep(PAUSE_SECONDS)

    def _founders(self) -> tuple[int, ...]:
        """The replicas that begin the run, once one of them has said so; nobody does where all have to be there."""
        found = self._client.look("founders", [(0, 0)]) if self._enough < self._replicas else {}
        return tuple(found[(0, 0)]["members"]) if found else ()

    def _here(self) -> tuple[int, ...]:
        """The replicas of which all ranks have started: all, or those that have after LOOK_SECONDS."""
        ranks = [(replica, rank) for replica in range(self._replicas) for rank in range(self._ranks)]
        found = self._client.look("start", ranks, LOOK_SECONDS)
        lacking = {replica for replica, rank in ranks if (replica, rank) not in found}
        return tuple(replica for replica in range(self._replicas) if replica not in lacking)

    def _in_vain(self, founders: Sequence[int], here: Sequence[int]) -> RendezvousTimeout:
        """Why this replica has waited long enough."""
        waited = f"in {self._timeout_seconds:g} s (noloco.rendezvous_timeout_seconds)"
        if founders:
            return RendezvousTimeout(
                f"the run begins with replicas {', '.join(map(str, founders))}, and they did not get under way "
                f"{waited}: their own output says why; then start this one again"
            )
        absent = [replica for replica in range(self._replicas) if replica not in here]
        return RendezvousTimeout(
            f"the run begins when {self._enough} replicas are there, and only {len(here)} came {waited}: not all ranks "
            f"have come of replica {', '.join(map(str, absent))}. Start them with the same run.name and the rendezvous "
            f"{spoken(self._client.address)}"
        )
