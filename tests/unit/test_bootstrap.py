"""What must be equal in all replicas of a run, and what may differ."""

import pytest

from noloco_mega.comm.membership import refuse_differences
from noloco_mega.config import parse
from noloco_mega.gathering import run_id
from tests.unit.test_config import changed

VERSIONS = {"python": "3.11.2", "torch": "2.13.0"}
SAME = {"versions": VERSIONS, "config": "c", "data": "d", "theta0": "t"}


def test_paths_and_logging_may_differ_between_replicas():
    one = parse(changed())
    assert run_id(one) == run_id(
        parse(changed(data__train="/elsewhere/x", run__log_every=3, run__directory="/scratch", run__eval_every=5))
    )


@pytest.mark.parametrize(
    "change",
    [
        {"noloco__seed": 1},
        {"noloco__gamma": 0.6},
        {"run__seed": 1},
        {"run__steps": 11},
        {"optimizer__params__lr": 2e-3},
        {"topology__replicas": 2},
        {"model__num_layers": 2},
        {"train_micro_batch_size_per_gpu": 2},
    ],
)
def test_everything_else_may_not(change):
    assert run_id(parse(changed(**change))) != run_id(parse(changed()))


@pytest.mark.parametrize(
    "key, message", [("config", "another configuration"), ("data", "other token files"), ("theta0", "initial weights")]
)
def test_a_replica_that_does_not_belong_is_named(key, message):
    refuse_differences(0, SAME, {0: SAME, 1: SAME})
    with pytest.raises(ValueError, match=f"replica 0 and replica 2 do not belong together: .*{message}"):
        refuse_differences(0, SAME, {0: SAME, 1: SAME, 2: {**SAME, key: "other"}})


def test_other_versions_are_named_with_both_numbers():
    other = {**SAME, "versions": {**VERSIONS, "torch": "2.12.1"}, "theta0": "other"}
    with pytest.raises(ValueError, match=r"replica 0 and replica 3 run .* torch 2\.13\.0 against 2\.12\.1"):
        refuse_differences(0, SAME, {0: SAME, 3: other})
