"""How does the training loop keep its state? One object that brings it back at the start and saves it on the way.

keeper = Keeper(config, place, run, loader, journal, view_log)    before the model: chooses a checkpoint
step = keeper.begin(engine, outer, peers)                         after it: verifies, restores, opens the journal there
keeper.save(step)                                                 whenever keeper.due(step), and at the end
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from noloco_mega.bootstrap import Connection
from noloco_mega.checkpoint import courses, resume
from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.joiner import Donated, DonationFailed
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.checkpoint.saver import Saver
from noloco_mega.checkpoint.state import RankState
from noloco_mega.comm.control import NEVER
from noloco_mega.comm.membership import Peers
from noloco_mega.comm.wire import MALFORMED, shown
from noloco_mega.config import Config
from noloco_mega.data.loader import Loader
from noloco_mega.grid import Place
from noloco_mega.journal import Journal
from noloco_mega.outer.hook import Hook
from noloco_mega.plan.views import View

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

RETRY_SECONDS = 0.5
"""Before another donor is asked, or the same one again."""


class Keeper:
    """The checkpoints of one rank. Every rank calls it alike."""

    def __init__(
        self, config: Config, place: Place, run: Connection, loader: Loader, journal: Journal, view_log: list[View]
    ) -> None:
        """Choose where to begin, and let `view_log` say what it was there. Raises CheckpointError.

        `begin` changes `view_log` once more if it finds a file damaged and takes an older checkpoint.
        """
        self._config, self._place, self._run, self._journal = config, place, run, journal
        digest = loader.digest()
        self.facts: dict[str, Any] = {
            "replica": place.replica,
            "config": config.to_json(),
            "data": digest,
            "replica_batch_size": config.replica_batch_size,
        }
        """What every manifest of this replica says about the run; its `courses` are known once it has begun."""
        self._folders = Checkpoints(config.output / "checkpoints", place.replica, config.topology.replicas)
        self._view_log = view_log
        # A live replica's state wins over whatever lies on this one's disk.
        gathering = run.gathering
        self._choice = None if gathering.joins else resume.Choice(config, place, gathering, self._folders, digest)
        self._follow_views()

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a state that it had."""
        return self._choice is None or self._choice.start.resumed

    def begin(self, engine: DeepSpeedEngine, outer: Hook, peers: Peers) -> int:
        """Restore what was chosen, or an older one if that is damaged, and open the journal there.

        Collective over the replica, and waits for all replicas. Returns the inner steps done. Raises CheckpointError or
        OSError.
        """
        run, journal = self._run, self._journal
        self._state, self._outer, self._peers = RankState(engine, outer, run.world), outer, peers
        if self._choice is None:
            return self._join()
        losses: list[tuple[float, int]] = []

        def load(sources: Sequence[SavedReplica]) -> None:
            losses[:] = self._state.restore(sources)

        self._choice.take(load)
        start = self._choice.start
        self._follow_views()
        if start.resumed:
            self._state.publish()
        self.facts["courses"] = resume.begin(start, run.gathering, self._folders)
        journal.begin(start.step, outer.outer_step, losses, outer.skipped)
        if run.leads and self._place.replica == min(run.gathering.members):
            for note in start.notes:
                journal.warn(note)
            if start.resumed:
                journal.warn(f"goes on from step {start.step}")
        self._open_saver(start.step, start.step)
        return start.step

    def _open_saver(self, step: int, complete: int) -> None:
        run, warn = self._run, self._journal.warn
        self._saver = Saver(
            self._config, self._folders, run.world, self._peers, run.leaders, step, complete, self.facts, warn
        )  # fmt: skip

    def _join(self) -> int:
        """Begin with the state of a live replica. Collective over the replica."""
        self.take_over()
        self._run.gathering.trains()
        step, journal = self._outer.step, self._journal
        if self._run.leads:
            self._folders.begin(step, self.facts["courses"])
        journal.begin(step, self._outer.outer_step, skipped=self._outer.skipped)
        self._open_saver(step, self._folders.latest() or 0)
        return step

    def take_over(self) -> None:
        """Take a live replica's state, as it is after its next outer step. Collective over the replica.

        Raises ConnectionError if no live replica gives it in run's rendezvous timeout.
        """
        run, steering, peers = self._run, self._run.steering, self._peers
        deadline = time.monotonic() + self._config.noloco.rendezvous_timeout_seconds
        refused: set[int] = set()
        while True:
            donor = steering.choose_donor(refused)
            donated = None if donor == NEVER else self._donated(donor)
            # All ranks need the state of one step; and all must give up, or go on, together.
            step = -1 if donated is None else donated.numbers["hook"]["step"]
            lowest, highest, in_time = peers.agree(step, -step, time.monotonic() < deadline)
            if donated is not None and lowest == -highest:
                break
            if not in_time:
                raise ConnectionError("no live replica of the run gave its state; start this one again, or the run")
            refused = set() if donor == NEVER else {*refused, donor}
            time.sleep(RETRY_SECONDS)
        self._state.adopt(donated)
        self._view_log[:] = views_of(donated)
        self.facts["courses"] = courses_of(donated)
        steering.ready(self._outer.step)
        if run.leads:
            self._journal.warn(f"has the state of replica {donor} after step {self._outer.step}")

    def _donated(self, donor: int) -> Donated | None:
        """The state of this rank's twin in a live replica, if it comes and is for this rank."""
        try:
            donated = self._run.fetch(self._peers.addresses[donor], self._state.shape())
            if (reason := self._state.misfit(donated)) is not None:
                raise DonationFailed(reason)
            views_of(donated), courses_of(donated)
        except (DonationFailed, *MALFORMED) as error:
            self._journal.warn(f"the state of replica {donor} could not be taken over: {shown(error)}")
            return None
        return donated

    def heal(self) -> int:
        """Look at this replica's weights; where they are not finite, take over a live replica's state.

        Returns the inner step to go on from. Collective over the replica. Raises ConnectionError if nobody can help.
        """
        if not self._run.steering.cleared(self._state.finite()):
            self._journal.warn("the weights are not finite: leaves the others, and takes over a live replica's state")
            self.take_over()
        return self._outer.step

    def donate(self) -> None:
        """After an outer step: let a replica that joins have this one's state, if one waits for it."""
        if self._run.steering.donates:
            view_log = [[view.from_step, list(view.members)] for view in self._peers.view_log]
            facts = {"view_log": view_log, "courses": self.facts["courses"]}
            self._run.donor.offer(self._state.collect([]), facts)
            self._run.steering.donated()

    def due(self, step: int) -> bool:
        """Whether to save after `step` inner steps."""
        return self._saver.due(step)

    def save(self, step: int) -> None:
        """Save, if the run saves at all and this step is not saved yet. Collective over the replica."""
        content = self._state.collect(self._journal.pending())
        facts = {"tokens": self._journal.tokens(step), "losses": dict(self._journal.last)}
        self._journal.saved(self._saver.save(step, content, facts))

    def _follow_views(self) -> None:
        if self._choice is not None and self._choice.start.resumed:
            self._view_log[:] = self._choice.start.view_log

    def close(self) -> None:
        """Finish writing. Collective over the replica."""
        self._saver.close()


def views_of(donated: Donated) -> list[View]:
    """The run's view log, which a donor sends beside its state."""
    return [View(int(from_step), tuple(map(int, members))) for from_step, members in donated.facts["view_log"]]


def courses_of(donated: Donated) -> list[courses.Course]:
    """The run's courses so far, which a donor sends beside its state."""
    return courses.read(donated.facts["courses"])
