"""A run that starts from an imported model: its first evaluation is that model's, and it trains on from there."""

import json
import shutil
from dataclasses import asdict

import pytest

from noloco_mega import config as configs
from noloco_mega import convert, merging
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import open_loader
from noloco_mega.plan import views
from tests.e2e.runs import run, values
from tests.unit.test_hf import SHAPE, hub_model


def test_training_goes_on_from_an_imported_model(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPE, "vocab_size", 512)
    hub_model("qwen3", tmp_path / "hub")
    model, _ = convert.import_model(tmp_path / "hub", tmp_path / "start")
    block = json.loads(json.dumps({key: value for key, value in asdict(model).items() if value is not None}))
    raw = tiny(
        topology={"replicas": 2, "stages": 2}, model=block | {"seq_length": 32}, run__init_from=str(tmp_path / "start"),
        run__steps=10, run__save_every=10,
    )  # fmt: skip
    rows = run(raw, tmp_path)
    config = configs.parse(raw)
    loader = open_loader(config, views.initial(2))
    expected = merging.loss_of(config, loader, SavedReplica(tmp_path / "start").tensor)
    for replica in (0, 1):
        losses = values(rows, "val_loss", replica)
        assert losses[0] == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    trained = SavedReplica(config.output / "replica_00" / "weights")
    assert convert.origin_of(trained)["architecture"] == "qwen3"

    # Its checkpoint holds all that it needs to go on.
    shutil.rmtree(tmp_path / "start")
    raw["run"] |= {"steps": 12, "resume": "auto"}
    assert run(raw, tmp_path)[-1]["step"] == 12
