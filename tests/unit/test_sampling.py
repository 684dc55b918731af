"""The order of samples, against brute force: every sample once per epoch, whatever happens to the replicas."""

import itertools
import math

import numpy as np
import pytest

from noloco_mega.plan import keys, sampling
from noloco_mega.plan.views import View
from tests.unit.chi_square import assert_uniform


def whole(key, length):
    return sampling.shuffled(key, np.arange(length), length)


def test_every_length_is_shuffled_onto_itself():
    for length in [*range(1, 300), 1023, 1024, 1025, 4097, 65536, 99991, 250_000]:
        assert np.array_equal(np.sort(whole(keys.key("any", length), length)), np.arange(length)), length


@pytest.mark.parametrize("length", [10**9 + 7, 2**40, 2**62 - 1, 2**62])
def test_long_data_sets_give_distinct_samples_in_range(length):
    for start in (0, length // 3, length - 50_000):
        chosen = sampling.shuffled(keys.key("long"), np.arange(start, start + 50_000), length)
        assert chosen.min() >= 0 and chosen.max() < length
        assert len(np.unique(chosen)) == len(chosen)


def test_a_place_does_not_depend_on_what_else_is_asked():
    key, length = keys.key("alone"), 1000
    everything = whole(key, length)
    for place in (0, 17, 999):
        assert sampling.shuffled(key, np.array([place]), length)[0] == everything[place]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_permutations_of_a_small_data_set_are_equally_likely(length):
    number = {order: i for i, order in enumerate(itertools.permutations(range(length)))}
    draws = 40 * math.factorial(length)
    counts = np.zeros(len(number))
    for draw in range(draws):
        counts[number[tuple(whole(keys.key("small", draw), length).tolist())]] += 1
    assert_uniform(counts)


@pytest.mark.parametrize("length", [900, 901, 1000])
def test_places_neighbours_and_epochs_are_independent(length):
    cells = 10
    place_value, neighbours, epochs = (np.zeros((cells, cells)) for _ in range(3))
    previous = None
    for draw in range(60):
        order = whole(keys.key("independent", draw), length) * cells // length
        np.add.at(place_value, (np.arange(length) * cells // length, order), 1)
        np.add.at(neighbours, (order[:-1:2], order[1::2]), 1)
        if previous is not None:
            np.add.at(epochs, (previous, order), 1)
        previous = order
    for table in (place_value, neighbours, epochs):
        assert_uniform(table.ravel() * 1.0, expected=table.sum() / cells**2)


def test_each_epoch_has_its_own_order():
    log = [View(0, (0,))]
    first, second = (
        np.concatenate([sampling.samples(log, step, 0, 0, 4, 4, 4000, 1) for step in range(e * 1000, (e + 1) * 1000)])
        for e in (0, 1)
    )
    assert np.array_equal(np.sort(first), np.sort(second))
    # Two independent permutations agree at one place on average, whatever their length.
    assert (first == second).sum() < 8


LOGS = {
    "undisturbed": [View(0, (0, 1, 2, 3))],
    "one dies, two join": [View(0, (0, 1, 2, 3)), View(5, (0, 2, 3)), View(9, (0, 2, 3, 4, 7))],
    "a view that never came into force": [View(0, (0, 1)), View(6, (1,)), View(6, (0, 1, 2))],
}


def consumed(log, steps, replica_batch, length, seed):
    """What the whole run reads, in the plan's order, by walking through all steps and asking replica by replica."""
    read = []
    for step in range(steps):
        members = [view.members for view in log if view.from_step <= step][-1]
        for replica in sorted(members):
            read += sampling.samples(log, step, replica, 0, replica_batch, replica_batch, length, seed).tolist()
    return read


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
@pytest.mark.parametrize("length", [7, 24, 1000])
def test_the_run_reads_every_sample_once_per_epoch(log, length):
    read = consumed(log, steps=20, replica_batch=6, length=length, seed=3)
    for start in range(0, len(read) - length + 1, length):
        assert sorted(read[start : start + length]) == list(range(length))
    rest = read[len(read) // length * length :]
    assert len(set(rest)) == len(rest)


def test_a_longer_run_and_later_views_leave_the_past_alone():
    log = LOGS["one dies, two join"]
    assert consumed(log[:2], 9, 6, 1000, 3) == consumed(log, 9, 6, 1000, 3)
    assert consumed(log, 9, 6, 1000, 3) == consumed(log, 20, 6, 1000, 3)[: len(consumed(log, 9, 6, 1000, 3))]


def test_the_cut_of_a_replica_does_not_matter():
    log = [View(0, (0, 1, 2))]
    together = sampling.samples(log, 11, 1, 0, 24, 24, 100, 5)
    for micro_batch in (1, 2, 3, 8):
        pieces = [sampling.samples(log, 11, 1, first, micro_batch, 24, 100, 5) for first in range(0, 24, micro_batch)]
        assert np.array_equal(np.concatenate(pieces), together)


def test_seeds_differ():
    log = [View(0, (0,))]
    a, b = (sampling.samples(log, 0, 0, 0, 500, 500, 10**6, seed) for seed in (0, 1))
    assert not np.intersect1d(a, b).size > 5


def test_a_replica_outside_the_view_is_our_own_mistake():
    with pytest.raises(AssertionError, match="replica 1 takes no part"):
        sampling.samples([View(0, (0, 2))], 3, 1, 0, 1, 4, 100, 0)


def test_golden_values():
    """Checkpoints resume in the middle of this order: another value is another data order for every old run."""
    log = LOGS["one dies, two join"]
    assert sampling.position(log, 9, 4, 6) == (5 * 4 + 4 * 3 + 3) * 6
    assert sampling.samples(log, 9, 4, 1, 5, 6, 100, 42).tolist() == [70, 8, 81, 59, 87]
    assert sampling.samples(log, 9, 4, 1, 5, 6, 10**12, 42).tolist() == [
        693749261185,
        68147711709,
        805841991212,
        919837619981,
        991967337756,
    ]
