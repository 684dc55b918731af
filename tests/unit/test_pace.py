"""How long a transfer may take, on a clock that the test moves."""

from types import SimpleNamespace

import pytest

from noloco_mega.comm import pace
from noloco_mega.comm.pace import FACTOR, Pace, Speeds


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_the_allowance_follows_the_partner_then_the_slowest_other_one_inside_its_bounds():
    speeds = Speeds()
    assert speeds.allowance(1, 10**9, 10, 300) == 300, "nothing is known"
    speeds.measured(1, 800, 2.0)
    speeds.measured(2, 800, 8.0)
    speeds.measured(2, 800, 4.0)
    assert speeds.allowance(1, 4_000, 1, 300) == FACTOR * 10
    assert speeds.allowance(2, 4_000, 1, 300) == speeds.allowance(3, 4_000, 1, 300) == FACTOR * 20
    assert speeds.allowance(1, 4_000, 50, 300) == 50 and speeds.allowance(1, 4_000, 1, 30) == 30
    assert speeds.allowance(1, 4_000, 50, 30) == 30, "the cap is the caller's word"
    assert speeds.allowance(1, 0, 10, 300) == 10, "nothing to send"


def test_an_overrun_doubles_the_next_allowance_and_a_success_measures_anew():
    speeds = Speeds()
    speeds.measured(1, 1_000, 1.0)
    for expected in (4, 8, 16, 32):
        allowed = speeds.allowance(1, 1_000, 1, 30)
        assert allowed == min(expected, 30)
        speeds.overran(1, 1_000, allowed)
    speeds.measured(1, 1_000, 5.0)
    assert speeds.allowance(1, 1_000, 1, 30) == 20


def test_silence_ends_a_transfer_sooner_the_faster_it_was(clock):
    channel = SimpleNamespace(deadline=None, on_moved=None)
    running = Pace(channel, allowed_seconds=100.0, patience_seconds=10.0)
    assert channel.deadline == 110.0 and running.ends == 200.0
    clock.now = 104.0
    channel.on_moved()
    assert channel.deadline == 114.0
    clock.now = 130.0
    channel.on_moved()
    assert channel.deadline == 160.0, "as long again as it has run"
    clock.now = 170.0
    channel.on_moved()
    assert channel.deadline == 200.0 and not running.overran()
    clock.now = 200.0
    assert running.overran() and running.seconds() == 100.0
