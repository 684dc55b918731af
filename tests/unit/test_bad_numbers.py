"""Who is suspected after losses that are not finite: a leader's count, with leaders and orders that only take notes."""

from types import SimpleNamespace

import pytest

from noloco_mega.comm.bad_numbers import BadNumbers
from noloco_mega.comm.terms import Terms


@pytest.fixture
def told():
    return []


@pytest.fixture
def orders():
    return []


def bad_numbers(told, orders, heals=True):
    terms = Terms(
        replica=1, replicas=3, site=(0, 1, 2), routes=True, heals=heals, columns=1, ranks=1,
        inner_steps=10, steps=100, heartbeat_seconds=1.0, form_seconds=1.0, host="127.0.0.1",
    )  # fmt: skip
    leaders = SimpleNamespace(broadcast=lambda kind, message: told.append((kind, message)))
    return BadNumbers(terms, leaders, SimpleNamespace(give=orders.append))


def test_two_ways_in_one_step_make_a_replica_look_at_its_weights_once(told, orders):
    count = bad_numbers(told, orders)
    count.heard(2, {"step": 7, "routes": [[0, 1], [0, 2]]})
    count.heard(2, {"step": 8, "routes": [[1, 2]]})
    assert not orders, "one bad microbatch may be the data's fault"
    count.heard(0, {"step": 7, "routes": [[1, 0]]})
    assert orders == [{"check": 7}]
    count.heard(0, {"step": 7, "routes": [[1, 0], [1, 2]]})
    assert orders == [{"check": 7}]


def test_what_is_seen_here_counts_here_and_is_told_to_all(told, orders):
    bad_numbers(told, orders).seen(3, [(1, 1), (1, 0)])
    assert told == [("bad", {"step": 3, "routes": [[1, 1], [1, 0]]})] and orders == [{"check": 3}]


def test_who_can_not_take_over_a_state_does_not_look(told, orders):
    bad_numbers(told, orders, heals=False).seen(3, [(1, 1), (1, 0)])
    assert told and not orders
