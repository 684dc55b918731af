"""Waiting times against closed forms and against a message-by-message simulation of events; bytes against counting."""

import itertools
import math

import numpy as np
import pytest

from noloco_mega import config as configs
from noloco_mega.findings import _link_table
from noloco_mega.lab import latency, traffic
from tests.unit.test_configs import FOLDER

CONSTANT = latency.LogNormal(math.log(3.0), 0.0)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
def test_a_pair_takes_what_the_closed_form_says(sigma):
    times = latency.LogNormal(0.3, sigma)
    samples = latency.pair_seconds(times, np.random.default_rng(0), 1_000_000)
    assert samples.mean() == pytest.approx(latency.expected_pair(times), rel=0.01)


@pytest.mark.parametrize("replicas, levels", [(2, 1), (3, 1), (8, 3), (13, 3), (64, 6), (4096, 12)])
def test_a_tree_without_variance_takes_two_messages_per_level(replicas, levels):
    """In a binomial tree replica r is as many messages from the root as its number has binary ones."""
    seconds = latency.tree_seconds(CONSTANT, replicas, np.random.default_rng(0), 2)
    assert levels == max(bin(replica).count("1") for replica in range(replicas))
    assert seconds == pytest.approx(2 * 3.0 * levels)
    # Figure 5A's ratio counts a pair as two messages: log2 N.
    pair = latency.pair_seconds(CONSTANT, np.random.default_rng(0), 2)
    assert seconds / (2 * pair) == pytest.approx(levels)


class Scripted:
    """The times 1, 2, 3, ... in the order in which they are asked for, the same in every sample."""

    def __init__(self):
        self.clock = itertools.count(1)

    def draw(self, random, shape):
        row = np.array([next(self.clock) for _ in range(shape[1])], dtype=float)
        return np.broadcast_to(row, shape)


def test_a_tree_of_three_message_by_message():
    # Up: 1 -> 0 takes 1, then 2 -> 0 takes 2 (started at once): the total is there at 2. Down: 0 -> 2 takes 3, so 2
    # has it at 5; 0 -> 1 takes 4, so 1 has it at 6.
    assert latency.tree_seconds(Scripted(), 3, np.random.default_rng(0), 2).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("share, expected", [(0.0, 2 * 7 / 8 * 3.0), (1.0, 2 * 7 * 3.0)])
def test_a_ring_without_variance(share, expected):
    assert latency.ring_seconds(CONSTANT, 8, np.random.default_rng(0), 2, share) == pytest.approx(expected)


def test_a_ring_waits_for_its_slowest_link():
    class SlowLink:
        def draw(self, random, shape):
            found = np.ones(shape)
            found[:, 0] = 10.0
            return found

    # Six messages one after the other over that link; the last of them ends the all-reduce.
    assert latency.ring_seconds(SlowLink(), 4, np.random.default_rng(0), 1, 1.0).tolist() == [60.0]


def test_no_barrier_saves_a_fifth_as_in_the_paper():
    """ln t ~ N(1, 0.5), N = 1024, H = 100: about 20 %."""
    found = latency.waiting(latency.LogNormal(1.0, 0.5**0.5), 1024, 100, outer_steps=20, seed=0)
    assert 0.13 < 1 - found.pairs / found.barrier < 0.23
    assert found.alone == pytest.approx(100 * math.exp(1.25), rel=0.01)


def test_waiting_without_variance_costs_nothing():
    found = latency.waiting(CONSTANT, 8, 5, outer_steps=3, seed=0)
    assert (found.barrier, found.pairs, found.alone) == pytest.approx((15.0, 15.0, 15.0))


def test_waiting_in_pairs_of_two_is_a_barrier():
    found = latency.waiting(latency.LogNormal(0.0, 1.0), 2, 5, outer_steps=50, seed=0)
    assert found.pairs == pytest.approx(found.barrier)


def test_measured_times_are_read(tmp_path):
    path = tmp_path / "times"
    path.write_text("[0.5, 1, 2.25]")
    assert latency.read_times(path).seconds == (0.5, 1.0, 2.25)
    links = [
        {"from": 0, "to": n, "latency_seconds": 0.001 * n, "there_gbit": n, "back_gbit": 1, "clock_seconds": 0.1}
        for n in (1, 12)
    ]
    path.write_text("some report\n\n" + _link_table(links) + "\nverdict")
    assert sorted(latency.read_times(path).seconds) == pytest.approx([0.001, 0.012])
    drawn = latency.read_times(path).draw(np.random.default_rng(0), (1000,))
    assert set(drawn.round(6)) == {0.001, 0.012}
    for text in ("[]", "[1, -1]", '["1"]', "{}", "no times here", "[true]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="neither a JSON list"):
            latency.read_times(path)


@pytest.mark.parametrize("name", ["small_noloco_random_8x2", "medium_noloco_random_16x4", "large_noloco_random_16x4"])
def test_the_papers_runs_send_ten_to_fifty_times_less_than_fully_sharded_ones(name):
    config = configs.load(FOLDER / f"{name}.json")
    found = traffic.compare(config)
    assert 10 < found.ratio < 50 < found.outer_ratio
    model, n, s = config.model, config.topology.replicas, config.topology.stages
    h = model.hidden_size
    parameters = 2 * model.vocab_size * h + h + model.num_layers * (4 * h * h + 3 * h * model.ffn_hidden_size + 2 * h)
    assert found.fully_sharded == 3 * (n * s - 1) * parameters * 2
    assert found.outer == n * parameters * 4 / 50
    tokens = config.micro_batch_size * config.microbatches * 1024
    assert found.routes == n * 2 * (s - 1) * tokens * h * 2


def test_a_run_without_outer_exchange_has_nothing_to_compare():
    with pytest.raises(ValueError, match="sends nothing"):
        traffic.compare(configs.load(FOLDER / "demo_local_random_4x2.json"))
