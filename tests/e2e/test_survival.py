"""Replicas die, hang and lag in whole runs, and the others go on: what the rows say of it."""

import os
import signal
from itertools import pairwise

import numpy as np
import pytest
import torch

from noloco_mega import config as configs
from noloco_mega.comm.rendezvous import RendezvousClient
from noloco_mega.entry import TRY_AGAIN
from noloco_mega.grid import Place
from tests.e2e.runs import SECRET, launched, rows_of, run, wait_for_step, weights

QUICK = {
    "noloco__heartbeat_seconds": 0.5,
    "noloco__exchange_deadline_seconds": 20.0,
    "noloco__link_timeout_seconds": 60.0,
}


def mine(rows, replica):
    return [row for row in rows if row["replica"] == replica and row["loss"] is not None]


def wait_for_founders(rendezvous, raw):
    """Until some replica has said which ones begin the run."""
    asking = RendezvousClient(rendezvous.address, SECRET.encode(), 60.0, run=configs.parse(raw).run.name)
    return asking.wait_for("founders", [(0, 0)])[(0, 0)]["members"]


def nobody_went_back(rows, replicas, last):
    """A machine that others keep busy may make a replica late enough to leave out a step."""
    for replica in replicas:
        steps = [row["step"] for row in mine(rows, replica)]
        assert steps == sorted(set(steps)) and steps[-1] == last


def everybody_took_every_step_once(rows, replicas, last):
    for replica in replicas:
        assert [row["step"] for row in mine(rows, replica)] == list(range(1, last + 1))


def test_a_killed_replica_costs_one_step_and_random_routes_return(tiny, tmp_path):
    raw = tiny(run__steps=80, **QUICK)
    with launched(raw, tmp_path) as ranks:
        wait_for_step(raw, 6, ranks)
        ranks.processes[3].kill()  # one rank of replica 1; its sibling gives up by itself
        ranks.wait(200, expect_missing=frozenset({2, 3}))
        assert not ranks.processes[2].is_alive(), "the sibling of a dead rank ends"
    rows = rows_of(raw)
    nobody_went_back(rows, (0, 2, 3), 80)
    for replica in (0, 2, 3):
        own = mine(rows, replica)
        routed = [tuple(row["routed"] or ()) for row in own]
        assert routed[0] == (0, 1, 2, 3) and routed[-1] == (0, 2, 3), routed
        changes = [now for before, now in pairwise(routed) if before != now]
        assert changes == [(), (0, 2, 3)], "from all, over the own pipeline, to the survivors"
        assert sum(row["redone_steps"] or 0 for row in own) == 1
        outer = [row for row in own if row["outer_step"] is not None]
        assert outer[-1]["present"] == [0, 2, 3]
        assert all(row["missed"] == 0 for row in outer if row["present"] == [0, 2, 3])


@pytest.mark.parametrize("optimizer", ["noloco", pytest.param("gossip", marks=pytest.mark.slow)])
def test_a_restarted_replica_joins_from_a_live_one(tiny, tmp_path, optimizer):
    """Though its own folder holds what it wrote before, or the run began with given weights; it is paired and routed
    again, on the run's step."""
    raw = tiny(run__steps=150, noloco__optimizer=optimizer, **QUICK)
    if optimizer == "gossip":
        given = tiny(topology={"replicas": 1, "stages": 1}, run__steps=1, run__name="given")
        run(given, tmp_path)
        raw["run"]["init_from"] = str(configs.parse(given).output / "replica_00" / "weights")
    with launched(raw, tmp_path, step_seconds=[0.05] * 4) as ranks:
        wait_for_step(raw, 12, ranks)
        for process in ranks.processes[2:4]:
            process.kill()
        wait_for_step(raw, 22, ranks)
        again = ranks.restart(1)
        ranks.wait(200, expect_missing=frozenset({2, 3}))
        again.wait(60)
    rows = rows_of(raw)
    nobody_went_back(rows, (0, 2, 3), 150)
    own = mine(rows, 1)
    joined = next(row["step"] for before, row in pairwise(own) if row["step"] > before["step"] + 5)
    assert joined > 22 and own[-1]["step"] == 150
    outer = [row for row in own if row["outer_step"] is not None and row["step"] >= joined]
    met = [row["partner"] is not None and row["missed"] == 0 for row in outer]
    assert any(met[:3]), "it exchanges within three outer steps"
    assert all(met[3:]), met
    assert own[-1]["routed"] == [0, 1, 2, 3] and own[-1]["present"] == [0, 1, 2, 3]
    assert {w.manifest["step"] for w in weights(raw)} == {150} and len(weights(raw)) == 4


def exchanged(row):
    return row["partner"] is not None and row["missed"] == 0


@pytest.mark.parametrize(
    "replicas, outer_steps, seconds, deadline",
    [(2, 5, 0.2, 6.0), pytest.param(8, 15, 0.3, 18.0, marks=pytest.mark.slow)],
)
def test_a_replica_four_times_slower_keeps_meeting_the_others(tiny, tmp_path, replicas, outer_steps, seconds, deadline):
    """Its phases end early: fewer of its own inner steps, the run's learning rate and data, and few misses."""
    steps = 10 * outer_steps
    raw = tiny(
        topology={"replicas": replicas, "stages": 1},
        run__steps=steps,
        noloco__inner_steps=10,
        noloco__heartbeat_seconds=1.0,
        noloco__exchange_deadline_seconds=deadline,
        noloco__link_timeout_seconds=5 * deadline,
    )
    with launched(raw, tmp_path, step_seconds=[4 * seconds] + [seconds] * (replicas - 1)) as ranks:
        ranks.wait(600)
    rows = rows_of(raw)
    outer = [row for row in mine(rows, 0) if row["outer_step"] is not None]
    assert sum(map(exchanged, outer)) >= 0.9 * outer_steps - 1, [
        (row["outer_step"], row["missed_reason"]) for row in outer
    ]
    assert sum(row["skipped_steps"] or 0 for row in mine(rows, 0)) > outer_steps, "it did leave out inner steps"
    assert outer[-1]["tokens"] < outer[-1]["step"] * 2 * 2 * 32
    for replica in range(1, replicas):
        everybody_took_every_step_once(rows, [replica], steps)
        own = [row for row in mine(rows, replica) if row["outer_step"] is not None]
        assert sum(map(exchanged, own)) >= 0.9 * outer_steps - 1
    spread = {
        r: np.mean([row["spread"] for row in mine(rows, r) if row["spread"] is not None]) for r in range(replicas)
    }
    others = np.mean([spread[r] for r in range(1, replicas)])
    assert spread[0] <= 2 * others, spread


def test_a_suspended_replica_is_back_within_two_outer_steps(tiny, tmp_path):
    """Long enough to be taken for dead, on random routes: they end, it returns, and so do they."""
    raw = tiny(run__steps=160, **QUICK)
    with launched(raw, tmp_path, step_seconds=[0.1] * 4) as ranks:
        wait_for_step(raw, 12, ranks)
        stopped = ranks.processes[2:4]  # replica 1
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        at = max(row["step"] for row in rows_of(raw))
        wait_for_step(raw, at + 20, ranks, replica=0)
        back = max(row["step"] for row in rows_of(raw))
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
        ranks.wait(200)
    rows = rows_of(raw)
    nobody_went_back(rows, (0, 2, 3), 160)
    assert any(row["present"] == [0, 2, 3] for row in mine(rows, 0) if row["present"])
    outer = [row for row in mine(rows, 1) if row["outer_step"] is not None and row["step"] > back]
    assert any(map(exchanged, outer[:3])), [(row["step"], row["partner"], row["missed_reason"]) for row in outer]
    assert mine(rows, 1)[-1]["routed"] == [0, 1, 2, 3]


def test_phases_by_the_clock_let_everybody_go_on(tiny, tmp_path):
    raw = tiny(
        topology={"replicas": 2, "stages": 1},
        run__steps=100,
        noloco__inner_steps=20,
        noloco__inner_phase="seconds",
        noloco__inner_phase_seconds=1.0,
    )
    with launched(raw, tmp_path, step_seconds=[0.1, 0.4]) as ranks:
        ranks.wait(120)
    for replica, fewest, most in ((0, 1, 15), (1, 15, 19)):
        own = mine(rows_of(raw), replica)
        outer = [row for row in own if row["outer_step"] is not None]
        assert [row["step"] for row in outer] == [20, 40, 60, 80, 100] and all(map(exchanged, outer))
        assert all(fewest <= row["skipped_steps"] <= most for row in outer), [row["skipped_steps"] for row in outer]


def test_a_replica_whose_weights_are_not_finite_is_healed_by_another(tiny, tmp_path):
    """Steps that its microbatches spoil change no weight anywhere; it is found by the routes, and leaves them."""
    raw = tiny(run__steps=120, **QUICK)
    with launched(raw, tmp_path, poison=(Place(1, 0, 0, 0), 22)) as ranks:
        ranks.wait(240)
    rows = rows_of(raw)
    for replica in range(4):
        own = mine(rows, replica)
        bad = sum(row["bad_steps"] or 0 for row in own)
        assert (replica == 1) <= bad <= 12, f"replica {replica} lost {bad} steps"
        assert all(row["bad_steps"] is None for row in own[-20:])
        assert own[-1]["routed"] == [0, 1, 2, 3] and own[-1]["present"] == [0, 1, 2, 3]
        assert np.isfinite(own[-1]["loss"]) and own[-1]["val_loss"] < 5.5
    assert all(torch.isfinite(w.tensor(name)).all() for w in weights(raw) for name in w.names)


@pytest.mark.slow
def test_a_slow_site_ends_its_phases_early_together(tiny, tmp_path):
    """Two sites of different speed: on random routes the slow one's replicas leave out the very same steps."""
    raw = tiny(
        run__steps=60,
        topology__sites=[[0, 1], [2, 3]],
        noloco__inner_steps=10,
        noloco__heartbeat_seconds=1.5,
        noloco__exchange_deadline_seconds=12.0,
        noloco__link_timeout_seconds=60.0,
    )
    with launched(raw, tmp_path, step_seconds=[1.2, 1.2, 0.1, 0.1]) as ranks:
        ranks.wait(400)
    rows = rows_of(raw)
    slow = [[row["step"] for row in mine(rows, replica)] for replica in (0, 1)]
    assert slow[0] == slow[1] and 12 <= len(slow[0]) < 60
    assert all(row["routed"] == [0, 1] for row in mine(rows, 0)), "without losing their circuit"
    outer = [row for replica in range(4) for row in mine(rows, replica) if row["outer_step"] is not None]
    assert sum(map(exchanged, outer)) >= 0.8 * len(outer), [
        (r["replica"], r["step"], r["missed_reason"]) for r in outer
    ]


def test_a_run_begins_with_the_replicas_that_are_there(tiny, tmp_path):
    """Two of four; a third one comes while they still start, and a fourth one later. Both join, and are routed."""
    raw = tiny(run__steps=150, **QUICK)
    raw["topology"]["start_replicas"] = 2
    with launched(raw, tmp_path, only=(1, 2)) as ranks:
        assert wait_for_founders(ranks.rendezvous, raw) == [1, 2]
        third = ranks.restart(3)
        wait_for_step(raw, 12, ranks)
        first = ranks.restart(0)
        ranks.wait(240)
        for late in (third, first):
            late.wait(60)
    rows = rows_of(raw)
    nobody_went_back(rows, (1, 2), 150)
    assert [row["step"] for row in mine(rows, 1)][:3] == [1, 2, 3] and mine(rows, 1)[0]["routed"] == [1, 2]
    for replica in (0, 3):
        own = mine(rows, replica)
        assert own[0]["step"] > 1 and own[-1]["step"] == 150, "it begins with the state of a live one"
        outer = [row for row in own if row["outer_step"] is not None]
        assert any(map(exchanged, outer[:3])) and exchanged(outer[-1])
        assert own[-1]["routed"] == [0, 1, 2, 3] and own[-1]["present"] == [0, 1, 2, 3]
    assert {w.manifest["step"] for w in weights(raw)} == {150} and len(weights(raw)) == 4


@pytest.mark.slow
def test_a_replica_that_is_asked_to_leave_does_so_alone_and_comes_back(tiny, tmp_path):
    """SIGUSR1 to one of its ranks: it saves and ends, the others go on at once, and its next start joins them."""
    raw = tiny(run__steps=150, run__save_every=1000, run__resume="newest", **QUICK)
    with launched(raw, tmp_path, step_seconds=[0.15] * 4) as ranks:
        wait_for_step(raw, 12, ranks)
        os.kill(ranks.processes[3].pid, signal.SIGUSR1)  # not the leader of replica 1
        for process in ranks.processes[2:4]:
            process.join(60)
        left = max(row["step"] for row in mine(rows_of(raw), 1))
        wait_for_step(raw, left + 8, ranks, replica=0)
        again = ranks.restart(1)
        statuses = ranks.wait(240)
        assert again.wait(60) == {0: 0, 1: 0}
    assert statuses == {rank: TRY_AGAIN if rank in (2, 3) else 0 for rank in range(8)}
    rows = rows_of(raw)
    nobody_went_back(rows, (0, 2, 3), 150)
    saved = configs.parse(raw).output / "checkpoints" / f"step_{left:08d}"
    assert [path.name for path in saved.iterdir()] == ["replica_01"]
    for replica in (0, 2, 3):
        own = mine(rows, replica)
        assert sum(row["redone_steps"] or 0 for row in own) <= 2, "one for each change of circuits at most"
        assert any(row["routed"] == [0, 2, 3] for row in own) and own[-1]["routed"] == [0, 1, 2, 3]
