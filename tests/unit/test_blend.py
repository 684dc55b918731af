"""Blends against a plain list of samples, and through the loader, the config and the tools."""

import dataclasses
import json

import numpy as np
import pytest

from noloco_mega import config as configs
from noloco_mega.data import token_files
from noloco_mega.data.blend import Blend
from noloco_mega.data.dataset import Dataset
from noloco_mega.data.loader import open_loader
from noloco_mega.plan import views
from tests import corpus
from tests.unit.test_hf import run
from tools import evaluate
from tools.preprocess_data import preprocess

SEQ = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three token files of 30, 20 and 5 samples whose ids tell them apart, two for validation, and a tokenizer."""
    folder = tmp_path_factory.mktemp("blend")
    corpus.write_tokenizer(folder / "t.model", corpus.texts(300))
    for number, (name, samples) in enumerate({"train": 30, "b": 20, "c": 5, "valid": 24, "other": 24}.items()):
        ids = np.random.default_rng(number).integers(70 * number, 70 * number + 70, samples * SEQ + 1)
        corpus.write_tokens(folder / name, [ids.tolist()])
    return folder


def parts(folder):
    return [Dataset(folder / name, SEQ) for name in ("train", "b", "c")]


def test_an_epoch_holds_every_sample_and_the_shares(folder):
    sets = parts(folder)
    blend = Blend(sets, [0.5, 0.2, 0.3])
    # 20 samples are to be a fifth: 100 in all, and each of the 5 is there 6 times.
    assert blend.counts == [50, 20, 30] and len(blend) == 100
    expected = [sets[i][k % len(sets[i])] for i, count in enumerate(blend.counts) for k in range(count)]
    order = np.random.default_rng(0).permutation(len(blend))
    np.testing.assert_array_equal(blend.read(order), np.array(expected)[order])
    assert blend.read(np.array([7])).dtype == np.int64
    seen = {row.tobytes() for row in np.array(expected)}
    assert seen == {part[k].tobytes() for part in sets for k in range(len(part))}


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.1, 0.2, 0.7], [3e-3, 5, 1e-2], [1 / 3, 1 / 7, 1 - 1 / 3 - 1 / 7]])
def test_shares_are_kept_to_one_sample(folder, weights):
    blend = Blend(parts(folder), weights)
    for part, count, weight in zip(parts(folder), blend.counts, weights, strict=True):
        assert len(part) <= count
        assert abs(count - len(blend) * weight / sum(weights)) <= len(weights)
    assert any(count == len(part) for part, count in zip(parts(folder), blend.counts, strict=True))


def test_the_digest_sees_weights_and_files(folder):
    sets = parts(folder)
    digests = {Blend(sets, weights).digest() for weights in ([1, 1, 1], [1, 1, 2], [2, 1, 1])}
    assert len(digests | {Blend(sets[::-1], [1, 1, 1]).digest()}) == 4
    assert Blend(sets, [2, 2, 2]).digest() == Blend(sets, [1, 1, 1]).digest()


def blended(folder, **changes):
    raw = corpus.config(folder).to_json()
    shares = {str(folder / "b"): 0.2, str(folder / "c"): 0.3}
    raw["data"] |= {"blend": shares, "valid_domains": {"other": str(folder / "other")}} | changes
    return raw


def test_a_run_reads_the_blend_in_its_shares(folder):
    config = configs.parse(blended(folder))
    loader = open_loader(config, views.initial(4))
    steps = range(5)  # of 4 replicas x 4 samples: 80 of the epoch's 100
    rows = [loader.train(step, m, replica) for step in steps for m in range(2) for replica in range(4)]
    first = np.concatenate([batch.tokens[:, 0].numpy() for batch in rows])
    counts = np.bincount(first // 70, minlength=3)
    assert counts.sum() == 80 and (np.abs(counts - 0.8 * np.array([50, 20, 30])) <= 8).all()
    plain = open_loader(configs.parse(blended(folder, blend={})), views.initial(4))
    assert loader.digest() != plain.digest()
    assert loader.valid(0, "other").tokens.min() >= 280 > loader.valid(0).tokens.max()
    without = open_loader(configs.parse(blended(folder, valid_domains={})), views.initial(4))
    assert loader.digest() == without.digest()
    raw = blended(folder)
    raw["run"]["eval_microbatches"], raw["data"]["valid_domains"] = 3, {"few": str(folder / "c")}
    with pytest.raises(ValueError, match=r"need 6 samples, but .*/c has 5"):
        open_loader(configs.parse(raw), views.initial(4))


@pytest.mark.parametrize(
    "blend, message",
    [
        ({"b": 0.5, "c": 0.5}, "add up to 1, which leaves nothing for data.train"),
        ({"b": 0.0}, "greater than 0"),
        ({"SELF": 0.5}, "which is data.train itself"),
    ],
)
def test_blends_that_cannot_be(folder, blend, message):
    raw = blended(folder)
    raw["data"]["blend"] = {raw["data"]["train"] if name == "SELF" else name: share for name, share in blend.items()}
    with pytest.raises(configs.ConfigError) as caught:
        configs.parse(raw)
    assert message in str(caught.value)


def test_every_domain_is_evaluated(folder, tmp_path, capsys):
    import torch

    from noloco_mega.model import hf
    from tests.unit.test_hf import randomise, write_cut

    config = configs.parse(blended(folder))
    tensors = {row.ours: torch.empty(hf.shapes(row, config.model)[0]) for row in hf.table(config.model)}
    randomise(tensors.items())
    facts = {"replica": 0, "config": config.to_json()}
    write_cut(tmp_path / "run" / "replica_00" / "weights", config.model, tensors, 1, 1, **facts)
    assert run(evaluate, [tmp_path / "run", "--json", tmp_path / "j.json"]) == 0
    result = json.loads((tmp_path / "j.json").read_text())
    swapped = dataclasses.replace(config, data=dataclasses.replace(config.data, valid=str(folder / "other")))
    from noloco_mega import merging

    expected = merging.loss_of(swapped, open_loader(swapped, views.initial(1)), tensors.__getitem__)
    assert result["domains"]["other"]["replicas"]["0"] == pytest.approx(expected, rel=1e-6)
    assert result["domains"]["other"]["mean_of_weights"] != pytest.approx(result["mean_of_weights"], rel=1e-3)
    assert "other: validation loss replica 0" in capsys.readouterr().out


def test_three_splits_hold_every_document_once(folder, tmp_path):
    texts = corpus.texts(400)
    source = corpus.write_jsonl(tmp_path / "c.jsonl", texts)
    options = {"valid_fraction": 0.2, "test_fraction": 0.3}
    prefixes = preprocess([source], folder / "t.model", str(tmp_path / "out"), **options)
    assert [prefix.rsplit("_", 1)[1] for prefix in prefixes] == ["train", "valid", "test"]
    counts = [
        json.loads((tmp_path / f"out_{name}.json").read_text())["documents"] for name in ("train", "valid", "test")
    ]
    assert sum(counts) == len(texts)
    assert abs(counts[1] / len(texts) - 0.2) < 0.07 and abs(counts[2] / len(texts) - 0.3) < 0.08
    # The validation set is the same whether a test set is taken out or not.
    preprocess([source], folder / "t.model", str(tmp_path / "two"), valid_fraction=0.2)
    assert (tmp_path / "two_valid.bin").read_bytes() == (tmp_path / "out_valid.bin").read_bytes()
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\), also together"):
        preprocess([source], folder / "t.model", str(tmp_path / "x"), valid_fraction=0.5, test_fraction=0.5)
    assert token_files.state(prefixes[2], "other") == "outdated"
