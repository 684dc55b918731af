"""Saved weights, read back unsharded, against θ0's own definition under another topology."""

import json

import pytest
import torch
from safetensors.torch import load_file

from noloco_mega import config
from noloco_mega.checkpoint.format import CheckpointError, content_crc
from noloco_mega.checkpoint.reader import SavedReplica, mean_tensor
from noloco_mega.grid import Grid
from noloco_mega.model import parameters
from tests.harness import replica_world, run_ranks

MODEL = config.Model(
    vocab_size=256, hidden_size=32, num_layers=4, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    seq_length=16,
)  # fmt: skip


def _save(place, directory, grid, folder):
    from noloco_mega.checkpoint.weights import save_weights
    from noloco_mega.model.stage import build_stage

    world = replica_world(grid, place, directory, name=folder)
    topology = config.Topology(replicas=1, stages=grid.stages, tensor=grid.tensor, data=grid.data)
    model = build_stage(MODEL, topology, world, torch.float32)
    parameters.initialise(model, world, 7, 0.02)
    save_weights(
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
    whole = SavedReplica(saved / "whole")
    assert len(whole.names) == 4 * 6 + 3 and whole.manifest["step"] == 3
    for folder in ("cut", "copied"):
        other = SavedReplica(saved / folder)
        assert sorted(other.names) == sorted(whole.names)
        for name in whole.names:
            assert torch.equal(other.tensor(name), whole.tensor(name)), name
    assert torch.equal(mean_tensor([whole, SavedReplica(saved / "cut")], whole.names[0]), whole.tensor(whole.names[0]))


def test_files_are_what_the_safetensors_library_reads(saved):
    """Its reader knows nothing of our manifest."""
    mine = SavedReplica(saved / "whole")
    theirs = load_file(saved / "whole" / "rank_000.safetensors")
    assert sorted(theirs) == sorted(mine.names)
    assert all(torch.equal(theirs[name], mine.tensor(name)) for name in mine.names)


def test_damage_is_named(saved, tmp_path):
    import shutil

    shutil.copytree(saved / "cut", tmp_path / "cut")
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    victim = tmp_path / "cut" / "rank_003.safetensors"
    whole = victim.read_bytes()
    SavedReplica(tmp_path / "cut").tensor(name)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    header = whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    swapped = (tmp_path / "cut" / "rank_002.safetensors").read_bytes()
    for broken in (whole[:-100], flipped, header, swapped):
        victim.write_bytes(broken)
        with pytest.raises(CheckpointError, match="rank_003"):
            SavedReplica(tmp_path / "cut").tensor(name)
    victim.unlink()
    with pytest.raises(CheckpointError, match="rank_003.*is missing"):
        SavedReplica(tmp_path / "cut")
    path = tmp_path / "cut" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"step": 3', '"step": 2'))
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        SavedReplica(tmp_path / "cut")
    content = json.loads(text)["content"]
    content["parts"] = [part for part in content["parts"] if part["file"] != "rank_003.safetensors"]
    path.write_text(json.dumps({"crc": content_crc(content), "content": content}))
    with pytest.raises(CheckpointError, match="only a part"):
        SavedReplica(tmp_path / "cut").tensor(name)
    with pytest.raises(CheckpointError, match="nothing complete was saved there"):
        SavedReplica(tmp_path)


def test_saving_again_replaces_the_folder_whole(saved):
    run_ranks(_save, Grid(replicas=1), saved, Grid(replicas=1), "whole")
    assert sorted(path.name for path in (saved / "whole").iterdir()) == ["manifest.json", "rank_000.safetensors"]
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]


def _fail(place, directory, grid, folder, victim):
    from noloco_mega.checkpoint import weights

    def full(*arguments):
        raise OSError(28, "No space left on device")

    if place.stage == victim:
        weights.write_rank = full
    try:
        _save(place, directory, grid, folder)
    except OSError as error:
        return str(error)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_is_told_by_all_ranks_with_the_folder(tmp_path, victim):
    grid = Grid(replicas=1, stages=2)
    told = run_ranks(_fail, grid, tmp_path, grid, "weights", victim)
    assert told == [
        f"the weights could not be written into {tmp_path / 'weights'}: rank {victim}: [Errno 28] No space left on device"
    ] * 2
    assert not list(tmp_path.glob("*weights*draft*")) and not (tmp_path / "weights").exists()
