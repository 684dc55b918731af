"""Whole runs of the baseline outer optimizers: what they compute, exact resume, and the loss of a replica."""

import os
import shutil
import signal
import time

import pytest

from noloco_mega import config as configs
from tests.e2e.runs import launched, rows_of, run, values
from tests.e2e.test_against_formulas import compare
from tests.e2e.test_resume import files, saved, without_times

STATE = {"master", "exp_avg", "exp_avg_sq"}
SLOW = {"outer.phi", "outer.delta"}
# Options of the noloco block, kinds of tensors in a checkpoint, and whether all replicas have equal weights at the end.
OPTIMIZERS = {
    "diloco": ({"nesterov": True, "outer_momentum": 0.3}, STATE | SLOW, True),
    "allreduce": ({}, STATE, True),
    "gossip": ({}, STATE, True),  # two replicas: the pair is everybody
}


def settings(optimizer, **changes):
    """6 steps of 2 replicas with an outer step every 2, saved after 3: inside an inner phase."""
    options = {f"noloco__{key}": value for key, value in OPTIMIZERS[optimizer][0].items()}
    return {
        "topology": {"replicas": 2, "stages": 2},
        "run__steps": 6,
        "run__save_every": 3,
        "noloco__inner_steps": 2,
        "noloco__optimizer": optimizer,
        **options,
        **changes,
    }


def resumed_from_step_3(raw, directory):
    """What steps 4 to 6 of a finished run come to, and what when new processes take them again."""
    before = files(raw, 6), without_times(rows_of(raw))
    shutil.rmtree(configs.parse(raw).output / "checkpoints" / "step_00000006")
    raw["run"]["resume"] = 3
    run(raw, directory)
    return before, (files(raw, 6), without_times(rows_of(raw)))


@pytest.mark.parametrize("optimizer", ["diloco", "allreduce", pytest.param("gossip", marks=pytest.mark.slow)])
def test_a_run_computes_what_the_formulas_say_and_goes_on_exactly(tiny, tmp_path, optimizer):
    _, kinds, equal = OPTIMIZERS[optimizer]
    raw = tiny(**settings(optimizer))
    config, rows = configs.parse(raw), run(raw, tmp_path)
    compare(config, rows)
    whole = [saved(raw, 6)[replica] for replica in range(2)]
    assert set(whole[0].kinds) == kinds
    if equal:
        for name in whole[0].names:
            assert whole[0].tensor(name).equal(whole[1].tensor(name)), name
    parameters = sum(whole[0].tensor(name).numel() for name in whole[0].names)
    per_row = 4 * parameters * (2 if optimizer == "allreduce" else 1)
    assert values(rows, "exchange_bytes") == pytest.approx([per_row] * 6, rel=1e-2)  # masters are padded
    assert {row["partner"] for row in rows if row["outer_step"] is not None and row["replica"] == 0} == {1}

    before, after = resumed_from_step_3(raw, tmp_path)
    assert before == after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "topology"),
    [
        ("diloco", {"replicas": 2, "tensor": 2}),
        ("diloco", {"replicas": 3, "data": 2}),
        ("allreduce", {"replicas": 3, "data": 2}),
        ("allreduce", {"replicas": 2, "stages": 2, "tensor": 2}),
        ("gossip", {"replicas": 3, "data": 2}),
        ("gossip", {"replicas": 2, "tensor": 2}),
    ],
)
def test_runs_in_bf16_go_on_exactly(tiny, tmp_path, optimizer, topology):
    raw = tiny(**settings(optimizer, topology=topology, bf16={"enabled": True}, noloco__routing="fixed"))
    rows = run(raw, tmp_path)
    assert values(rows, "val_loss", 0)[-1] < values(rows, "val_loss", 0)[0]
    before, after = resumed_from_step_3(raw, tmp_path)
    assert before == after


@pytest.mark.parametrize("optimizer", ["diloco", "allreduce"])
def test_a_lost_replica_ends_the_run_with_the_reason(tiny, tmp_path, optimizer):
    raw = tiny(
        **settings(optimizer, topology={"replicas": 2, "stages": 1}, run__steps=100_000, run__save_every=0),
        noloco__exchange_deadline_seconds=5.0,
        noloco__link_timeout_seconds=20.0,
    )
    with launched(raw, tmp_path) as ranks:
        deadline = time.monotonic() + 90
        while not (
            (configs.parse(raw).output / "metrics.jsonl").exists() and any(r["step"] >= 6 for r in rows_of(raw))
        ):
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.05)
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        with pytest.raises(AssertionError, match=r"cannot average with all 2 replicas.*waits for everybody"):
            ranks.wait(90, expect_missing=frozenset({1}))
