"""The commands of `python -m noloco_mega` end with the status of what they ran."""

import pytest

from noloco_mega import cli, train
from noloco_mega.entry import TRY_AGAIN

CONFIG = "configs/demo_noloco_random_4x2.json"


@pytest.mark.parametrize("status", [0, TRY_AGAIN])
def test_a_rank_that_leaves_ends_with_the_loops_status(monkeypatch, status):
    places = []
    monkeypatch.setattr(train, "train", lambda config, launch, place: places.append(place) or status)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "NOLOCO_REPLICA": 3}.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["train", "--config", CONFIG]) == status
    assert [(place.replica, place.stage) for place in places] == [(3, 1)]
