"""Saved weights, read back unsharded, against θ0's own definition under another topology."""

import json

import pytest
import torch

from noloco_mega import checkpoint, config
from noloco_mega.checkpoint import CheckpointError, Weights, mean_tensor
from noloco_mega.grid import Grid
from noloco_mega.model import parameters
from tests.harness import replica_world, run_ranks

MODEL = config.Model(
    vocab_size=256, hidden_size=32, num_layers=4, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    seq_length=16,
)  # fmt: skip


def _save(place, directory, grid, folder):
    from noloco_mega.model.stage import build_stage

    world = replica_world(grid, place, directory, name=folder)
    topology = config.Topology(replicas=1, stages=grid.stages, tensor=grid.tensor, data=grid.data)
    model = build_stage(MODEL, topology, world, torch.float32)
    parameters.initialise(model, world, 7, 0.02)
    checkpoint.save_weights(
        directory / folder,
        dict(model.named_parameters()),
        parameters.parameter_slices(model, world),
        world,
        {"step": 3},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    for folder, grid in {
        "whole": Grid(replicas=1),
        "cut": Grid(replicas=1, data=1, stages=2, tensor=2),
        "copied": Grid(replicas=1, data=2, stages=2),
    }.items():
        run_ranks(_save, grid, directory, grid, folder)
    return directory


def test_any_topology_reads_back_the_same_tensors(saved):
    whole = Weights(saved / "whole")
    assert len(whole.names) == 4 * 6 + 3 and whole.manifest["step"] == 3
    for folder in ("cut", "copied"):
        other = Weights(saved / folder)
        assert sorted(other.names) == sorted(whole.names)
        for name in whole.names:
            assert torch.equal(other.tensor(name), whole.tensor(name)), name
    assert torch.equal(mean_tensor([whole, Weights(saved / "cut")], whole.names[0]), whole.tensor(whole.names[0]))


def test_damage_is_named(saved, tmp_path):
    import shutil

    shutil.copytree(saved / "cut", tmp_path / "cut")
    weights = Weights(tmp_path / "cut")
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    victim = tmp_path / "cut" / "rank_003.safetensors"
    whole = victim.read_bytes()
    weights.tensor(name)
    for broken in (
        whole[:-100],
        whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
    ):
        victim.write_bytes(broken)
        with pytest.raises(CheckpointError, match="rank_003"):
            for each in weights.names:
                weights.tensor(each)
    victim.unlink()
    with pytest.raises(CheckpointError, match="rank_003"):
        weights.tensor(name)
    manifest = json.loads((tmp_path / "cut" / "manifest.json").read_text())
    manifest["tensors"] = [entry for entry in manifest["tensors"] if entry["file"] != "rank_003.safetensors"]
    (tmp_path / "cut" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="only a part"):
        Weights(tmp_path / "cut").tensor(name)
    with pytest.raises(CheckpointError, match="not a folder of weights"):
        Weights(tmp_path)


def test_saving_again_replaces_the_folder_whole(saved):
    run_ranks(_save, Grid(replicas=1), saved, Grid(replicas=1), "whole")
    assert sorted(path.name for path in (saved / "whole").iterdir()) == ["manifest.json", "rank_000.safetensors"]
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]
