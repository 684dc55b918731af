"""Saving by the ranks of several replicas, which are threads here: failures, the order of things, what leaders learn."""

import threading
import time
from types import SimpleNamespace

import pytest

from noloco_mega import device
from noloco_mega.checkpoint import format, saver
from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.control import Leaders
from noloco_mega.config import parse
from noloco_mega.plan import views
from tests.checkpoints import content
from tests.unit.test_config import changed

SECRET = b"a secret for this test only"


class Agreement:
    """Peers.agree over the threads of one replica."""

    def __init__(self, ranks, view_log):
        self.view_log = self.present = view_log
        self._barrier, self._flags = threading.Barrier(ranks, timeout=20), []

    def agree(self, flag):
        self._flags.append(flag)
        self._barrier.wait()
        answer = min(self._flags)
        if self._barrier.wait() == 0:
            self._flags.clear()
        self._barrier.wait()
        return (int(answer),)


class Fleet:
    """The savers of all ranks: fleet[replica][rank]."""

    def __init__(self, root, replicas, ranks=1, **run):
        run = {"run__save_every": 10, "run__directory": str(root), "noloco__exchange_deadline_seconds": 10.0, **run}
        self.config = parse(changed(topology={"replicas": replicas, "tensor": ranks}, **run))
        self.root = self.config.output / "checkpoints"
        grid, self.listeners, self.warnings = self.config.topology.grid(), [], []
        self.lines = [self._line(replica) for replica in range(replicas)]
        for line in self.lines:
            line.connect({replica: listener.address for replica, listener in enumerate(self.listeners)})
        self.savers = []
        self.peers = [Agreement(ranks, views.initial(replicas)) for _ in range(replicas)]
        for replica, peers in enumerate(self.peers):
            self.savers.append([])
            for rank in range(ranks):
                world = SimpleNamespace(grid=grid, place=grid.place(replica * ranks + rank), device=device.select(0))
                line = self.lines[replica] if rank == 0 else Leaders(replica, Listener(SECRET), SECRET, "run")
                folders = Checkpoints(self.root, replica, replicas)
                facts = {"replica": replica, "config": self.config.to_json(), "losses": {}}
                warn = self.warnings.append
                self.savers[-1].append(saver.Saver(self.config, folders, world, peers, line, 0, 0, facts, warn))

    def _line(self, replica):
        self.listeners.append(Listener(SECRET))
        return Leaders(replica, self.listeners[-1], SECRET, "run")

    def all(self, act):
        """act(saver, replica, rank) on all ranks at once."""
        threads = [
            threading.Thread(target=act, args=(each, replica, rank))
            for replica, ranks in enumerate(self.savers)
            for rank, each in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "hang"

    def save(self, step, replicas=None):
        def act(each, replica, rank):
            if replicas is None or replica in replicas:
                each.save(step, content(step + replica, rank, len(self.savers[0])), {})

        self.all(act)

    def settle(self):
        self.all(lambda each, replica, rank: each.settle())

    def steps(self, replica=0):
        return Checkpoints(self.root, replica, len(self.savers)).steps()

    def latest(self):
        return Checkpoints(self.root, 0, 1).latest()

    def wait_for_latest(self, step):
        deadline = time.monotonic() + 20
        while self.latest() != step:
            assert time.monotonic() < deadline, f"latest is {self.latest()}"
            time.sleep(0.01)


def value(fleet, step, replica=0):
    saved = SavedReplica(Checkpoints(fleet.root, replica, 1).folder(step))
    tensor = saved.tensor("weight")
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_the_state_at_the_call(tmp_path, asynchronous):
    fleet = Fleet(tmp_path, 1, run__save_async=asynchronous)
    (each,) = fleet.savers[0]
    live = content(5.0)
    each.save(10, live, {})
    live.tensors[0].tensor.fill_(6.0)  # training goes on
    each.save(20, live, {})
    live.tensors[0].tensor.fill_(7.0)
    each.close()
    assert (value(fleet, 10), value(fleet, 20)) == (5.0, 6.0) and fleet.latest() == 20
    assert each.save(20, live, {}) == 0.0 and value(fleet, 20) == 6.0, "a step is saved once"


def test_latest_is_what_all_replicas_have_and_pruning_respects_it(tmp_path):
    fleet = Fleet(tmp_path, 2, run__keep_checkpoints=1)
    fleet.save(10)
    fleet.settle()
    fleet.wait_for_latest(10)
    for step in (20, 30, 40):
        fleet.save(step, replicas=[0])
        fleet.savers[0][0].settle()
    assert fleet.latest() == 10 and fleet.steps(0) == [10, 20, 30, 40] and fleet.steps(1) == [10]
    fleet.save(40, replicas=[1])
    fleet.settle()
    fleet.wait_for_latest(40)
    soon(lambda: fleet.steps(0) == [40] and fleet.steps(1) == [40])
    fleet.all(lambda each, replica, rank: each.close())
    assert not fleet.warnings


def test_latest_moves_on_without_a_replica_that_is_absent(tmp_path):
    fleet = Fleet(tmp_path, 3, run__keep_checkpoints=1)
    fleet.save(10)
    fleet.settle()
    fleet.wait_for_latest(10)
    for replica in (0, 1):
        fleet.peers[replica].present.append(views.View(15, (0, 1)))
    fleet.save(20, replicas=[0, 1])
    fleet.settle()
    fleet.wait_for_latest(20)
    soon(lambda: fleet.steps(0) == fleet.steps(1) == [20])
    assert not fleet.warnings


def soon(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_late_news_costs_no_step_that_others_take_for_complete(tmp_path, monkeypatch):
    """Replica 1 has heard that step 20 is complete, and so has given up 10; replica 0 hears of it after a third save."""
    late, hear = [], saver.Completion._on_message

    def later(self, sender, message):
        if sender == 1:
            late.append(lambda: hear(self, sender, message))
        else:
            hear(self, sender, message)

    monkeypatch.setattr(saver.Completion, "_on_message", later)
    fleet = Fleet(tmp_path, 2, run__keep_checkpoints=1)
    for step in (10, 20):
        fleet.save(step)
    fleet.settle()
    soon(lambda: fleet.steps(1) == [20])
    fleet.save(30, replicas=[0])
    fleet.savers[0][0].settle()
    assert fleet.steps(0) == [10, 20, 30], "whoever resumes now finds step 20 on both"
    soon(lambda: len(late) == 2)
    for message in late:
        message()
    assert fleet.steps(0) == [20, 30]


def test_what_another_replica_has_failed_to_save_is_not_kept_for_it(tmp_path, monkeypatch):
    fleet = Fleet(tmp_path, 2, run__keep_checkpoints=1)
    real = format._write_whole

    def write(file, data):
        if "replica_01" in file.name and "step_00000010" not in file.name:
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(format, "_write_whole", write)
    for step in (10, 20, 30, 40):
        fleet.save(step)
    fleet.settle()
    soon(lambda: fleet.steps(0) == [10, 40])
    assert fleet.steps(1) == [10] and len(fleet.warnings) == 3


def test_a_replica_that_does_not_save_is_waited_for_only_a_while(tmp_path):
    fleet = Fleet(tmp_path, 2, noloco__exchange_deadline_seconds=0.3, noloco__heartbeat_seconds=0.1)
    fleet.save(10, replicas=[1])
    fleet.savers[1][0].close()
    assert fleet.steps(1) == [10] and fleet.latest() is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_costs_one_checkpoint(tmp_path, monkeypatch, rank, asynchronous):
    """One of two ranks can't write: both go on, the draft is gone, the older checkpoint whole, the next one too."""
    fleet = Fleet(tmp_path, 1, ranks=2, run__save_async=asynchronous)
    fleet.save(10)
    fleet.settle()
    real, full = format._write_whole, [True]

    def write(file, data):
        if full[0] and file.name.endswith(f"step_00000020/.replica_00.draft/rank_{rank:03d}.safetensors"):
            real(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(format, "_write_whole", write)
    fleet.save(20)
    fleet.settle()
    assert len(fleet.warnings) == 1 and "step 20 could not be written" in fleet.warnings[0]
    assert "No space left" in fleet.warnings[0]
    assert fleet.steps() == [10] and not (fleet.root / "step_00000020" / ".replica_00.draft").exists()
    assert value(fleet, 10) == 10.0 and fleet.latest() == 10
    full[0] = False
    fleet.save(30)
    fleet.all(lambda each, replica, rank: each.close())
    assert fleet.steps() == [10, 30] and fleet.latest() == 30 and len(fleet.warnings) == 1


def test_a_commit_that_fails_costs_one_checkpoint(tmp_path, monkeypatch):
    fleet = Fleet(tmp_path, 1, ranks=2)
    fleet.save(10)
    fleet.settle()
    monkeypatch.setattr(saver, "commit", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    fleet.save(20)
    fleet.settle()
    monkeypatch.undo()
    assert len(fleet.warnings) == 1 and fleet.steps() == [10]
    assert not (fleet.root / "step_00000020" / ".replica_00.draft").exists()
    fleet.save(30)
    fleet.settle()
    assert fleet.steps() == [10, 30]


def test_a_folder_that_was_moved_away_is_made_anew(tmp_path):
    fleet = Fleet(tmp_path, 2)
    for step in (10, 20):
        fleet.save(step)
        fleet.settle()
        fleet.wait_for_latest(step)
        fleet.root.rename(tmp_path / f"moved away {step}")
    fleet.save(30)
    fleet.settle()
    fleet.wait_for_latest(30)
    fleet.all(lambda each, replica, rank: each.close())
    assert fleet.steps(0) == fleet.steps(1) == [30]


def test_training_waits_for_a_save_that_is_not_done(tmp_path, monkeypatch):
    """The staging memory of a save is not overwritten by the next one, and the wait is told."""
    fleet = Fleet(tmp_path, 1)
    (each,) = fleet.savers[0]
    real, order = saver.write_rank, []

    def slowly(*arguments):
        time.sleep(0.3)
        real(*arguments)
        order.append("written")

    monkeypatch.setattr(saver, "write_rank", slowly)
    each.save(10, content(10.0), {})
    order.append("saved")
    stall_seconds = each.save(20, content(20.0), {})
    order.append("saved")
    each.close()
    assert order == ["saved", "written", "saved", "written"] and stall_seconds > 0
    assert (value(fleet, 10), value(fleet, 20)) == (10.0, 20.0)
