"""Where do a run's checkpoints lie, and which of them are whole?

    runs/NAME/checkpoints/latest                       the newest step that is complete on all replicas, as far as known
    runs/NAME/checkpoints/step_00000200/replica_00/    complete: it appeared by a rename
    runs/NAME/checkpoints/step_00000200/.replica_00.draft/         being written, or left by a process that died
    runs/NAME/checkpoints/step_00000200/.replica_00.superseded/    set aside: the run went on from an older step

Each replica touches only what is its own, so replicas may share the folder or not; `latest` is shared where the folder
is, and changes under a lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_mega.checkpoint import courses as ways
from noloco_mega.checkpoint.courses import Course
from noloco_mega.checkpoint.format import CheckpointError, sync, write_synced
from noloco_mega.checkpoint.reader import SavedReplica

LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_REPLICA = re.compile(r"replica_(\d{2,})")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name says, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def replica_name(replica: int) -> str:
    return f"replica_{replica:02d}"


@dataclass(frozen=True)
class Seen:
    """One step's folder: the replicas that are complete in it, and why others are not."""

    replicas: dict[int, SavedReplica]
    problems: list[str]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints folder of a run, as replica `replica` of `replicas` uses it.

    Where more replicas have saved before, what a replica does to its own folders it also does to those of j ≡ replica
    (mod replicas), which no longer take part.
    """

    root: Path
    replica: int
    replicas: int

    def folder(self, step: int) -> Path:
        """This replica's, complete."""
        return self.root / step_name(step) / replica_name(self.replica)

    def draft(self, step: int) -> Path:
        """This replica's, while it is written."""
        return _aside(self.folder(step), "draft")

    def all_steps(self) -> list[int]:
        """The steps that have a folder, ascending."""
        if not self.root.is_dir():
            return []
        found = (step_of(path.name) for path in self.root.iterdir())
        return sorted(step for step in found if step is not None)

    def steps(self) -> list[int]:
        """The steps at which this replica has something complete, ascending."""
        return [step for step in self.all_steps() if self.folder(step).exists()]

    def seen(self) -> dict[int, Seen]:
        """Every step of which something can be read here, with every replica found in it, ascending."""
        return {step: self.look(step) for step in self.all_steps()}

    def look(self, step: int) -> Seen:
        """The replicas of one step, their manifests read and their files' sizes compared. Of several courses of the run
        only the newest one's are there."""
        replicas: dict[int, SavedReplica] = {}
        problems: list[str] = []
        folder = self.root / step_name(step)
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            match = _REPLICA.fullmatch(path.name)
            if match is None:
                continue
            try:
                saved = SavedReplica(path)
                claim = (saved.manifest.get("step"), saved.manifest.get("replica"))
                if claim != (step, int(match[1])):
                    raise CheckpointError(f"{path} holds step {claim[0]} of replica {claim[1]}: it was moved there")
            except CheckpointError as error:
                problems.append(str(error))
            else:
                replicas[int(match[1])] = saved
        began = {replica: ways.of(saved.manifest)[-1].began for replica, saved in replicas.items()}
        for replica in [replica for replica in replicas if began[replica] < max(began.values())]:
            problems.append(f"{replicas.pop(replica).folder} is of an earlier course of the run, which was given up")
        return Seen(replicas, problems)

    def latest(self) -> int | None:
        """What `latest` says."""
        try:
            return step_of((self.root / LATEST).read_text().strip())
        except FileNotFoundError:
            return None

    def advance_latest(self, step: int) -> None:
        """Let `latest` name `step`, unless it names a newer one. Raises OSError."""
        with open(self.root / f".{LATEST}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if step > (self.latest() or -1):
                write_synced(self.root / LATEST, step_name(step) + "\n")

    def begin(self, step: int, courses: Sequence[Course], absent: Collection[int] = ()) -> None:
        """The run goes on from `step` (0: from its start), which these courses led to: remove what died in the making,
        set aside newer steps and those that are not on that way. So for this replica, and for the `absent` ones.

        They would otherwise mix with the ones that this run is going to write. Raises OSError.
        """
        for other in self.all_steps():
            for name in self._own(other, r"\.({})\.(draft|removed|old)", absent):
                shutil.rmtree(name, ignore_errors=True)
            for folder in self._own(other, "({})", absent):
                if other > step or not _on_the_way(courses, folder):
                    shutil.rmtree(_aside(folder, "superseded"), ignore_errors=True)
                    os.rename(folder, _aside(folder, "superseded"))
            self._drop_empty(other)
        if self.root.exists():
            with open(self.root / f".{LATEST}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                latest = self.latest()
                left = [other for other in self.all_steps() if other <= min(step, latest or 0) and self._holds(other)]
                if latest is not None and not left:
                    (self.root / LATEST).unlink()
                elif left and left[-1] != latest:
                    write_synced(self.root / LATEST, step_name(left[-1]) + "\n")

    def prune(self, keep: int, others: Collection[int]) -> None:
        """Keep this replica's `keep` newest steps, and these others. Raises OSError."""
        steps = self.steps()
        for step in steps[:-keep]:
            for folder in self._own(step, "({})") if step not in others else ():
                # Renamed first, so that a half removed folder never looks complete.
                os.rename(folder, _aside(folder, "removed"))
                sync(folder.parent)
                shutil.rmtree(_aside(folder, "removed"))
            self._drop_empty(step)

    def drop_superseded(self) -> None:
        """Remove what was set aside. Raises OSError."""
        for step in self.all_steps():
            for folder in self._own(step, r"\.({})\.superseded"):
                shutil.rmtree(folder, ignore_errors=True)
            self._drop_empty(step)

    def _holds(self, step: int) -> bool:
        """Whether anybody's is complete at a step."""
        return any(_REPLICA.fullmatch(path.name) for path in (self.root / step_name(step)).iterdir())

    def _own(self, step: int, pattern: str, absent: Collection[int] = ()) -> list[Path]:
        """This replica's folders of a step whose names are `pattern` with a replica's name in the place of {}; and
        those of the `absent` ones."""
        own = []
        for path in (self.root / step_name(step)).iterdir():
            match = re.fullmatch(pattern.format(_REPLICA.pattern), path.name)
            if match and int(match[2]) % self.replicas in (self.replica, *absent):
                own.append(path)
        return own

    def _drop_empty(self, step: int) -> None:
        folder = self.root / step_name(step)
        if folder.is_dir() and not any(folder.iterdir()):
            try:
                folder.rmdir()
            except OSError:
                return  # another replica has just written into it


def _on_the_way(courses: Sequence[Course], folder: Path) -> bool:
    """Whether a replica's folder is, or can't be read."""
    try:
        return ways.holds(courses, SavedReplica(folder).manifest)
    except CheckpointError:
        return True


def _aside(folder: Path, state: str) -> Path:
    """Where a folder lies while it is not, or no longer, complete."""
    return folder.with_name(f".{folder.name}.{state}")
