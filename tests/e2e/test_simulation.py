"""The in-process simulator against distributed runs with the same seed, and against itself when interrupted."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from noloco_mega import config as configs
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import open_loader
from noloco_mega.lab import analyser, stacked
from noloco_mega.lab.inner_steps import Target
from noloco_mega.lab.loop import simulate
from noloco_mega.lab.simulation import Simulation
from noloco_mega.metrics import read_rows
from noloco_mega.plan import views
from tests.e2e.runs import run, values

SCHEDULE = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 24, "warmup_num_steps": 6, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.1},
}
LOOKING_AHEAD = {"optimizer": "noloco", "nesterov": True, "pairing": "tournament", "gamma_at_zero_lr": 1.0}
ADAPTING_FIRST = {"optimizer": "noloco", "combine": "after", "nesterov": True, "pairing": "hypercube"}
OPTIONS = [
    {"optimizer": "noloco", "nesterov": True},
    {"optimizer": "noloco", "combine": "after"},
    {"optimizer": "noloco", "pairing": "hypercube"},
    {"optimizer": "gossip", "pairing": "tournament"},
    {"optimizer": "noloco", "gamma_at_zero_lr": 0.0},
]


COLUMNS = ("loss", "val_loss", "grad_norm", "lr", "spread", "exchange_bytes", "partner", "tokens")


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are slower on several threads, and much slower where other processes want the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simulated(raw, rule=None, tell=lambda text: None, **changes):
    config = configs.parse(raw | {"run": {**raw["run"], "name": "simulated", **changes}})
    loader = open_loader(config, views.initial(config.topology.replicas))
    simulation = Simulation(config, loader)
    result = simulate(simulation, tell, rule)
    return simulation, result, read_rows(config.output / "metrics.jsonl")


@pytest.mark.parametrize(
    "optimizer, stages, routing, clip",
    [
        ({"optimizer": "noloco"}, 1, "fixed", 0.3),
        ({"optimizer": "noloco", "codec": "modulo"}, 1, "fixed", 0.3),
        ({"optimizer": "noloco"}, 2, "random", 1.0),
        (LOOKING_AHEAD, 1, "fixed", 0.3),
        (ADAPTING_FIRST, 1, "fixed", 0.3),
        *(pytest.param(option, 1, "fixed", 0.3, marks=pytest.mark.slow) for option in OPTIONS),
        pytest.param({"optimizer": "diloco", "nesterov": True}, 1, "fixed", 0.3, marks=pytest.mark.slow),
        pytest.param({"optimizer": "allreduce"}, 1, "fixed", 0.3, marks=pytest.mark.slow),
        pytest.param({"optimizer": "gossip"}, 1, "fixed", 0.3, marks=pytest.mark.slow),
    ],
)
def test_a_simulation_follows_the_distributed_run(tiny, tmp_path, optimizer, stages, routing, clip):
    raw = tiny(
        topology={"replicas": 4, "stages": stages}, run__steps=24, run__eval_every=12, noloco__inner_steps=6,
        noloco__routing=routing, gradient_clipping=clip, scheduler=SCHEDULE,
        optimizer__params__weight_decay=0.1,
    )  # fmt: skip
    # Nobody is late, however busy the machine: a late replica would end its phase early.
    patient = {"heartbeat_seconds": 60.0, "exchange_deadline_seconds": 120.0, "link_timeout_seconds": 400.0}
    raw["noloco"] |= patient | optimizer
    rows = run(raw, tmp_path)
    simulation, result, simulated_rows = simulated(raw)
    # A last bit of difference before a codec may round a weight to the other side.
    tolerance = 1e-3 if "codec" in optimizer else 1e-4

    config = configs.parse(raw)
    weights = stacked.views(simulation.theta, config.model)
    for replica in range(4):
        for column in (*COLUMNS, "wrap_rate") if "codec" in optimizer else COLUMNS:
            expected = values(rows, column, replica)
            found = values(simulated_rows, column, replica)
            assert len(expected) > 1 or column in ("spread", "wrap_rate")
            if column == "partner":
                assert found == expected
                continue
            np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=column)
        saved = SavedReplica(config.replica_folder(replica) / "weights")
        assert set(saved.names) == set(weights)
        for name, weight in weights.items():
            expected = saved.tensor(name)
            assert (weight[replica].detach() - expected).norm() < tolerance * expected.norm(), name
        assert result["replicas"][replica] == pytest.approx(values(rows, "val_loss", replica)[-1], rel=tolerance)
    # Of what an all-reduce is given once, a ring sends 2·(N − 1)/N times as much.
    ring = 1.5 if optimizer["optimizer"] in ("diloco", "allreduce") else 1
    assert result["sent_bytes_per_replica"] == ring * sum(values(rows, "exchange_bytes", 0))

    # Both folders tell the analyser about the same, though they have probed other weights.
    for real, simulated_ in zip(analyser.phases(config.output), analyser.phases(simulation.config.output), strict=True):
        assert (real.step, real.inner_steps) == (simulated_.step, 6)
        assert real.std_before == pytest.approx(simulated_.std_before, rel=0.5)
        assert real.lr == pytest.approx(simulated_.lr)


@pytest.mark.parametrize(
    "optimizer, codec",
    [
        ("noloco", "modulo"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("noloco", "none"),
                ("gossip", "modulo"),
                ("diloco", "none"),
                ("diloco", "absmax"),
                ("allreduce", "none"),
            )
        ),
    ],
)
def test_an_interrupted_simulation_goes_on_exactly(tiny, optimizer, codec):
    raw = tiny(
        topology={"replicas": 3}, noloco__inner_steps=3, noloco__optimizer=optimizer, noloco__codec=codec,
        run__log_every=2, run__steps=10,
        run__eval_every=7, run__save_every=5,
    )  # fmt: skip
    whole, result, _ = simulated(raw)
    expected = everything_written(whole.config.output)
    shutil.rmtree(whole.config.output)

    def die(text):
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="step 7"):  # two steps and an outer step after the state was saved
        simulated(raw, tell=die)
    resumed, resumed_result, _ = simulated(raw, resume="auto")
    assert resumed.step == 10 and resumed_result == result
    found = everything_written(whole.config.output)
    for name, tensor in expected.pop("state").items():
        assert torch.equal(tensor, found["state"][name]), name
    assert {name: found[name] for name in expected} == expected

    raw["noloco"]["seed"] = 5
    with pytest.raises(ValueError, match=r"noloco\.seed"):
        simulated(raw, steps=12, resume="auto")


def everything_written(folder):
    """A simulation's state and its rows, without times."""
    rows = read_rows(folder / "metrics.jsonl")
    return {
        "state": load_file(folder / "state.safetensors"),
        "rows": [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows],
        "deviations": analyser.exact_deviations(folder),
        "probes": [read_rows(path, "outer_step") for path in sorted(folder.glob("replica_*/probe.jsonl"))],
    }


def test_an_existing_folder_is_not_overwritten(tiny):
    raw = tiny(topology={"replicas": 2}, run__steps=1)
    simulated(raw)
    with pytest.raises(ValueError, match="exists"):
        simulated(raw)


def test_exact_deviations_are_written(tiny):
    simulation, result, _ = simulated(tiny(topology={"replicas": 3}, noloco__inner_steps=3), steps=6)
    lines = (simulation.config.output / "deviation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["step"], row["when"]) for row in rows if row["when"] != "logged"] == [
        (3, "before"), (3, "after"), (6, "before"), (6, "after"),
    ]  # fmt: skip
    theta = simulation.theta.double().numpy()
    assert rows[-1]["std"] == pytest.approx(np.sqrt(theta.var(0, ddof=1).mean()), rel=1e-6)
    assert (
        rows[-1]["relative"]
        == result["deviation"]
        == pytest.approx(np.sqrt(theta.var(0).sum()) / np.linalg.norm(theta.mean(0)), rel=1e-6)
    )


def test_what_is_not_simulated_is_refused(tiny):
    with pytest.raises(ValueError, match="bf16"):
        simulated(tiny(bf16={"enabled": True}))
    with pytest.raises(ValueError, match=r"model\.qk_norm"):
        simulated(tiny(model__qk_norm=True))
    with pytest.raises(ValueError, match="counted in steps"):
        simulated(tiny(noloco__inner_phase="seconds", noloco__inner_phase_seconds=5.0, noloco__routing="fixed"))


def test_allreduce_is_one_large_batch_run(tiny):
    """The samples of N replicas at a step are those that one replica with N times the microbatches reads."""
    changes = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3, "noloco__inner_steps": 4}
    raw = tiny(topology={"replicas": 4}, noloco__optimizer="allreduce", **changes)
    several, _, _ = simulated(raw, steps=10, name="several")
    changes["gradient_accumulation_steps"] = 8
    raw = tiny(topology={"replicas": 1}, noloco__optimizer="local", **changes)
    one, _, _ = simulated(raw, steps=10, name="one")
    assert (several.theta - one.theta).norm(dim=1).max() < 1e-5 * one.theta.norm()


def test_a_rule_sets_the_length_of_phases(tiny):
    """The target rule halves the phases of a run whose spread is twice what it wants, and goes on where it was."""
    raw = tiny(topology={"replicas": 4}, noloco__inner_steps=12)
    whole, _, _ = simulated(raw, steps=12, name="whole")
    spread = analyser.phases(whole.config.output)[0].relative_before
    rule = Target(target=whole_spread(whole) / 2)
    adapted, result, _ = simulated(raw, rule=rule, steps=30, name="adapted")
    found = analyser.phases(adapted.config.output)
    assert spread == pytest.approx(whole_spread(whole), rel=0.3)
    assert [phase.inner_steps for phase in found[:2]] == [12, 6] and result["outer_steps"] == len(found)
    simulated(raw, rule=rule, steps=15, name="parts")
    parts, _, _ = simulated(raw, rule=rule, steps=30, name="parts", resume="auto")
    assert torch.equal(parts.theta, adapted.theta) and parts.counters == adapted.counters


@pytest.mark.slow
def test_the_target_rule_says_much_the_same_whatever_phases_the_pilot_had(tiny):
    rules = {"target": Target(target=0.1)}
    recommended = []
    for steps in (6, 12, 24):
        pilot, _, _ = simulated(tiny(topology={"replicas": 4}, noloco__inner_steps=steps), steps=192, name=f"{steps}")
        recommended.append(analyser.analyse(analyser.phases(pilot.config.output), rules).recommended["target"])
    assert max(recommended) < 2 * min(recommended), recommended


def whole_spread(simulation):
    """The exact spread before the first outer step."""
    rows = analyser.exact_deviations(simulation.config.output)
    return next(row["relative"] for row in rows if row["when"] == "before")
