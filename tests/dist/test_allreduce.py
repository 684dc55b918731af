"""Averaging gradients over replicas at every inner step, against one plain AdamW run on all their batches together."""

from __future__ import annotations

import dataclasses

import pytest
import numpy as np

from noloco_mega.grid import Grid
from tests.dist.test_engine import STEPS, PlainAdamW, make_config, make_stage, run_schedule
from tests.dist.test_outer import make_peers
from tests.harness import replica_world, run_ranks

CLIP = 0.5
H = 4


def _train(place, directory, grid, bf16):
    """The weights of this rank's model after STEPS steps, the norms of all steps, and what was reported."""
    from noloco_mega import attach
    from noloco_mega.engine import deepspeed as engines

    world = replica_world(grid, place, directory)
    run = make_config(grid, bf16=bf16, clip=CLIP)
    run = dataclasses.replace(run, noloco=dataclasses.replace(run.noloco, optimizer="allreduce", inner_steps=H))
    engine = engines.build_engine(make_stage(run, world), run, world)
    peers = make_peers(grid, place, directory, "run", world.replica)
    hook = attach(engine, run, peers)
    norms, sent = [], []
    for step in range(STEPS):
        engines.begin(engine)
        run_schedule(engine.module, step, place.data + grid.data * place.replica, world)
        norms.append(engines.apply(engine, world))
        if hook.optimizer.due(step + 1):
            sent.append(hook.last_report.sent_bytes)
    masters = sum(tensor.numel() for tensor in hook._masters.tensors)
    peers.close()
    return [p.detach().float().numpy() for p in engine.module.parameters()], norms, sent, masters


def _train_plainly(place, directory, batches, bf16):
    """The same by one process: every step's batches one after the other, then one step of torch's AdamW."""
    grid = Grid(replicas=1)
    world = replica_world(grid, place, directory)
    model = make_stage(make_config(grid, bf16=bf16), world)
    plain = PlainAdamW(model, world, CLIP)
    norms = []
    for step in range(STEPS):
        for batch in range(batches):
            run_schedule(model, step, batch, world)
        for total in plain.sums:
            total.div_(batches)
        norms.append(plain.step())
    return [p.detach().float().numpy() for p in model.parameters()], norms


@pytest.mark.parametrize(
    ("grid", "bf16"),
    [(Grid(replicas=2, data=2), False), (Grid(replicas=4), False), (Grid(replicas=2, data=2), True)],
    ids=["2 replicas of D2", "4 replicas", "2 replicas of D2 in bf16"],
)
def test_a_run_equals_one_with_all_batches_together(tmp_path, grid, bf16):
    (tmp_path / "plain").mkdir()
    answers = run_ranks(_train, grid, tmp_path, grid, bf16)
    ((expected, expected_norms),) = run_ranks(
        _train_plainly, Grid(replicas=1), tmp_path / "plain", grid.replicas * grid.data, bf16
    )
    assert expected_norms[-1] > CLIP, "the clip never acted: the test shows nothing about it"
    for weights, norms, sent, masters in answers:
        assert all(np.array_equal(a, b) for a, b in zip(weights, answers[0][0], strict=True)), "the replicas differ"
        difference = max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True))
        assert difference < (1e-3 if bf16 else 1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-3 if bf16 else 1e-5)
        assert sent == [H * 4 * masters] * (STEPS // H)
