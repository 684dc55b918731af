"""Validation data by domain, evaluated while a run trains."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from noloco_mega import config as configs
from noloco_mega import merging
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import open_loader
from noloco_mega.plan import views
from tests.e2e.runs import rows_of, run


def test_each_domain_is_evaluated_whenever_the_validation_data_is(tiny, tmp_path, text_data):
    domains = {"same": text_data["valid"], "seen": text_data["train"]}
    common = {"topology": {"replicas": 2, "stages": 2}, "run__steps": 6, "run__eval_every": 3}
    raw = tiny(data=text_data | {"valid_domains": domains}, run__tensorboard=True, **common)
    rows = run(raw, tmp_path)
    for row in rows:
        if row["val_loss"] is None:
            assert row["val_loss_by_domain"] is None
        else:
            assert list(row["val_loss_by_domain"]) == list(domains)
            assert row["val_loss_by_domain"]["same"] == row["val_loss"] != row["val_loss_by_domain"]["seen"]
    assert {row["step"] for row in rows if row["val_loss_by_domain"]} == {0, 3, 6}
    config = configs.parse(raw)
    loader = open_loader(config, views.initial(1))
    for replica in range(2):
        weights = SavedReplica(config.replica_folder(replica) / "weights")
        (last,) = [row for row in rows_of(raw) if row["replica"] == replica and row["step"] == 6]
        expected = merging.loss_of(config, loader, weights.tensor, "seen")
        assert last["val_loss_by_domain"]["seen"] == pytest.approx(expected, rel=1e-5)
        events = EventAccumulator(str(config.replica_folder(replica)))
        events.Reload()
        scalars = {event.step: event.value for event in events.Scalars("val_loss_by_domain/seen")}
        assert scalars.keys() == {0, 3, 6} and scalars[6] == pytest.approx(expected, rel=1e-5)
