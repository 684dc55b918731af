"""attach() on a user's own DeepSpeed loop: a plain module, two replicas, each a process and a world of its own.

The processes are started fresh, not from the suite's preloaded server, to see what this path imports. Run as a program
(``python -m tests.dist.test_attach DIRECTORY REPLICA``) this file is such a loop.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from noloco_mega.config import Noloco
from tests.unit.test_outer_formula import printed_step

SETTINGS = Noloco(inner_steps=3, gamma=0.6, exchange_deadline_seconds=60.0)
STEPS, MICROBATCHES, OVERFLOWING_STEP = 9, 2, 4
ROOT = Path(__file__).parents[2]


def train(directory: Path, replica: int) -> dict:
    import deepspeed
    import torch

    import noloco_mega
    from noloco_mega.grid import Grid, Place
    from tests.dist.test_outer import flat, make_peers

    os.environ["LOCAL_RANK"] = "0"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    grid, place = Grid(replicas=2), Place(replica, 0, 0, 0)
    peers = make_peers(grid, place, directory, "attach", torch.distributed.group.WORLD)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    engine = make_engine(model, stage=1)
    hook = noloco_mega.attach(engine, SETTINGS, peers)
    answer = {"start": flat(masters_of(engine)), "theta": [], "phi": [], "reports": [], "follows": []}
    with pytest.raises(ValueError, match="detach"):
        noloco_mega.attach(engine, SETTINGS, peers)
    with pytest.raises(ValueError, match='"stage": 1'):
        noloco_mega.attach(make_engine(torch.nn.Linear(2, 2), stage=2), SETTINGS, peers)

    generator = torch.Generator().manual_seed(replica)
    for step in range(STEPS):
        spied = spy(hook, engine)
        outer_steps = hook.outer_step
        for microbatch in range(MICROBATCHES):
            assert hook.step == step, "a step was counted before its last microbatch"
            x = torch.randn(4, 8, generator=generator)
            loss = (engine(x) - x[:, :4].cumsum(1)).square().mean()
            if step == OVERFLOWING_STEP and microbatch == 1 and replica == 1:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
        if hook.outer_step > outer_steps:
            answer["theta"].append(spied[0])
            answer["phi"].append(flat(masters_of(engine)))
            answer["reports"].append(hook.last_report)
            weights = [p for group in engine.optimizer.bit16_groups for p in group]
            answer["follows"].append(np.array_equal(flat(weights), answer["phi"][-1]))
            # Leave and come back, as a resumed run does.
            state = hook.state_dict()
            hook.detach()
            hook = noloco_mega.attach(engine, SETTINGS, peers)
            hook.load_state_dict(state)
    answer["counters"] = (hook.step, hook.outer_step, engine.global_steps, engine.skipped_steps)
    hook.detach()
    engine.backward(engine(torch.ones(4, 8)).mean())
    engine.step()
    assert hook.step == STEPS, "a detached hook still counts"
    peers.exchange.close()
    answer["foreign"] = sorted(name for name in sys.modules if name.partition(".")[0] in ("megatron", "transformers"))
    return answer


def make_engine(model, stage):
    import deepspeed

    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}],
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": 1.0,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
        },
    )
    return engine


def masters_of(engine):
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def spy(hook, engine):
    """θ as the next launch finds it."""
    from tests.dist.test_outer import flat

    thetas, launch = [], hook.optimizer.launch

    def recording(outer_step):
        thetas.append(flat(masters_of(engine)))
        launch(outer_step)

    hook.optimizer.launch = recording
    return thetas


def test_a_users_own_loop_takes_outer_steps(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.dist.test_attach", str(tmp_path), str(replica)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for replica in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    answers = [pickle.loads((tmp_path / f"answer{replica}").read_bytes()) for replica in range(2)]

    phi = np.stack([answer["start"] for answer in answers]).astype(np.float64)
    delta = np.zeros_like(phi)
    assert np.array_equal(phi[0], phi[1])
    for outer_step in range(3):
        theta = np.stack([answer["theta"][outer_step] for answer in answers]).astype(np.float64)
        assert np.abs(theta[0] - theta[1]).max() > 1e-3, "the replicas trained on the same data"
        phi, delta = printed_step(theta, phi, delta, {0: (0, 1), 1: (0, 1)}, SETTINGS)
        for replica, answer in enumerate(answers):
            np.testing.assert_allclose(answer["phi"][outer_step], phi[replica], atol=1e-6)
            assert answer["follows"][outer_step]
            report = answer["reports"][outer_step]
            assert report.outer_step == outer_step and report.received == (1 - replica,)
    assert [answer["counters"] for answer in answers] == [(9, 3, 9, 0), (9, 3, 9, 1)], "a skipped step counts"
    assert [answer["foreign"] for answer in answers] == [[], []], "a plain module should not need these"


def test_the_package_itself_imports_nothing_heavy():
    program = (
        "import sys, json, noloco_mega; print(json.dumps([m for m in ('torch', 'deepspeed') if m in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == []


if __name__ == "__main__":
    directory, replica = Path(sys.argv[1]), int(sys.argv[2])
    (directory / f"answer{replica}").write_bytes(pickle.dumps(train(directory, replica)))
