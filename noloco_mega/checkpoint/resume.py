"""Which checkpoint does a run go on from, and which of its replicas does each replica take over?

    every leader     announces the steps that it could go on from: whole manifests, files of the right sizes
    everybody        picks the same step from what all have announced, and learns whether it fits all configurations
    every rank       once it has a model: reads its state into it, verifying its share of the files (`Choice.take`)
    every leader     announces whether a file was bad; "auto" then tries the next older step, a named step is an error
    every leader     sets newer steps aside, once everything else has worked (`begin`)

Nothing on disk is touched before that, and nobody trains from a step before all replicas have verified it.

Replica i of N takes over replica i of the N' that have saved, or where that one was absent (dead, say) when the others
saved, the nearest in number. With more replicas than that (N > N') the new ones copy replica i mod N'. With fewer,
run.shrink says whether the rest is dropped, or merged: replica i then takes the mean over j ≡ i (mod N) of masters,
moments, φ and δ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noloco_mega.checkpoint import courses as ways
from noloco_mega.checkpoint.courses import Course
from noloco_mega.checkpoint.folders import Checkpoints, Seen, step_name
from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.config import Config, with_defaults
from noloco_mega.gathering import Gathering
from noloco_mega.grid import Place
from noloco_mega.plan import views
from noloco_mega.plan.views import View

OFFERED_STEPS = 100
"""Newest steps that a replica announces: a record of the rendezvous is small."""
PROBLEM_CHARACTERS = 300
GIVEN_UP = "what it has saved there is of an earlier course of the run, which was given up"
NOTHING = -1

Verdict = dict[str, Any]
"""{"bad": what is wrong with a step or None, "final": whether an older step would be no better}"""
GOOD: Verdict = {"bad": None, "final": False}


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    step: int = 0
    """Inner steps done."""
    resumed: bool = False
    """Whether there is a state to take over."""
    sources: Sequence[SavedReplica] = ()
    """The saved replicas that this one takes over: one, or several to merge."""
    courses: Sequence[Course] = ()
    """Those that led there."""
    view_log: Sequence[View] = ()
    """The run's views so far, and the one that begins here if the replicas are others."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What the user should know, in sentences."""


class Choice:
    """The step that config.run.resume asks for, agreed on by all. Every rank of every replica makes the same calls."""

    def __init__(self, config: Config, place: Place, gathering: Gathering, folders: Checkpoints, data: str) -> None:
        """Choose a step, by manifests and sizes; `data` is the hash of the run's token files.

        Raises CheckpointError where none can be had, or the configuration does not fit it.
        """
        self._config, self._place, self._gathering, self._folders = config, place, gathering, folders
        self._data = data
        self._notes: list[str] = []
        self._rejected: set[int] = set()
        request = config.run.resume
        self._seen: dict[int, Seen] = {} if request == "no" else folders.seen()
        offers = gathering.ask_leaders("checkpoints", _offer(config, place.replica, self._seen))
        self._offers, given_up = _of_newest_courses(offers)
        for step in given_up[place.replica]:
            self._seen[step] = Seen({}, [GIVEN_UP])
        others = [replica for replica, offer in self._offers.items() if offer["asked"] != str(request)]
        if str(request) != self._offers[place.replica]["asked"] or others:
            raise CheckpointError(
                f"replica {place.replica} was started with run.resume = {request}, replica "
                f"{', '.join(map(str, others))} with another one; start all of them alike"
            )
        self.start = self._propose()
        """Where the run begins, unless `take` finds a file damaged."""

    def take(self, load: Callable[[Sequence[SavedReplica]], object]) -> None:
        """Let `load` read the chosen sources, on all ranks at once; where it raises CheckpointError on any of them,
        choose an older step and try again. `load` must not wait for other ranks.

        Raises CheckpointError where no step can be read.
        """
        while self.start.resumed:
            verdict = GOOD
            try:
                load(self.start.sources)
            except CheckpointError as error:
                verdict = {"bad": str(error)[:PROBLEM_CHARACTERS], "final": False}
            if self._all_good("read", self.start.step, verdict):
                return
            self.start = self._propose()

    def _propose(self) -> Start:
        """The newest step that has not been rejected and fits."""
        while (step := _pick(self._config.run.resume, self._offers, self._rejected, self._notes)) != NOTHING:
            sources, misfit = _sources(self._config, self._place, self._seen, step)
            if self._all_good("fits", step, misfit or GOOD):
                return _start(self._config, step, sources, self._data, self._notes)
        if self._rejected:
            raise CheckpointError(
                f"none of the checkpoints in {self._folders.root} can be used, and starting anew would give them up: "
                + "; ".join(self._notes)
            )
        return Start(notes=self._notes)

    def _all_good(self, question: str, step: int, verdict: Verdict) -> bool:
        """Whether all ranks of all replicas say so of a step; it is rejected otherwise. Raises CheckpointError where an
        older one is not wanted, or would be no better."""
        told = self._gathering.ask_siblings(f"{question} {step}", verdict)
        mine = next((each for each in told if each["bad"]), GOOD)
        verdicts = self._gathering.ask_leaders(f"all {question} {step}", mine)
        problems = {replica: each for replica, each in verdicts.items() if each["bad"]}
        if not problems:
            return True
        text = "; ".join(f"replica {replica}: {each['bad']}" for replica, each in problems.items())
        if self._config.run.resume not in ("auto", "newest") or any(each["final"] for each in problems.values()):
            raise CheckpointError(f"cannot resume from {step_name(step)}: {text}")
        self._notes.append(f"{step_name(step)} can't be used, trying an older one: {text}")
        self._rejected.add(step)
        return False


def begin(start: Start, gathering: Gathering, folders: Checkpoints) -> list[Course]:
    """Set aside what the run will write anew. Returns once all replicas have: a step must never be a mixture of two
    courses of a run. The courses up to the one that begins here. Raises OSError."""
    if gathering.leads:
        # The lowest replica speaks for those that are not there.
        lowest = folders.replica == min(gathering.members)
        absent = set(range(folders.replicas)) - set(gathering.members) if lowest else ()
        folders.begin(start.step, start.courses, absent)
    told = gathering.ask_leaders("begun", {"step": start.step, "milliseconds": time.time_ns() // 10**6})
    began = [course.began + 1 for course in start.courses] + [record["milliseconds"] for record in told.values()]
    return [*start.courses, Course(start.step, max(began))]


def asked_step(request: str | int) -> int | None:
    """The step that a value of run.resume names, None for one that is a rule."""
    if request in ("no", "auto", "newest"):
        return None
    return int(str(request).removeprefix("step_"))


def taken_over(replica: int, now: int, before: int, shrink: str) -> list[int]:
    """The saved replicas (of `before`) that `replica` (of `now`) takes over; see run.shrink."""
    if now < before and shrink == "merge":
        return list(range(replica, before, now))
    return [replica % before]


def _offer(config: Config, replica: int, seen: Mapping[int, Seen]) -> dict[str, Any]:
    """What a leader announces."""
    usable, problems = [], {}
    for step, found in list(seen.items())[-OFFERED_STEPS:]:
        if found.replicas:
            before = _saved_replicas(found)
            wanted = taken_over(replica, config.topology.replicas, before, config.run.shrink)
            if all(_holder(other, found) in found.replicas for other in wanted):
                usable.append(step)
        if found.problems:
            problems[str(step)] = found.problems[0][:PROBLEM_CHARACTERS]
    newest = dict(list(problems.items())[-5:])
    some = [step for step, found in seen.items() if found.replicas][-OFFERED_STEPS:]
    began = [ways.of(next(iter(seen[step].replicas.values())).manifest)[-1].began for step in some]
    return {"asked": str(config.run.resume), "usable": usable, "seen": some, "courses": began, "problems": newest}


def _of_newest_courses(
    offers: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[int, dict[str, Any]], dict[int, set[int]]]:
    """The offers without the steps that another replica has of a newer course; and these steps of each replica."""
    newest: dict[int, int] = {}
    for offer in offers.values():
        for step, began in zip(offer["seen"], offer["courses"], strict=True):
            newest[step] = max(began, newest.get(step, began))
    left, given_up = {}, {}
    for replica, offer in offers.items():
        began_at = zip(offer["seen"], offer["courses"], strict=True)
        void = given_up[replica] = {step for step, began in began_at if began < newest[step]}
        kept = {key: [step for step in offer[key] if step not in void] for key in ("usable", "seen")}
        problems = {**offer["problems"], **{str(step): GIVEN_UP for step in void}}
        left[replica] = {"asked": offer["asked"], **kept, "problems": problems}
    return left, given_up


def _pick(request: str | int, offers: Mapping[int, Mapping[str, Any]], rejected: set[int], notes: list[str]) -> int:
    """The step that all agree on, NOTHING if there is none to be had. Raises CheckpointError."""
    if request == "no":
        return NOTHING
    usable = {replica: set(offer["usable"]) - rejected for replica, offer in offers.items()}
    seen = {step for offer in offers.values() for step in offer["seen"]} - rejected
    problems = {int(s): text for offer in offers.values() for s, text in offer["problems"].items()}
    step = asked_step(request)
    if step is not None:
        lacking = [replica for replica, steps in usable.items() if step not in steps]
        if lacking:
            why = problems.get(step) or "it is not there whole; have all replicas saved it, and is the folder the same?"
            raise CheckpointError(
                f"cannot resume from {step_name(step)}: replica {', '.join(map(str, lacking))} can't: {why}"
            )
        return step
    common = set.intersection(*usable.values())
    choice = max(seen if request == "newest" else common, default=NOTHING)
    for other in sorted(problems, reverse=True):
        if other > choice and other not in rejected:
            note = f"{step_name(other)} can't be used: {problems[other]}"
            if note not in notes:
                notes.append(note)
    if choice == NOTHING and (seen or problems) and not rejected:
        have = ", ".join(f"replica {replica}: {sorted(steps) or 'none'}" for replica, steps in usable.items())
        raise CheckpointError(
            f"there are checkpoints, but none that all replicas can use ({have}); --resume newest lets a replica take "
            "over another one's state; to start anew, move the folder away" + "".join(f"; {note}" for note in notes)
        )
    return choice


def _sources(
    config: Config, place: Place, seen: Mapping[int, Seen], step: int
) -> tuple[list[SavedReplica], Verdict | None]:
    """The saved replicas that this one takes over from a step, or why it can't."""
    found = seen.get(step, Seen({}, []))
    if not found.replicas:
        text = f"no replica of {step_name(step)} can be read here; copy one into its checkpoints folder"
        return [], {"bad": text, "final": False}
    complaint = _other_run(config, next(iter(found.replicas.values())))
    before, now = _saved_replicas(found), config.topology.replicas
    if complaint is None and now < before and config.run.shrink == "refuse":
        complaint = (
            f"{before} replicas have saved and the run has {now}: say what becomes of the others, "
            "--set run.shrink=drop or run.shrink=merge (their mean)"
        )
    if complaint is not None:
        return [], {"bad": complaint[:PROBLEM_CHARACTERS], "final": True}
    wanted = taken_over(place.replica, now, before, config.run.shrink)
    any_will_do = config.run.resume == "newest"
    wanted = [_nearest(other, found) if any_will_do else _holder(other, found) for other in wanted]
    return [found.replicas[other] for other in wanted], None


def _holder(replica: int, found: Seen) -> int:
    """Whose state stands for that of `replica` at a step: its own, or where it was absent that of the nearest."""
    return replica if replica in present(found) else _nearest(replica, found)


def present(found: Seen) -> tuple[int, ...]:
    """The replicas that took part in a step that was saved, as those knew it that saved it."""
    manifest = next(iter(found.replicas.values())).manifest
    log = manifest.get("present", manifest["view_log"])
    return tuple(views.at([View(start, tuple(who)) for start, who in log], manifest["step"]).members)


def _nearest(replica: int, found: Seen) -> int:
    """The saved replica nearest in number."""
    return min(found.replicas, key=lambda other: (abs(other - replica), other))


def _start(config: Config, step: int, sources: Sequence[SavedReplica], data: str, notes: Sequence[str]) -> Start:
    manifest = sources[0].manifest
    view_log = [View(from_step, tuple(members)) for from_step, members in manifest["view_log"]]
    members = tuple(range(config.topology.replicas))
    if view_log[-1].members != members:
        view_log.append(View(step, members))
    notes = [*notes, *_changes(config, manifest, data)]
    courses = ways.of(manifest)
    return Start(step=step, resumed=True, sources=sources, courses=courses, view_log=view_log, notes=notes)


def _saved_replicas(found: Seen) -> int:
    """N of the run that saved."""
    return next(iter(found.replicas.values())).manifest["config"]["topology"]["replicas"]


def _other_run(config: Config, saved: SavedReplica) -> str | None:
    """Names every field in which the saved run differs so that its state means something else."""
    before, now = with_defaults(saved.manifest["config"]), config.to_json()
    fields = {f"model.{key}": (before["model"].get(key), value) for key, value in now["model"].items()}
    fields["run.seed"] = (before["run"]["seed"], now["run"]["seed"])
    for key in ("optimizer", "inner_steps"):
        fields[f"noloco.{key}"] = (before["noloco"].get(key), now["noloco"][key])
    # The position in the data is counted in these.
    fields["samples per inner step and replica"] = (saved.manifest["replica_batch_size"], config.replica_batch_size)
    different = [f"{name} ({old} there, {new} here)" for name, (old, new) in fields.items() if old != new]
    return f"it does not fit this configuration: {', '.join(different)}" if different else None


def _changes(config: Config, manifest: Mapping[str, Any], data: str) -> list[str]:
    """In which fields the run goes on differently, in one sentence."""
    ignored = {"run.resume", "run.shrink", "run.directory"}
    before, now = _flattened(with_defaults(manifest["config"])), _flattened(config.to_json())
    changed = [
        f"{key} {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in ignored
    ]
    if manifest["data"] != data:
        changed.append("the token files hold other data")
    return [f"goes on with changes: {', '.join(changed)}"] if changed else []


def _flattened(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
