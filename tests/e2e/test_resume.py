"""Checkpoints of whole runs: exact resume after a kill, damage, lost saves, and other topologies."""

import itertools
import json
import math
import os
import resource
import shutil
import signal
import time

import pytest
import torch

from noloco_mega import config as configs
from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.metrics import read_rows
from tests.e2e.runs import launched, rows_of, run, values

TIMES = {"tokens_per_second", "exchange_seconds", "save_seconds"}
OUTER = ["outer.phi", "outer.delta"]
STATE = ["master", "exp_avg", "exp_avg_sq", *OUTER]

# Runs of 20 steps, saved at step 10: in the middle of an inner phase (H = 4) or right after an outer step (H = 5).
# precision, routes, T, S, D, moment, writing; `test_the_cases_meet` says what they cover.
EXACT = [
    ("bf16", "random", 2, 2, 1, "middle", "async"),
    ("fp32", "random", 1, 2, 2, "after", "sync"),
    ("bf16", "fixed", 1, 1, 2, "middle", "sync"),
    ("fp32", "fixed", 2, 1, 1, "after", "sync"),
    ("bf16", "fixed", 1, 2, 1, "after", "async"),
    ("fp32", "fixed", 2, 1, 2, "middle", "async"),
]


def test_the_cases_meet():
    """Every pair of choices meets in some case, but for random routes without a stage boundary to cross.

    No fewer would do. n cases in which all pairs of k two-valued choices meet exist only for k <= C(n - 1, n/2 - 1),
    n/2 rounded down (Kleitman and Spencer 1973, Katona 1973): k <= 3 for 4 cases, <= 4 for 5, <= 10 for 6. The one
    pair that can't meet has the number of stages in it, so that the other six choices need 6 cases already.
    """
    fewest = next(n for n in itertools.count(2) if math.comb(n - 1, n // 2 - 1) >= 6)
    assert len(EXACT) == fewest == 6
    choices = [("bf16", "fp32"), ("random", "fixed"), (1, 2), (1, 2), (1, 2), ("middle", "after"), ("async", "sync")]
    met = {(i, case[i], j, case[j]) for case in EXACT for i in range(7) for j in range(i + 1, 7)}
    all_pairs = {
        (i, one, j, other) for i in range(7) for j in range(i + 1, 7) for one in choices[i] for other in choices[j]
    }
    assert all_pairs - met == {(1, "random", 3, 1)}


def settings(precision, routes, tensor, stages, data, moment, writing):
    return {
        "topology": {"replicas": 2, "tensor": tensor, "stages": stages, "data": data},
        "bf16": {"enabled": precision == "bf16"},
        "noloco__routing": routes,
        "noloco__codec": "modulo" if data == 2 else "none",
        "noloco__inner_steps": 4 if moment == "middle" else 5,
        "run__save_async": writing == "async",
    }


def saved(raw, step):
    """Every replica's part of a checkpoint."""
    return Checkpoints(configs.parse(raw).output / "checkpoints", 0, 1).look(step).replicas


def wait_for(condition, ranks, limit_seconds=90):
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        assert any(process.is_alive() for process in ranks.processes), "all ranks are gone"
        time.sleep(0.02)


def run_and_kill(raw, directory, step):
    """Run until checkpoint `step` is known complete on all replicas, then kill -9 every process."""
    with launched(raw, directory) as ranks:
        checkpoints = Checkpoints(configs.parse(raw).output / "checkpoints", 0, 1)
        wait_for(lambda: checkpoints.latest() == step, ranks)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGKILL)


def files(raw, step):
    """Everything in the rank files of a checkpoint: {(replica, rank): bytes}, and what the manifests say of them."""
    content = {}
    for number, replica in saved(raw, step).items():
        for part in replica.parts:
            content[number, part["rank"]] = ((replica.folder / part["file"]).read_bytes(), part)
    return content


def without_times(rows):
    kept = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
    return sorted(kept, key=lambda row: (row["replica"], row["step"]))


@pytest.mark.parametrize(
    "case",
    [*EXACT[:-1], pytest.param(EXACT[-1], marks=pytest.mark.slow)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_killed_run_goes_on_exactly(tiny, tmp_path, case):
    """20 steps at once, against 10, kill -9, new processes, 10 more: every bit of the state and every row."""
    common = {"run__save_every": 10, "run__eval_every": 7, "run__log_every": 3, **settings(*case)}
    straight = tiny(run__name="straight", **common)
    run(straight, tmp_path)
    killed = tiny(run__name="killed", **{**common, "run__steps": 100_000})
    run_and_kill(killed, tmp_path, 10)
    beyond = [row for row in rows_of(killed) if row["step"] > 10]
    killed["run"] |= {"steps": 20, "resume": 10}
    run(killed, tmp_path)

    ours, theirs = files(killed, 20), files(straight, 20)
    assert ours.keys() == theirs.keys() and len(ours) == configs.parse(killed).topology.grid().size
    for place, (content, part) in ours.items():
        assert part == theirs[place][1] and content == theirs[place][0], place
    kinds = saved(killed, 20)[0].kinds
    assert sorted(kinds) == sorted(STATE)
    rows = without_times(rows_of(killed))
    assert rows == without_times(rows_of(straight))
    assert [row["step"] for row in rows if row["replica"] == 0 and row["val_loss"] is not None] == [0, 7, 14, 20]
    probes = [
        read_rows(configs.parse(raw).output / "replica_01" / "probe.jsonl", "outer_step") for raw in (killed, straight)
    ]
    assert probes[0] == probes[1] and len(probes[0]) >= 4
    weights = [SavedReplica(configs.parse(raw).output / "replica_01" / "weights") for raw in (killed, straight)]
    for name in weights[0].names:
        assert torch.equal(weights[0].tensor(name), weights[1].tensor(name)), name
    if beyond:
        text = (configs.parse(killed).output / "metrics.jsonl").read_text()
        assert any(json.loads(line).get("resumed") for line in text.splitlines())


def notes(raw, directory):
    """Run a config to its end; what it told on stderr."""
    errors = directory / f"errors of {raw['run']['name']}"
    with launched(raw, directory, errors) as ranks:
        ranks.wait(120)
    return errors.read_text()


def test_lost_saves_damage_and_other_topologies(tiny, tmp_path):
    """One run of 2 replicas of 2 stages, saved at steps 3 and 6, and what its checkpoints are good for afterwards."""
    common = {"run__steps": 6, "run__save_every": 3, "noloco__inner_steps": 2, "noloco__codec": "modulo"}
    base = tiny(run__name="base", topology={"replicas": 2, "stages": 2}, **common)
    run(base, tmp_path)
    masters = {number: {n: replica.tensor(n) for n in replica.names} for number, replica in saved(base, 6).items()}

    def again(name, **changes):
        """A copy of the run, to go on in another way."""
        shutil.copytree(tmp_path / "base", tmp_path / name)
        return tiny(**{"run__name": name, "topology": {"replicas": 2, "stages": 2}, **common, **changes})

    # A replica that has lost its last save: all go on from the one before.
    lost = again("lost", run__resume="auto", run__steps=8)
    shutil.rmtree(tmp_path / "lost" / "checkpoints" / "step_00000006" / "replica_01")
    assert "goes on from step 3" in notes(lost, tmp_path)
    for replica in range(2):
        steps = [row["step"] for row in rows_of(lost) if row["replica"] == replica and row["loss"] is not None]
        assert steps == list(range(1, 9))
    assert values(rows_of(lost), "loss")[:6] == values(rows_of(base), "loss")[:6]
    assert sorted(saved(lost, 6)) == sorted(saved(lost, 8)) == [0, 1]
    for number, replica in saved(lost, 6).items():  # steps 4 to 6, taken a second time
        assert all(torch.equal(replica.tensor(name), master) for name, master in masters[number].items())

    # Or it takes over its neighbour's; here with three replicas of one stage, of which one is new.
    newest = again("newest", run__resume="newest", topology={"replicas": 3, "tensor": 2})
    shutil.rmtree(tmp_path / "newest" / "checkpoints" / "step_00000006" / "replica_01")
    run(newest, tmp_path)
    for replica in range(3):
        weights = SavedReplica(tmp_path / "newest" / f"replica_{replica:02d}" / "weights")
        assert all(torch.equal(weights.tensor(name), masters[0][name]) for name in weights.names)

    # Two merge into one, which trains on.
    merged = again("merged", run__resume=6, run__shrink="merge", topology={"replicas": 1})
    run(merged, tmp_path)
    weights = SavedReplica(tmp_path / "merged" / "replica_00" / "weights")
    for name in weights.names:
        torch.testing.assert_close(
            weights.tensor(name), (masters[0][name] + masters[1][name]) / 2, rtol=1e-6, atol=1e-8
        )
    merged["run"] |= {"steps": 8, "resume": "auto"}
    run(merged, tmp_path)
    assert math.isfinite(values(rows_of(merged), "loss", 0)[-1]) and rows_of(merged)[-1]["step"] == 8
    assert saved(merged, 8)[0].manifest["view_log"] == [[0, [0, 1]], [6, [0]]]

    # A flipped bit.
    flipped = again("flipped", run__resume="auto")
    victim = tmp_path / "flipped" / "checkpoints" / "step_00000006" / "replica_01" / "rank_001.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    text = notes(flipped, tmp_path)
    assert "step_00000006 can't be used" in text and str(victim) in text and "goes on from step 3" in text
    assert all(torch.equal(saved(flipped, 6)[1].tensor(name), master) for name, master in masters[1].items())

    # Another model is refused, and nothing is touched.
    before = sorted((tmp_path / "base").rglob("*"))
    other = tiny(
        run__name="base", topology={"replicas": 1}, **{**common, "run__resume": "auto"}, model__ffn_hidden_size=96
    )
    with pytest.raises(AssertionError, match=r"model.ffn_hidden_size \(64 there, 96 here\)"):
        run(other, tmp_path)
    assert sorted((tmp_path / "base").rglob("*")) == before


def test_a_request_to_stop_saves_and_a_full_disk_stops_nothing(tiny, tmp_path):
    """A process that may write no file above 500 kB fails to save, tells so, and trains on until it is stopped."""
    raw = tiny(run__steps=100_000, topology={"replicas": 2}, run__save_every=100_000)
    with launched(raw, tmp_path) as ranks:
        metrics = configs.parse(raw).output / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and any(row["step"] >= 4 for row in rows_of(raw)), ranks)
        os.kill(ranks.processes[1].pid, signal.SIGTERM)
        ranks.wait(90)
    (step,) = {row["step"] for row in rows_of(raw) if row["val_loss"] is not None and row["step"] > 0}
    assert [row["step"] for row in rows_of(raw) if row["at_end"] == "val_loss"] == [step, step]
    assert (
        sorted(saved(raw, step)) == [0, 1]
        and Checkpoints(configs.parse(raw).output / "checkpoints", 0, 1).latest() == step
    )

    raw["run"] |= {"name": "full", "steps": 8, "save_every": 3, "save_async": False}
    with launched(raw, tmp_path, tmp_path / "errors") as ranks:
        for process in ranks.processes:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (500_000, 500_000))
        ranks.wait(90)
    assert max(row["step"] for row in rows_of(raw)) == 8
    folder = configs.parse(raw).output / "checkpoints"
    assert not [path for path in folder.rglob("*") if path.is_file()], "nothing half written is left"
    assert "the checkpoint of step 3 could not be written, training goes on" in (tmp_path / "errors").read_text()
