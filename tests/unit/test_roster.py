"""What a leader knows of the others from what they say, and from their silence."""

import time

import pytest

from noloco_mega.comm.roster import Roster, Standing

HERE = ("127.0.0.1", 1)


def standing(incarnation=1, beat=1, **more):
    return Standing(incarnation=incarnation, beat=beat, ranks=(HERE,), **{"ready": True, **more})


@pytest.fixture
def refused():
    return {}


@pytest.fixture
def roster(refused):
    return Roster(0, standing(), heartbeat_seconds=0.05, refused=refused)


def test_a_standing_survives_its_message():
    one = standing(step=7, launched=2, circuit=9, highest_circuit=11, present=3, well=False, sound=False)
    assert Standing.of(one.message()) == one


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"standing": []},
        {"standing": {"ranks": [["h", 1]]}},
        {"standing": {**standing().message()["standing"], "launched": float("inf")}},
        {"standing": {**standing().message()["standing"], "step": 1 << 70}},
        {"standing": {**standing().message()["standing"], "ranks": [["h"]]}},
    ],
)
def test_what_is_no_standing_is_refused(message):
    with pytest.raises(ValueError):
        Standing.of(message)


def test_beats_that_were_overtaken_and_processes_from_before_are_dropped(roster):
    assert roster.hear(1, standing(incarnation=5, beat=3, step=30))
    assert not roster.hear(1, standing(incarnation=5, beat=2, step=20))
    assert not roster.hear(1, standing(incarnation=4, beat=9, step=90))
    assert roster.standing(1).step == 30
    assert roster.hear(1, standing(incarnation=6, beat=1, step=10)), "it was started again"


def test_a_restart_on_a_machine_whose_clock_is_behind_is_heard_once_the_first_is_dead(roster, refused):
    roster.hear(1, standing(incarnation=5))
    refused[1] = HERE
    assert roster.hear(1, standing(incarnation=2)) and 1 in roster.able()


def test_silence_refusal_illness_and_farewell_take_a_replica_out(roster, refused):
    for replica in range(1, 6):
        roster.hear(replica, standing())
    refused[1] = HERE
    roster.hear(2, standing(beat=2, well=False))
    roster.hear(3, standing(beat=2, sound=False))
    roster.hear(4, standing(beat=2, leaving=True))
    roster.hear(5, standing(beat=2, ready=False))
    assert set(roster.dead()) == {1, 2, 3, 4} and roster.able() == (0,)
    time.sleep(0.3)
    assert "nothing was heard" in roster.dead()[5]
    roster.forgive()
    assert 5 not in roster.dead(), "this process had not run itself"


def test_how_long_partners_wait(roster, refused):
    roster.hear(1, standing(launched=3))
    roster.hear(2, standing(launched=4))
    time.sleep(0.05)
    roster.hear(1, standing(beat=2, launched=3))
    assert roster.waits((1,), 3) >= 0.05, "counted from when it began, not from the last beat"
    assert roster.waits((1,), 4) == 0.0, "it has not come there"
    assert roster.waits((1,), 2) is None and roster.waits((1, 2), 3) >= 0.05
    refused[1] = HERE
    assert roster.waits((1,), 3) == 0.0 and roster.waits((1,), 2) == 0.0, "a dead one hurries nobody"
    assert roster.furthest() == 4
