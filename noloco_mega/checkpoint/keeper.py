"""How does the training loop keep its state? One object that brings it back at the start and saves it on the way.

keeper = Keeper(config, place, run, loader, journal, view_log)    before the model: chooses and verifies a checkpoint
step = keeper.begin(engine, outer, peers)                         after it: restores, and opens the journal there
keeper.save(step)                                                 whenever keeper.due(step), and at the end
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from noloco_mega.bootstrap import Connection
from noloco_mega.checkpoint import resume
from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.saver import Saver
from noloco_mega.checkpoint.state import RankState
from noloco_mega.comm.membership import Peers
from noloco_mega.config import Config
from noloco_mega.data.loader import Loader
from noloco_mega.grid import Place
from noloco_mega.journal import Journal
from noloco_mega.outer.hook import Hook
from noloco_mega.plan.views import View

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Keeper:
    """The checkpoints of one rank. Every rank calls it alike."""

    def __init__(
        self, config: Config, place: Place, run: Connection, loader: Loader, journal: Journal, view_log: list[View]
    ) -> None:
        """Choose where to begin, and let `view_log` say what it was there. Raises CheckpointError."""
        self._config, self._place, self._run, self._journal = config, place, run, journal
        digest = loader.digest()
        self.facts = {
            "replica": place.replica,
            "config": config.to_json(),
            "data": digest,
            "replica_batch_size": config.replica_batch_size,
        }
        """What every manifest of this replica says about the run."""
        self._folders = Checkpoints(config.output / "checkpoints", place.replica, config.topology.replicas)
        self._start = resume.choose(config, place, run, self._folders, digest)
        if self._start.resumed:
            view_log[:] = self._start.view_log

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._start.resumed

    def begin(self, engine: DeepSpeedEngine, outer: Hook, peers: Peers) -> int:
        """Restore what was chosen, and open the journal there. Collective over the replica.

        Returns the inner steps done. Raises CheckpointError or OSError.
        """
        start, run, journal = self._start, self._run, self._journal
        self._state = RankState(engine, outer, run.world)
        losses = self._state.restore(start.sources) if start.resumed else []
        resume.begin(start, run, self._folders)
        journal.begin(start.step, outer.outer_step, losses, outer.skipped)
        if run.leads and self._place.replica == 0:
            for note in start.notes:
                journal.warn(note)
            if start.resumed:
                journal.warn(f"goes on from step {start.step}")
        self._saver = Saver(
            self._config, self._folders, run.world, peers, run.leaders, start.step, self.facts, journal.warn
        )
        return start.step

    def due(self, step: int) -> bool:
        """Whether to save after `step` inner steps."""
        return self._saver.due(step)

    def save(self, step: int) -> None:
        """Save, if the run saves at all and this step is not saved yet. Collective over the replica."""
        content = self._state.collect(self._journal.pending())
        facts = {"tokens": self._journal.tokens(step), "losses": dict(self._journal.last)}
        self._journal.saved(self._saver.save(step, content, facts))

    def close(self) -> None:
        """Finish writing. Collective over the replica."""
        self._saver.close()
