"""Every file of configs/ loads, is what its name says, has the published size, and its plan can be drawn."""

import re
from pathlib import Path

import pytest

from noloco_mega import config as configs
from noloco_mega import costs
from noloco_mega.plan import pairing
from noloco_mega.plan.routing import RandomRoutes

FOLDER = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(FOLDER.glob("*.json"))
NAME = re.compile(
    r"(?P<size>demo|small|medium|large|llama3_8b_continued)_(?P<optimizer>[a-z]+)_(?P<routing>random|fixed)_(\d+)x(\d+)"
)
# Parameters in billions, as published; tokens per step over all replicas; learning rate.
PUBLISHED = {
    "small": (0.31, 2**19, 6e-4),
    "medium": (2.13, 2**20, 2e-4),
    "large": (9.64, 2**21, 1.2e-4),
    "llama3_8b_continued": (8.03, 2**20, 2e-5),
}
TOPOLOGIES = {
    "small": {(8, 1), (4, 2), (8, 2), (16, 2)},
    "medium": {(8, 2), (16, 2), (16, 4)},
    "large": {(16, 4)},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_is_what_its_name_says(path):
    config, match = configs.load(path), NAME.fullmatch(path.stem)
    topology, size = config.topology, match["size"]
    assert (config.noloco.optimizer, config.noloco.routing) == (match["optimizer"], match["routing"])
    assert (topology.replicas, topology.stages) == (int(match[4]), int(match[5]))
    assert config.run.name in (path.stem, "demo")
    if size == "demo":
        assert config.run.device == "auto" and not config.bf16
        return
    billions, tokens, lr = PUBLISHED[size]
    # As printed: the published figures are cut, not rounded.
    assert int(costs.model_parameters(config) / 1e7) / 100 == billions
    assert config.replica_batch_size * config.model.seq_length * topology.replicas == tokens
    assert config.deepspeed["optimizer"]["params"]["lr"] == lr and config.bf16 and config.run.device == "cuda"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_plan_can_be_drawn(path):
    config = configs.load(path)
    grid, noloco = config.topology.grid(), config.noloco
    members = list(range(grid.replicas))
    assert [grid.rank(place) for place in grid.places()] == list(range(grid.size))
    routes = RandomRoutes(noloco.seed, members)
    for boundary in range(grid.stages - 1):
        assert sorted(routes.forward(0, 0, boundary, replica) for replica in members) == members
    assert sorted(sum(pairing.groups(noloco.seed, 0, members, noloco.group_size), ())) == members


# α, β and H as published; all-reduce has none of them, and reports as often as NoLoCo does.
OUTER = {"noloco": (0.5, 0.7, 50), "diloco": (0.3, 0.7, 100), "allreduce": (0.5, 0.7, 50)}


@pytest.mark.parametrize("optimizer", OUTER)
def test_the_papers_hyperparameters(optimizer):
    found = {}
    for path in FILES:
        config, match = configs.load(path), NAME.fullmatch(path.stem)
        size = match["size"]
        if size not in TOPOLOGIES or match["optimizer"] != optimizer:
            continue
        found.setdefault(size, set()).add((config.topology.replicas, config.topology.stages))
        noloco, deepspeed = config.noloco, config.deepspeed
        assert (noloco.outer_momentum, noloco.outer_lr, noloco.inner_steps) == OUTER[optimizer]
        assert noloco.group_size == 2 and not noloco.nesterov and noloco.weight_decay == 0
        if optimizer != "noloco":
            assert noloco.routing == "fixed"
        schedule = deepspeed["scheduler"]["params"]
        assert (schedule["warmup_num_steps"], schedule["total_num_steps"], config.run.steps) == (1000, 25000, 25000)
        assert schedule["cos_min_ratio"] == 0.1 and schedule["warmup_type"] == "linear"
        assert deepspeed["gradient_clipping"] == 1.0 and deepspeed["optimizer"]["params"]["weight_decay"] == 0
        assert config.model.seq_length == 1024 and config.model.vocab_size == 128256
    assert found == TOPOLOGIES


def test_runs_of_one_size_and_topology_differ_only_in_how_replicas_meet():
    runs = {}
    for path in FILES:
        match = NAME.fullmatch(path.stem)
        raw = configs.load(path).to_json()
        raw.pop("noloco")
        raw["run"].pop("name")
        runs.setdefault((match["size"], match[4], match[5]), []).append(raw)
    assert all(raw == same[0] for same in runs.values() for raw in same)
    counts = {size: [len(same) for key, same in runs.items() if key[0] == size] for size, _, _ in runs}
    assert counts == {"demo": [5], "small": [3] * 4, "medium": [3] * 3, "large": [3], "llama3_8b_continued": [1]}
