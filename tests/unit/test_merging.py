"""Merging replicas against NumPy, and what tools say about a run and about text."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch

from noloco_mega import config as configs
from noloco_mega import convert, merging
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import open_loader
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.plan import views
from tests import corpus
from tests.unit.test_hf import randomise, run, write_cut
from tools import convert_to_hf, generate, merge_replicas, preprocess_data


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three replicas with random weights, and those weights."""
    folder = tmp_path_factory.mktemp("run")
    texts = corpus.texts(300)
    corpus.write_tokenizer(folder / "t.model", texts)
    corpus.write_jsonl(folder / "c.jsonl", texts)
    for name in ("train", "valid"):
        preprocess_data.preprocess([folder / "c.jsonl"], folder / "t.model", str(folder / name))
    config = corpus.config(folder)
    replicas = []
    for replica in range(3):
        from noloco_mega.model import hf

        tensors = {row.ours: torch.empty(hf.shapes(row, config.model)[0]) for row in hf.table(config.model)}
        randomise(tensors.items())
        generator = torch.Generator().manual_seed(replica)
        for tensor in tensors.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
        facts = {"replica": replica, "config": config.to_json()}
        write_cut(folder / f"replica_{replica:02d}" / "weights", config.model, tensors, 1 + replica % 2, 1, **facts)
        replicas.append({name: tensor.numpy() for name, tensor in tensors.items()})
    return folder, replicas


@pytest.mark.parametrize(
    "options, parts",
    [([], [1, 1, 1]), (["--replicas", "0,2"], [1, 0, 1]), (["--replicas", "2,0", "--factors", "3,1"], [1, 0, 3])],
)
def test_merged_weights_are_the_weighted_mean(finished, tmp_path, capsys, options, parts):
    folder, replicas = finished
    words = [folder, "--output", tmp_path / "merged", "--max-shard-size", "20KB", "--json", tmp_path / "j.json"]
    assert run(merge_replicas, [*words, *options]) == 0
    merged = SavedReplica(tmp_path / "merged")
    shares = np.array(parts) / sum(parts)
    for name in merged.names:
        expected = sum(
            share * replica[name].astype(np.float64) for share, replica in zip(shares, replicas, strict=True)
        )
        np.testing.assert_allclose(merged.tensor(name).numpy(), expected, rtol=1e-5, atol=1e-6)
    result = json.loads((tmp_path / "j.json").read_text())
    used = [replica for replica, part in enumerate(parts) if part]
    assert {int(replica) for replica in result["replicas"]} == set(used)
    config = configs.parse(merged.manifest["config"])
    loss = merging.loss_of(config, open_loader(config, views.initial(1)), merged.tensor)
    assert result["merged_loss"] == pytest.approx(loss, rel=1e-6)
    flat = np.stack([np.concatenate([replicas[i][n].ravel() for n in sorted(replicas[i])]) for i in used])
    flat = flat.astype(np.float64)
    deviation = np.sqrt(np.square(flat - flat.mean(0)).sum(1).mean()) / np.linalg.norm(flat.mean(0))
    assert result["deviation"] == pytest.approx(deviation, rel=1e-6)
    assert "merged: validation loss" in capsys.readouterr().out


def test_what_cannot_be_merged_is_refused(finished, tmp_path, capsys):
    folder, _ = finished
    for options, message in {
        ("--replicas", "0,5"): "--replicas must name different ones of 0, 1, 2; given 0, 5",
        ("--replicas", "1,1"): "given 1, 1",
        ("--factors", "1,2"): "--factors must be 3 numbers",
        ("--factors", "1,-2,3"): "none below 0",
    }.items():
        assert run(merge_replicas, [folder, "--output", tmp_path / "merged", *options]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="not a finished run"):
        merging.weights_of(tmp_path)


def test_a_run_is_exported_whole_merged_or_by_replica(finished, tmp_path, capsys):
    folder, replicas = finished
    base = ["--checkpoint", folder, "--output"]
    assert run(convert_to_hf, [*base, tmp_path / "unclear"]) == 2
    assert "the checkpoint has 3 replicas" in capsys.readouterr().err
    assert run(convert_to_hf, [*base, tmp_path / "one", "--replica", 1]) == 0
    assert run(convert_to_hf, [*base, tmp_path / "mean", "--merge", "mean"]) == 0
    for name, part in (
        ("one", lambda key: replicas[1][key]),
        ("mean", lambda key: np.mean([r[key] for r in replicas], 0)),
    ):
        hub = convert.HubModel(tmp_path / name)
        for key in replicas[0]:
            np.testing.assert_allclose(hub.tensor(key).numpy(), part(key), rtol=1e-5, atol=1e-6)
    card = (tmp_path / "mean" / "README.md").read_text()
    assert 'the mean of 3 replicas after 7 inner steps of the run "test"' in card and "noloco, every 50" in card


def test_one_step_of_a_runs_checkpoints_is_exported_like_a_run(finished, tmp_path):
    folder, replicas = finished
    config = corpus.config(folder)
    step = tmp_path / "checkpoints" / "step_00000007"
    for replica, held in enumerate(replicas):
        tensors = {name: torch.from_numpy(array) for name, array in held.items()}
        facts = {"replica": replica, "config": config.to_json()}
        write_cut(step / f"replica_{replica:02d}", config.model, tensors, 2, 1, "master", **facts)
    assert run(convert_to_hf, ["--checkpoint", step, "--output", tmp_path / "mean", "--merge", "mean"]) == 0
    hub = convert.HubModel(tmp_path / "mean")
    for key in replicas[0]:
        np.testing.assert_allclose(hub.tensor(key).numpy(), np.mean([r[key] for r in replicas], 0), 1e-5, 1e-6)


def test_text_is_the_same_from_a_checkpoint_and_from_its_export(finished, tmp_path, capsys):
    folder, _ = finished
    weights = folder / "replica_01" / "weights"
    assert run(convert_to_hf, ["--checkpoint", weights, "--output", tmp_path / "hub"]) == 0
    capsys.readouterr()
    texts = []
    for source in (weights, tmp_path / "hub"):
        words = ["--prompt", "the outer step", "--tokens", 20, "--tokenizer", folder / "t.model"]
        assert run(generate, [source, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("the outer step") and len(texts[0]) > 20
    assert run(generate, [tmp_path / "hub", "--prompt", "x"]) == 0  # with the tokenizer that it holds
    assert run(generate, [weights, tmp_path / "hub", "--prompt", "x"]) == 2
    assert Tokenizer(tmp_path / "hub").encode("the").tolist() == Tokenizer(folder / "t.model").encode("the").tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"run": {"seed": 5}}, "run.seed: 0 against 5"),
        ({"run": {"name": "other"}}, "run.name: test against other"),
        ({"noloco": {"gamma": 0.6}}, "noloco.gamma: 0.7 against 0.6"),
        ({"gradient_clipping": 0.5}, "gradient_clipping: 1.0 against 0.5"),
        ({"step": 8}, "step: 7 against 8"),
        ({"model": {"ffn_hidden_size": 64}}, "ffn_hidden_size: 32 against 64"),
        ({"run": {"directory": "elsewhere", "log_every": 3}, "data": {"train": "elsewhere"}}, None),
    ],
)
def test_weights_of_different_runs_are_not_averaged_unasked(finished, tmp_path, capsys, change, message):
    from noloco_mega.model import hf

    folder, _ = finished
    raw = corpus.config(folder).to_json()
    facts = {"replica": 1, "step": change.pop("step", 7)}
    for block, settings in change.items():
        raw[block] = raw[block] | settings if isinstance(settings, dict) else settings
    config = configs.parse(raw)
    tensors = {row.ours: torch.empty(hf.shapes(row, config.model)[0]) for row in hf.table(config.model)}
    randomise(tensors.items())
    write_cut(tmp_path / "weights", config.model, tensors, 1, 1, **facts, config=raw)
    pair = [tmp_path / "weights", folder / "replica_00" / "weights"]
    words = [*pair, "--prompt", "the", "--tokens", 2, "--tokenizer", folder / "t.model"]
    told = message is not None
    assert run(generate, words) == (2 if told else 0)
    if told:
        written = capsys.readouterr().err
        assert all(str(place) in written for place in pair)
        assert message in written
    assert run(generate, [*words, "--any-runs"]) == (2 if "model" in change else 0)
    many = tmp_path / "run"
    for number, place in enumerate(pair):
        shutil.copytree(place, many / f"replica_{number:02d}" / "weights")
    command = ["--checkpoint", many, "--output", tmp_path / "hub", "--tokenizer", folder / "t.model"]
    assert run(convert_to_hf, [*command, "--merge", "mean"]) == (2 if told else 0)


def test_a_written_out_default_is_no_difference():
    one = configs.Model(
        vocab_size=8, hidden_size=8, num_layers=1, num_attention_heads=2, ffn_hidden_size=8, seq_length=4
    )
    same = configs.Model(**asdict(one) | {"num_query_groups": 2, "kv_channels": 4})
    assert merging.differences(one, same) == []
    assert merging.differences(one, configs.Model(**asdict(one) | {"num_layers": 2})) == ["num_layers: 1 against 2"]
