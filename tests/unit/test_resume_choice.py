"""Which checkpoint is chosen, by all replicas alike; replicas are threads that talk over a table in memory."""

import dataclasses
import shutil
import threading

import pytest

from noloco_mega.checkpoint import resume
from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.reader import verify_share
from noloco_mega.config import parse
from tests.checkpoints import save
from tests.unit.test_config import changed


class Table:
    """The announcements of a run's ranks, as the rendezvous keeps them."""

    def __init__(self):
        self.records, self.changed = {}, threading.Condition()

    def ask(self, announced, wanted):
        with self.changed:
            self.records.update(announced)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: all(key in self.records for key in wanted), 20), "nobody came"
            return {key: self.records[key] for key in wanted}


class Desk:
    """A rank's Gathering."""

    def __init__(self, table, grid, place, members):
        self._table, self._grid, self._place, self.members = table, grid, place, members
        self._rank = grid.replica_rank(place)
        self.leads = self._rank == 0

    def ask_leaders(self, topic, record):
        own = {(topic, "leader", self._place.replica): record} if self.leads else {}
        wanted = [(topic, "leader", replica) for replica in self.members]
        return {key[2]: record for key, record in self._table.ask(own, wanted).items()}

    def ask_siblings(self, topic, record):
        mine = self._place.replica
        wanted = [(topic, mine, rank) for rank in range(self._grid.replica_size)]
        return list(self._table.ask({(topic, mine, self._rank): record}, wanted).values())


def config(replicas=2, tensor=1, resume="auto", **changes):
    return parse(changed(topology={"replicas": replicas, "tensor": tensor}, run__resume=resume, **changes))


def choose(root, *configs, begin=False, members=None):
    """What every rank gets, in rank order: a Start or the text of its error. One config for all or one per replica,
    one folder for all or one per replica. `members`: the replicas that are there, if not all.

    Where they `begin`, a Start's courses are those up to the one that begins.
    """
    grid, table = configs[0].topology.grid(), Table()
    members = tuple(range(grid.replicas)) if members is None else members
    numbers = [number for number in range(grid.size) if grid.place(number).replica in members]
    answers = {}

    def rank(number):
        place = grid.place(number)
        own = configs[place.replica % len(configs)]
        folder = root[place.replica] if isinstance(root, list) else root
        folders = Checkpoints(folder, place.replica, grid.replicas)
        desk = Desk(table, grid, place, members)
        try:
            choice = resume.Choice(own, place, desk, folders, "data")
            choice.take(lambda sources: verify_share(sources, grid.replica_rank(place), grid.replica_size))
            answers[number] = choice.start
            if begin:
                courses = resume.begin(answers[number], desk, folders)
                answers[number] = dataclasses.replace(answers[number], courses=courses)
        except CheckpointError as error:
            answers[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in numbers]


def taken(starts):
    """(step, replicas taken over) of every rank."""
    return [(start.step, [saved.manifest["replica"] for saved in start.sources]) for start in starts]


@pytest.fixture
def root(tmp_path):
    """Steps 10 and 20 of two replicas of two ranks each, and step 30 of replica 0 alone."""
    for step, replicas in {10: (0, 1), 20: (0, 1), 30: (0,)}.items():
        for replica in replicas:
            save(tmp_path, config(tensor=2), step, replica)
    return tmp_path


def test_auto_takes_the_newest_that_all_have(root):
    assert taken(choose(root, config())) == [(20, [0]), (20, [1])]
    assert taken(choose(root, config(tensor=2))) == [(20, [0]), (20, [0]), (20, [1]), (20, [1])]


def test_newest_lets_a_replica_take_over_another_ones(root):
    assert taken(choose(root, config(resume="newest"))) == [(30, [0]), (30, [0])]


def test_a_replica_that_was_absent_takes_over_its_neighbours(root):
    """Step 30 is whole without replica 1, which had died before; not so where it was there and its save is lost."""
    shutil.rmtree(root / "step_00000030")
    save(root, config(), 30, 0, present=[[0, [0, 1]], [25, [0]]])
    assert taken(choose(root, config())) == [(30, [0]), (30, [0])]
    shutil.rmtree(root / "step_00000030")
    save(root, config(), 30, 0, present=[[0, [0, 1]]])
    assert taken(choose(root, config())) == [(20, [0]), (20, [1])]


@pytest.mark.parametrize("request_", [10, "10", "step_00000010"])
def test_a_step_by_name(root, request_):
    (start, _) = choose(root, config(resume=request_), begin=True)
    assert start.step == 10 and start.resumed and [tuple(view) for view in start.view_log] == [(0, (0, 1))]
    assert Checkpoints(root, 0, 2).steps() == [10] and Checkpoints(root, 1, 2).steps() == [10]


def test_a_step_that_is_not_there_for_all(root):
    assert all("cannot resume from step_00000030: replica 1 can't" in text for text in choose(root, config(resume=30)))


def flip(root, step, replica, rank):
    path = root / f"step_{step:08d}" / f"replica_{replica:02d}" / f"rank_{rank:03d}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "manifest"])
def test_damage_is_named_and_auto_takes_an_older_one(root, damage):
    folder = root / "step_00000020" / "replica_01"
    path = folder / ("manifest.json" if damage == "manifest" else "rank_001.safetensors")
    if damage == "flip":
        flip(root, 20, 1, 1)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "swap":
        shutil.copy(root / "step_00000010" / "replica_01" / "rank_001.safetensors", path)
    else:
        path.write_text(path.read_text().replace('"step": 20', '"step": 21'))
    starts = choose(root, config())
    assert taken(starts) == [(10, [0]), (10, [1])]
    assert all("step_00000020 can't be used" in " ".join(s.notes) and str(path) in " ".join(s.notes) for s in starts)
    assert all("step_00000020" in text and str(path) in text for text in choose(root, config(resume=20)))


def test_nothing_good_left_is_no_new_run(root):
    flip(root, 10, 0, 0)
    flip(root, 20, 0, 0)
    assert all("none of the checkpoints" in text and "rank_000" in text for text in choose(root, config()))


def test_auto_starts_anew_only_where_nobody_has_anything(tmp_path, root):
    empty = tmp_path / "empty"
    (start, _) = choose(empty, config())
    assert not start.resumed and start.step == 0
    answers = choose([root, empty], config())
    assert all("none that all replicas can use" in text and "replica 1: none" in text for text in answers)
    answers = choose([root, empty], config(resume="newest"))
    assert all("no replica of step_00000030 can be read here" in text for text in answers)


def test_other_numbers_of_replicas(root):
    starts = choose(root, config(replicas=5))
    assert taken(starts) == [(20, [0]), (20, [1]), (20, [0]), (20, [1]), (20, [0])]
    assert [tuple(view) for view in starts[0].view_log] == [(0, (0, 1)), (20, (0, 1, 2, 3, 4))]
    refused = choose(root, config(replicas=1))
    assert "2 replicas have saved and the run has 1" in refused[0] and "run.shrink=drop" in refused[0]
    # Who is dropped need not have the step.
    assert taken(choose(root, config(replicas=1, run__shrink="drop"))) == [(30, [0])]
    assert taken(choose(root, config(replicas=1, run__shrink="merge"))) == [(20, [0, 1])]
    assert [resume.taken_over(i, 3, 8, "merge") for i in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_another_model_is_refused_naming_the_fields_and_nothing_is_touched(root):
    before = sorted(root.rglob("*"))
    other = config(model__vocab_size=512, model__hidden_size=128)
    for text in choose(root, other, begin=True):
        assert text.startswith("cannot resume from step_00000020"), "an older one is not tried"
        assert "model.vocab_size (" in text and "model.hidden_size (" in text and "num_layers" not in text
    assert sorted(root.rglob("*")) == before
    for change, name in {"run__seed": "run.seed", "train_micro_batch_size_per_gpu": "samples per inner step"}.items():
        assert all(name in text for text in choose(root, config(**{change: 9})))


def test_a_config_of_an_older_version_fits(tmp_path):
    """What was saved before a key existed was run with the key's default."""
    now = config(tensor=2)
    raw = now.to_json()
    older = {**raw, "model": dict(raw["model"]), "noloco": dict(raw["noloco"]), "run": dict(raw["run"])}
    del older["model"]["qk_norm"], older["noloco"]["optimizer"], older["noloco"]["outer_lr"], older["run"]["shrink"]
    for replica in (0, 1):
        save(tmp_path, now, 10, replica, config=older)
    starts = choose(tmp_path, now)
    assert taken(starts)[0] == (10, [0]) and not starts[0].notes
    (text, *_) = choose(tmp_path, config(tensor=2, model__qk_norm=True))
    assert "model.qk_norm (False there, True here)" in text
    (start, *_) = choose(tmp_path, config(tensor=2, noloco__outer_lr=0.6))
    assert "noloco.outer_lr 0.7 -> 0.6" in start.notes[0]


def test_other_differences_are_said(root):
    (start, _) = choose(root, config(run__steps=777, optimizer__params__lr=5e-4))
    (note,) = [note for note in start.notes if "goes on with changes" in note]
    assert "run.steps 10 -> 777" in note and "optimizer.params.lr" in note and "resume" not in note


def test_replicas_must_ask_for_the_same(root):
    answers = choose(root, config(), config(resume="newest"))
    assert all("start all of them alike" in text for text in answers)


@pytest.fixture(params=["one folder", "a folder each"])
def roots(request, tmp_path):
    """The folders of two replicas that have saved 10, 20 and 30 together."""
    found = [tmp_path, tmp_path] if request.param == "one folder" else [tmp_path / "0", tmp_path / "1"]
    for step in (10, 20, 30):
        for replica in (0, 1):
            save(found[replica], config(), step, replica)
    return found


def go_on_alone(roots, request, steps):
    """Replica 1 goes on without replica 0, and saves these steps; its courses."""
    (start,) = choose(roots, config(resume=request), begin=True, members=(1,))
    assert start.step == request
    for step in steps:
        courses = [list(course) for course in start.courses]
        save(roots[1], config(), step, 1, 5.0, present=[[0, [1]]], courses=courses)
    return start.courses


def test_what_an_absent_replica_saved_in_a_course_that_was_given_up_is_taken_over_by_nobody(roots):
    """The others went on from step 20, and saved another step 30 than the one that replica 0 still has."""
    shared = roots[0] == roots[1]
    go_on_alone(roots, 20, (30, 40))
    assert list(Checkpoints(roots[1], 1, 2).look(30).replicas) == [1]
    # With folders of their own nothing of replica 1's is there for it to take over.
    assert taken(choose(roots, config())) == ([(40, [1]), (40, [1])] if shared else [(20, [0]), (20, [1])])
    if not shared:
        answers = choose(roots, config(resume=30))
        assert all("replica 0 can't: what it has saved there is of an earlier course" in text for text in answers)


def test_a_replica_that_joins_sets_its_steps_of_other_courses_aside(roots):
    courses = go_on_alone(roots, 20, (30, 40))
    mine = Checkpoints(roots[0], 0, 2)
    save(roots[0], config(), 40, 0, courses=[list(course) for course in courses])  # it was back for a while
    mine.advance_latest(40)
    mine.begin(45, courses)
    assert mine.steps() == [10, 20, 40] and mine.latest() == 40
    # The others have gone on once more, from step 20.
    later = go_on_alone(roots, 20, ())
    mine.begin(25, later)
    assert mine.steps() == [10, 20] and mine.latest() == 20
    assert [course.from_step for course in later] == [0, 20] and later[-1].began > courses[-1].began


def test_a_mixture_of_courses_that_lies_in_a_folder_already(root):
    save(root, config(), 40, 0)
    save(root, config(), 40, 1, courses=[[0, 0], [30, 5]])
    found = Checkpoints(root, 0, 2).look(40)
    assert list(found.replicas) == [1] and "replica_00 is of an earlier course" in found.problems[0]
    assert taken(choose(root, config())) == [(20, [0]), (20, [1])]
