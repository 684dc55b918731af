"""Whole runs on real text: what they write, what they learn, and that nothing waits for everybody."""

import json
import math
import os
import signal
import time

import numpy as np
import pytest

from noloco_mega import config as configs
from noloco_mega.checkpoint.reader import mean_tensor
from noloco_mega.comm.rendezvous import RendezvousServer
from noloco_mega.grid import Place
from noloco_mega.merging import deviation
from tests.e2e.runs import SECRET, launched, rows_of, run, train_rank, values, wait_for_step, weights
from tests.harness import Ranks


def test_noloco_against_local_on_the_same_tokens(tiny, tmp_path):
    """Rows, bytes and weights of a run; and a final deviation of at most half of what replicas get alone."""
    noloco = tiny(run__name="noloco", run__steps=40, run__eval_every=20, noloco__inner_steps=4)
    local = tiny(run__name="local", run__steps=40, noloco__inner_steps=4, noloco__optimizer="local")
    rows = run(noloco, tmp_path)
    run(local, tmp_path)

    for replica in range(4):
        mine = [row for row in rows if row["replica"] == replica]
        steps = [row["step"] for row in mine if row["loss"] is not None]
        assert steps == list(range(1, 41))
        assert [row["step"] for row in mine if row["val_loss"] is not None] == [0, 20, 40]
        outer = [row for row in mine if row["outer_step"] is not None]
        assert [row["outer_step"] for row in outer] == list(range(1, 11))
        assert all(row["partner"] != replica and row["missed"] == 0 for row in outer)
        for row in mine:
            if row["loss"] is not None:
                assert row["tokens"] == row["step"] * 2 * 2 * 32 and row["tokens_per_second"] > 0
                assert math.isfinite(row["grad_norm"]) and row["lr"] == 3e-3
    by_step = {}
    for row in rows:
        if row["partner"] is not None:
            by_step.setdefault(row["outer_step"], {})[row["replica"]] = row["partner"]
    assert all(pairs[pairs[replica]] == replica for pairs in by_step.values() for replica in range(4))

    finals = weights(noloco)
    parameters = sum(finals[0].tensor(name).numel() for name in finals[0].names)
    assert sum(values(rows, "exchange_bytes")) == 4 * parameters * 10 * 4  # bytes · parameters · outer steps · replicas
    assert values(rows, "val_loss", 0)[-1] < values(rows, "val_loss", 0)[0] - 0.5
    first = {row["val_loss"] for row in rows if row["step"] == 0}
    assert len(first) == 1, "replicas that start equal evaluate equally"
    assert deviation(finals) < 0.5 * deviation(weights(local))

    probes = [
        [
            json.loads(line)
            for line in (tmp_path / "noloco" / f"replica_{r:02d}" / "probe.jsonl").read_text().splitlines()
        ]
        for r in range(4)
    ]
    # [replicas, outer steps, sampled weights] -> deviation at each outer step
    before, after = (
        np.linalg.norm(np.array([[row[when] for row in rows] for rows in probes]).std(0), axis=-1)
        for when in ("before", "after")
    )
    assert after.mean() < 0.8 * before.mean(), "an outer step pulls the replicas together"
    assert json.loads((tmp_path / "noloco" / "config.json").read_text()) == configs.parse(noloco).to_json()
    assert mean_tensor(finals, finals[0].names[0]).shape == finals[0].tensor(finals[0].names[0]).shape

    with pytest.raises(AssertionError, match="holds an earlier run"):
        run(noloco, tmp_path)  # nothing is overwritten
    assert len(rows_of(noloco)) == len(rows)


@pytest.mark.parametrize("routing, number", [("random", signal.SIGTERM), ("fixed", signal.SIGINT)])
def test_one_signal_to_one_rank_ends_the_run_cleanly(tiny, tmp_path, routing, number):
    raw = tiny(run__steps=100_000, noloco__routing=routing)
    with launched(raw, tmp_path) as ranks:
        wait_for_step(raw, 8, ranks)
        os.kill(ranks.processes[5].pid, number)  # replica 2, last stage
        ranks.wait(90)
    saved = weights(raw)
    steps = {w.manifest["step"] for w in saved}
    assert len(saved) == 4 and len(steps) == 1, f"the replicas stopped at {steps}"
    (step,) = steps
    assert 8 < step < 100_000
    assert {row["step"] for row in rows_of(raw) if row["val_loss"] is not None} == {0, step}


def test_a_suspended_replica_holds_nobody(tiny, tmp_path):
    raw = tiny(
        run__steps=30, noloco__routing="fixed", noloco__exchange_deadline_seconds=2.0, noloco__heartbeat_seconds=0.5
    )
    with launched(raw, tmp_path) as ranks:
        wait_for_step(raw, 3, ranks)
        stopped = [process.pid for process in ranks.processes[2:4]]  # replica 1
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            ranks.wait(120, expect_missing=frozenset({2, 3}))
        finally:
            for process in ranks.processes[2:4]:
                process.kill()
    rows = rows_of(raw)
    for replica in (0, 2, 3):
        assert max(row["step"] for row in rows if row["replica"] == replica) == 30
    reasons = values(rows, "missed_reason")
    # Others may miss each other too, while one of them waits for replica 1.
    assert any(reason.startswith("1: ") for reason in reasons)
    assert {w.manifest["replica"] for w in weights(raw)} == {0, 2, 3}


def test_a_killed_replica_ends_no_other(tiny, tmp_path):
    """With random routes its neighbours lose a link: they redo the step along their own pipelines and go on."""
    raw = tiny(
        run__steps=40,
        noloco__exchange_deadline_seconds=2.0,
        noloco__heartbeat_seconds=0.5,
        noloco__link_timeout_seconds=6.0,
    )
    with launched(raw, tmp_path) as ranks:
        wait_for_step(raw, 6, ranks)
        for process in ranks.processes[2:4]:  # replica 1
            process.kill()
        ranks.wait(150, expect_missing=frozenset({2, 3}))
    rows = rows_of(raw)
    for replica in (0, 2, 3):
        steps = [row["step"] for row in rows if row["replica"] == replica and row["loss"] is not None]
        assert steps == list(range(1, 41)), "every inner step was taken once"
    assert {w.manifest["replica"] for w in weights(raw)} == {0, 2, 3}


def test_routes_stay_inside_their_site(tiny, tmp_path):
    """Sites of replicas that are not neighbours in number; pairs are drawn over all of them."""
    rows = run(tiny(topology__sites=[[0, 2], [3, 1]], run__steps=30, noloco__inner_steps=2), tmp_path)
    met = {(row["replica"], row["partner"]) for row in rows if row["partner"] is not None}
    assert {(0, 1), (0, 2), (0, 3)} <= met
    assert values(rows, "val_loss", 1)[-1] < values(rows, "val_loss", 1)[0] - 0.3


def test_the_inner_data_axis_changes_nothing_but_the_layout(tiny, tmp_path):
    """D = 2 with half the microbatches, and T = 2, train on the same samples to the same losses as D = T = 1."""
    common = {"topology__replicas": 2, "run__steps": 6, "noloco__inner_steps": 3}
    losses = {}
    for name, change in {
        "one": {"gradient_accumulation_steps": 4},
        "data": {"gradient_accumulation_steps": 2, "topology__data": 2},
        "tensor": {"gradient_accumulation_steps": 4, "topology__tensor": 2, "topology__sequence_parallel": True},
    }.items():
        rows = run(tiny(run__name=name, **common, **change), tmp_path)
        losses[name] = [values(rows, "loss", r) + values(rows, "val_loss", r) for r in range(2)]
    np.testing.assert_allclose(losses["data"], losses["one"], rtol=2e-5)
    np.testing.assert_allclose(losses["tensor"], losses["one"], rtol=2e-5)


@pytest.mark.slow
def test_bf16_follows_fp32(tiny, tmp_path):
    common = {"topology__replicas": 2, "run__steps": 20}
    fp32 = run(tiny(run__name="fp32", **common), tmp_path)
    bf16 = run(tiny(run__name="bf16", bf16={"enabled": True}, **common), tmp_path)
    np.testing.assert_allclose(values(bf16, "loss"), values(fp32, "loss"), rtol=0.03)
    assert values(bf16, "val_loss", 0)[-1] < values(bf16, "val_loss", 0)[0] - 0.3


def test_a_signal_at_any_time_after_the_start_saves_the_weights(tiny, tmp_path):
    """While the first evaluation runs, and right before the last step: the run ends with all weights on disk."""
    for name, steps, at in (("early", 100_000, 0), ("late", 25, 23)):
        raw = tiny(run__name=name, run__steps=steps, topology={"replicas": 2, "stages": 2}, run__eval_microbatches=16)
        path = configs.parse(raw).output / "metrics.jsonl"
        with launched(raw, tmp_path) as ranks:
            deadline = time.monotonic() + 90
            while not (path.exists() and (at == 0 or any(row["step"] >= at for row in rows_of(raw)))):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(ranks.processes[1].pid, signal.SIGTERM)
            ranks.wait(90)
        steps = {w.manifest["step"] for w in weights(raw)}
        assert len(weights(raw)) == 2 and len(steps) == 1 and max(steps) <= 25
        assert {row["step"] for row in rows_of(raw) if row["loss"] is not None} >= steps, "the last step has its row"


def test_a_full_disk_does_not_end_training(tiny, tmp_path):
    raw = tiny(run__steps=6, topology={"replicas": 2, "stages": 1})
    output = configs.parse(raw).output
    output.mkdir(parents=True)
    (output / "metrics.jsonl").symlink_to("/dev/full")
    with launched(raw, tmp_path) as ranks:
        ranks.wait(90)
    assert {w.manifest["step"] for w in weights(raw)} == {6}


def test_replicas_of_different_topologies_refuse_each_other_at_once(tiny, tmp_path):
    """Long before the timeouts, and with the reason, though one of them waits for a replica that will never come."""
    one = tiny(topology={"replicas": 2, "stages": 1}, noloco__rendezvous_timeout_seconds=60.0)
    other = tiny(topology={"replicas": 3, "stages": 1}, noloco__rendezvous_timeout_seconds=60.0)
    server = RendezvousServer(SECRET.encode())
    address = "{}:{}".format(*server.address)
    try:
        first = Ranks(train_rank, [Place(0, 0, 0, 0)], tmp_path, (one, address))
        second = Ranks(train_rank, [Place(1, 0, 0, 0)], tmp_path, (other, address))
        for ranks in (first, second):
            with pytest.raises(AssertionError, match="do not belong together: another configuration"):
                ranks.wait(50)
    finally:
        server.close()


@pytest.mark.slow
def test_one_rendezvous_serves_one_start_after_another(tiny, tmp_path):
    server = RendezvousServer(SECRET.encode())
    address = "{}:{}".format(*server.address)
    try:
        for name in ("first", "second", "first"):
            raw = tiny(run__name=name, run__steps=2, topology={"replicas": 2, "stages": 2})
            ranks = Ranks(train_rank, list(configs.parse(raw).topology.grid().places()), tmp_path, (raw, address))
            if name == "first" and (tmp_path / "first" / "replica_00").exists():
                with pytest.raises(AssertionError, match="holds an earlier run"):
                    ranks.wait(60)
            else:
                ranks.wait(60)
    finally:
        server.close()
