"""When and in which order is a checkpoint written? Staged, written behind training, committed, made known, pruned.

    every rank, in the loop     settle the last save, copy the state into staging memory, go on training
    every rank, behind it       write its file, sync it, leave its PART
    the leader, behind it       once all PARTs are there: manifest, rename; then tell the other leaders

Nothing behind the loop takes part in a collective. In the loop there is one, over the replica: when a save is settled
its ranks agree whether all have written, so that nobody waits for a rank whose disk is full. A failed write is told to
the user and costs that one checkpoint.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.format import RankContent, Stored, commit, parts_missing, write_rank
from noloco_mega.comm.control import Leaders
from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.comm.membership import Peers
from noloco_mega.comm.wire import Message
from noloco_mega.config import Config
from noloco_mega.plan import views

POLL_SECONDS = 0.02
"""Between two looks for the PARTs of a replica's other ranks."""
MOST_UNDECIDED = 8
"""Saves that this replica keeps at most because others may have them too, or be about to."""
CLOSE_SECONDS = 10.0
"""How long a replica that ends waits for others' last saves: launchers kill what has not ended 30 s after a SIGTERM."""


class Completion:
    """Which steps are complete on all replicas? What the leaders tell each other of it, as one of them knows it.

    Moves `latest` and prunes this replica's folders accordingly. News may be late, and another replica may know already
    that a step is complete, and have given up an older one for it: so none is pruned that could be complete.
    Safe to call from any thread.
    """

    KIND = "saved"

    def __init__(
        self,
        folders: Checkpoints,
        leaders: Leaders,
        present: views.ViewLog,
        keep: int,
        complete: int,
        warn: Callable[[str], None],
    ) -> None:
        """`complete`: the newest step that is complete already."""
        self._folders, self._leaders, self._present, self._keep, self._warn = folders, leaders, present, keep, warn
        self._changed = threading.Condition()
        self._known: dict[int, set[int]] = {}
        self._past: dict[int, int] = {}
        """Of each replica: the newest step that it has saved, or failed to save."""
        self._complete = complete
        leaders.subscribe(self.KIND, self._on_message)
        leaders.on_refused.append(self._look_again)

    def saved(self, step: int) -> None:
        """This replica's `step` is on disk."""
        self._settled(step, {step})

    def lost(self, step: int) -> None:
        """This replica has failed to save `step`."""
        self._settled(step, set())

    def _settled(self, step: int, saved: set[int]) -> None:
        with self._changed:
            own = self._known.setdefault(self._leaders.replica, set())
            own |= saved
            self._past[self._leaders.replica] = step
            told = sorted(own)[-MOST_UNDECIDED:]  # those before were told often enough
            self._advance()
        self._leaders.broadcast(self.KIND, {"saved": told, "past": step})

    def wait(self, step: int, timeout_seconds: float) -> bool:
        """Wait for `step` to become known as complete on all replicas; not for one whose process has ended.

        Returns whether it has, within the time.
        """

        def settled() -> bool:
            return self._complete >= step or self._missing(step) <= self._leaders.gone

        with self._changed:
            self._changed.wait_for(settled, timeout_seconds)
            return self._complete >= step

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_message(self, sender: int, message: Message) -> None:
        steps, past = message.get("saved"), message.get("past")
        if sender not in range(self._folders.replicas):
            return
        if isinstance(past, int) and isinstance(steps, list) and all(isinstance(step, int) for step in steps):
            with self._changed:
                self._known.setdefault(sender, set()).update(steps)
                self._past[sender] = past
                self._advance()

    def _missing(self, step: int) -> set[int]:
        """The replicas present at a step that are not known to have saved it; who was absent is not expected to."""
        return {r for r in views.at(self._present, step).members if step not in self._known.get(r, ())}

    def _undecided(self) -> list[int]:
        """This replica's newest steps that may yet turn out to be complete, on all whom it counts on. Callers hold the
        lock."""

        def lacks(replica: int, step: int) -> bool:
            told = self._known.get(replica, ())
            return step not in told and (self._past.get(replica, -1) >= step or replica in self._leaders.gone)

        own = [step for step in self._known.get(self._leaders.replica, ()) if step > self._complete]
        open_ = [s for s in own if not any(lacks(other, s) for other in views.at(self._present, s).members)]
        return sorted(open_)[-MOST_UNDECIDED:]

    def _advance(self) -> None:
        """Callers hold the lock."""
        whole = [step for step in set().union(*self._known.values()) if not self._missing(step)]
        before = self._complete
        self._complete = max([self._complete, *whole])
        try:
            if self._complete > before:
                self._folders.advance_latest(self._complete)
                self._folders.drop_superseded()
            self._folders.prune(self._keep, {self._complete, *self._undecided()})
        except OSError as error:
            self._warn(f"older checkpoints could not be pruned: {error}")
        self._changed.notify_all()


@dataclass
class _Job:
    """One save on its way to disk."""

    step: int
    written: threading.Event = field(default_factory=threading.Event)
    """This rank's file is on disk, or has failed."""
    failed: bool = False
    given_up: threading.Event = field(default_factory=threading.Event)
    """Another rank has failed: there is nothing to commit."""
    thread: threading.Thread | None = None


class Saver:
    """Writes one rank's part of the checkpoints. Every rank of a replica calls it alike."""

    def __init__(
        self,
        config: Config,
        folders: Checkpoints,
        world: ReplicaWorld,
        peers: Peers,
        leaders: Leaders,
        start: int,
        complete: int,
        facts: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        """The run goes on from step `start` (0: from its beginning), and step `complete` is the newest that is complete
        on all replicas. `facts` go into every manifest, beside the step.
        `warn` tells the user of a failed write."""
        self._settings, self._world, self._peers, self._facts, self._warn = config.run, world, peers, facts, warn
        self._folders = folders
        self._rank = world.grid.replica_rank(world.place)
        self._wait_seconds = min(CLOSE_SECONDS, config.noloco.exchange_deadline_seconds)
        self._leaders = leaders
        keep = config.run.keep_checkpoints
        self._completion = Completion(folders, leaders, peers.present, keep, complete, warn)
        self._staging: dict[str, Stored] = {}
        self._job: _Job | None = None
        self._last_step = start

    def due(self, step: int) -> bool:
        """Whether `step` inner steps are a moment to save."""
        return bool(self._settings.save_every) and step % self._settings.save_every == 0

    def save(self, step: int, content: RankContent, facts: Mapping[str, Any]) -> float:
        """Save the state after `step` inner steps, unless it is there. Collective over the replica.

        Returns the seconds for which training stood still: the wait for an unfinished save and the copy, or, without
        run.save_async, the whole write. `facts` go into this manifest.
        """
        if not self._settings.save_every or step == self._last_step:
            return 0.0
        began = time.monotonic()
        self.settle()
        self._last_step = step
        job = self._job = _Job(step)
        content = self._staged(content)
        logs = {"view_log": self._peers.view_log, "present": self._peers.present}
        facts = {**self._facts, **facts, "step": step, **{key: list(map(list, log)) for key, log in logs.items()}}
        job.thread = threading.Thread(target=self._write, args=(job, content, facts), name="checkpoint", daemon=True)
        job.thread.start()
        if not self._settings.save_async:
            self.settle()
        return time.monotonic() - began

    def settle(self) -> None:
        """Wait until the last save is on disk, or known to have failed. Collective over the replica."""
        if self._job is None:
            return
        job, self._job = self._job, None
        assert job.thread is not None
        job.written.wait()
        (all_written,) = self._peers.agree(not job.failed)
        if not all_written:
            job.given_up.set()
        job.thread.join()
        if self._rank == 0 and (job.failed or not all_written):
            shutil.rmtree(self._folders.draft(job.step), ignore_errors=True)  # nobody writes into it any more
            self._completion.lost(job.step)

    def close(self) -> None:
        """Finish what is under way, and wait a while for the other replicas. Collective over the replica."""
        saved = self._job
        self.settle()
        if self._rank == 0 and saved is not None and not saved.failed:
            self._leaders.flush()
            self._completion.wait(saved.step, self._wait_seconds)

    def _staged(self, content: RankContent) -> RankContent:
        """The same content in memory that training does not touch, unless training waits for the write anyway."""
        device = self._world.device
        if not self._settings.save_async and not device.is_cuda:
            return content
        staged, pairs = [], []
        for live in content.tensors:
            if live.key not in self._staging:
                self._staging[live.key] = dataclasses.replace(live, tensor=device.host_tensor(live.tensor))
            staged.append(self._staging[live.key])
            pairs.append((staged[-1].tensor, live.tensor))
        device.copy_to_host(pairs)
        return dataclasses.replace(content, tensors=staged)

    def _write(self, job: _Job, content: RankContent, facts: Mapping[str, Any]) -> None:
        """Behind training: this rank's file, and on the leader the commit."""
        draft = self._folders.draft(job.step)
        try:
            draft.mkdir(parents=True, exist_ok=True)
            write_rank(draft, self._rank, content)
        except OSError as error:
            self._failed(job, error)
        except BaseException:
            job.failed = True  # a fault of ours; nobody may wait for it
            raise
        finally:
            job.written.set()
        if job.failed or self._rank != 0:
            return
        ranks = range(self._world.grid.replica_size)
        while parts_missing(draft, ranks):
            if job.given_up.wait(POLL_SECONDS):
                return
        try:
            commit(draft, self._folders.folder(job.step), ranks, facts)
        except OSError as error:
            self._failed(job, error)
            return
        self._completion.saved(job.step)

    def _failed(self, job: _Job, error: OSError) -> None:
        job.failed = True
        self._warn(f"the checkpoint of step {job.step} could not be written, training goes on without it: {error}")
