"""A short form of the chaos test (tests/chaos): six events strike a run, which goes on."""

import pytest

from tests.chaos import plan
from tests.chaos.network import missing
from tests.chaos.run import ENDLESS, SETTINGS, strike


@pytest.mark.parametrize("seed, count", [(24, 6), (1, 20), (2, 20), (3, 20)])
def test_a_plan_leaves_two_replicas_alone_at_any_time(seed, count):
    events = plan.draw(seed, count, 4, 2)
    assert events == plan.draw(seed, count, 4, 2) and len(events) == count
    dead, busy, taken = set(), set(), set()
    for event in events:
        if event.kind == "restart":
            dead.remove(event.replica)
        else:
            assert not event.hits() & (dead | busy), "only who is well is struck"
        if event.kind == "kill":
            dead.add(event.replica)
        out = set() if event.kind == "part" else event.hits()
        assert len(dead | taken | out) <= 2, "two replicas train on, whatever happens"
        busy, taken = set(event.hits()), set(out)
    assert not dead and {event.kind for event in events} == set(plan.KINDS)


@pytest.mark.timeout(900)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_six_blows_end_nobody_else(tiny, tmp_path):
    strike(tiny(run__steps=ENDLESS, **SETTINGS), plan.draw(24, 6, 4, 2), tmp_path / "struck")
