"""Random streams, routes, pairs, views and stability: what every process must agree on without talking."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import noloco_mega
from noloco_mega.plan import keys, pairing, routing, stability, views
from noloco_mega.plan.views import View
from tests.unit.chi_square import assert_uniform


def plan(seed):
    """A sample of everything that is drawn, as plain numbers."""
    routes = routing.RandomRoutes(seed, [5, 1, 0, 2])
    places = [(0, 0, 0), (0, 1, 0), (1, 0, 1)]
    return {
        "key": hex(keys.key(seed, "route", 3)),
        "raw": [int(word) for word in keys.raw(keys.key(seed, "route", 3), 2)],
        "permutation": keys.permutation(keys.key(seed, "route", 3), 8).tolist(),
        "routes": [[routes.forward(*place, replica) for replica in (0, 1, 2, 5)] for place in places],
        "pairs": [pairing.groups(seed, outer_step, {4, 2, 0, 1, 3}, 2) for outer_step in range(3)],
        "triples": pairing.groups(seed, 0, range(8), 3),
    }


GOLDEN = {
    "key": "0x42c4fc187e2473e17df0ecd1577ff15b",
    "raw": [17103193783213052106, 11150714314493977267],
    "permutation": [7, 3, 5, 6, 2, 1, 4, 0],
    "routes": [[5, 2, 1, 0], [1, 5, 2, 0], [2, 5, 0, 1]],
    "pairs": [[(0, 2), (1, 3), (4,)], [(0, 4), (1, 3), (2,)], [(0, 1), (2,), (3, 4)]],
    "triples": [(0, 4, 7), (1, 3, 5), (2, 6)],
}


def test_golden_values():
    """Replicas of different versions must not train together if these change; checkpoints do not resume exactly."""
    assert plan(7) == GOLDEN


def test_another_process_draws_the_same_plan():
    program = "import json; from tests.unit.test_keys_and_plan import plan; print(json.dumps(plan(7)))"
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(noloco_mega.__file__).parent.parent)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=60
    )
    assert json.loads(answer.stdout) == json.loads(json.dumps(plan(7)))


# ------------------------------------------------------------------------------------------------------------ keys


def test_words_of_a_key_do_not_run_together():
    alike = [("a", "bc"), ("ab", "c"), ("abc",), (1, 23), (12, 3), (123,), ("1", 23), (1, "23"), ("int:1", 23), ()]
    assert len({keys.key(*words) for words in alike}) == len(alike)
    with pytest.raises(AssertionError, match="ints and strings"):
        keys.key(True)


def test_permutations_are_uniform():
    number = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    counts = np.zeros(24)
    for draw in range(24 * 50):
        counts[number[tuple(keys.permutation(keys.key("uniform", draw), 4).tolist())]] += 1
    assert_uniform(counts)


# ---------------------------------------------------------------------------------------------------------- routes

MEMBERS = (0, 2, 3, 7, 8)


def test_a_route_is_a_bijection_and_backward_its_inverse():
    routes = routing.RandomRoutes(1, MEMBERS)
    for place in itertools.product(range(6), range(5), range(3)):
        receivers = [routes.forward(*place, replica) for replica in MEMBERS]
        assert sorted(receivers) == list(MEMBERS)
        assert [routes.backward(*place, receiver) for receiver in receivers] == list(MEMBERS)


def test_the_origin_is_where_the_sample_was_read():
    """Walk every sample forward from its first stage, and ask at each stage where it came from."""
    for routes in (routing.RandomRoutes(2, MEMBERS), routing.IdentityRoutes()):
        for step, microbatch, replica in itertools.product(range(4), range(5), MEMBERS):
            at = replica
            for stage in range(5):
                assert routes.origin(step, microbatch, stage, at) == replica
                at = routes.forward(step, microbatch, stage, at)


def test_identity_routes_stay():
    routes = routing.IdentityRoutes()
    assert [routes.forward(9, 8, 7, r) for r in MEMBERS] == [routes.backward(9, 8, 7, r) for r in MEMBERS] == [*MEMBERS]


def test_routes_are_uniform_and_independent_over_steps_microbatches_and_boundaries():
    size, draws = 4, 900
    routes = routing.RandomRoutes(3, range(size))
    number = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    orders = np.zeros(len(number))
    along = {axis: np.zeros((size, size)) for axis in range(3)}
    for draw in range(draws):
        # Odd places only, so that a place and its neighbour along an axis are not counted twice.
        place = (2 * (draw % 15), 2 * (draw // 15 % 10), 2 * (draw // 150))
        orders[number[tuple(routes.forward(*place, replica) for replica in range(size))]] += 1
        for axis, table in along.items():
            other = [*place]
            other[axis] += 1
            table[routes.forward(*place, 1), routes.forward(*other, 1)] += 1
    for counts in (orders, *along.values()):
        assert_uniform(counts)


def test_routes_differ_by_seed_and_by_members():
    def drawn(seed, members):
        routes = routing.RandomRoutes(seed, members)
        return [routes.forward(step, 0, 0, replica) for step in range(20) for replica in (0, 2, 3)]

    assert drawn(0, (0, 2, 3)) != drawn(1, (0, 2, 3))
    assert drawn(0, (0, 2, 3)) == drawn(0, (3, 0, 2))


# ----------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_groups_partition_the_members(size, group_size):
    members = [10 + 3 * i for i in range(size)]
    for outer_step in range(30):
        groups = pairing.groups(5, outer_step, members, group_size)
        assert sorted(replica for group in groups for replica in group) == members
        sizes = sorted((len(group) for group in groups), reverse=True)
        whole, rest = divmod(size, group_size)
        assert sizes == [group_size] * whole + [rest] * bool(rest)
        for group in groups:
            for replica in group:
                others = tuple(sorted(set(group) - {replica}))
                assert pairing.partners(5, outer_step, reversed(members), group_size, replica) == others


@pytest.mark.parametrize(("size", "group_size"), [(5, 2), (7, 3), (8, 3)])
def test_everybody_is_left_over_equally_often(size, group_size):
    counts = np.zeros(size)
    for outer_step in range(60 * size):
        for group in pairing.groups(6, outer_step, range(size), group_size):
            if len(group) < group_size:
                counts[list(group)] += 1
    assert_uniform(counts)


def test_every_pair_is_equally_likely_and_outer_steps_are_independent():
    size, draws = 6, 900
    number = {pair: i for i, pair in enumerate(itertools.combinations(range(size), 2))}
    met, in_a_row = np.zeros(len(number)), np.zeros((size - 1, size - 1))
    partner = [pairing.partners(8, outer_step, range(size), 2, 0)[0] for outer_step in range(draws + 1)]
    for outer_step in range(draws):
        for pair in pairing.groups(8, outer_step, range(size), 2):
            met[number[pair]] += 1
        in_a_row[partner[outer_step] - 1, partner[outer_step + 1] - 1] += 1
    assert_uniform(met)
    assert_uniform(in_a_row)


def test_somebody_who_is_no_member_has_no_partners():
    with pytest.raises(AssertionError, match="replica 9"):
        pairing.partners(0, 0, range(4), 2, 9)


# ----------------------------------------------------------------------------------------------------------- views


def test_the_view_in_force():
    log = [*views.initial(3), View(4, (0, 2)), View(4, (0, 1)), View(9, (0, 1, 2))]
    assert [views.at(log, step).members for step in (0, 3)] == [(0, 1, 2)] * 2
    # Of two views that start together the later one counts: it was agreed upon after the other.
    assert [views.at(log, step).members for step in (4, 8)] == [(0, 1)] * 2
    assert views.at(log, 10**9).members == (0, 1, 2)


# ------------------------------------------------------------------------------------------------------- stability

INFINITE = 10**7
STABLE_UP_TO = {  # largest stable γ for pairs: α -> {N: γ}
    0.3: {2: 2.60, 4: 2.02, 8: 1.90, 16: 1.86, 64: 1.83, INFINITE: 1.82},
    0.5: {2: 3.00, 4: 1.80, 8: 1.61, 16: 1.55, 64: 1.51, INFINITE: 1.50},
    0.7: {2: 3.40, 4: 1.33, 8: 1.13, 16: 1.07, 64: 1.03, INFINITE: 1.02},
    0.9: {2: 3.80, 4: 0.54, 8: 0.44, 16: 0.40, 64: 0.39, INFINITE: 0.38},
}


@pytest.mark.parametrize("alpha", STABLE_UP_TO)
def test_the_stable_range_of_pairs(alpha):
    for replicas, expected in STABLE_UP_TO[alpha].items():
        low, high = stability.stable_gamma_range(alpha, 2, replicas, tolerance=1e-3)
        assert low == 0
        assert high == pytest.approx(expected, abs=0.01), (alpha, replicas)


def test_one_group_of_all_is_stable_by_the_roots_of_the_second_order_recursion():
    """Then nothing is random: a deviation follows φ'' = (1 + α − γ)φ' − αφ, stable while γ < 2·(1 + α)."""
    for alpha, size in itertools.product((0.0, 0.3, 0.5, 0.9), (2, 3, 8)):
        assert stability.stable_gamma_range(alpha, size, size)[1] == pytest.approx(2 * (1 + alpha), abs=1e-4)


@pytest.mark.parametrize(
    ("replicas", "group_size", "alpha", "gamma", "stable"),
    [
        (8, 2, 0.5, 0.7, True),
        (8, 2, 0.5, 1.5, True),
        (8, 2, 0.5, 1.75, False),
        (8, 2, 0.9, 0.7, False),
        (4, 2, 0.9, 0.5, True),
        (5, 2, 0.7, 1.0, True),
        (5, 2, 0.7, 1.5, False),
        (8, 3, 0.5, 0.7, True),
        (7, 3, 0.9, 1.2, False),
    ],
)
def test_the_moments_follow_the_groups_that_are_drawn(replicas, group_size, alpha, gamma, stable):
    """Simulate the outer step without inner progress (Δ = 0) and average the spread over many runs."""
    runs, outer_steps = 1000, 8
    rng = np.random.default_rng(0)
    phi = rng.standard_normal((runs, replicas))
    phi -= phi.mean(1, keepdims=True)
    delta = np.zeros_like(phi)
    spread = [(phi**2).mean()]
    for outer_step in range(outer_steps):
        mean = np.empty_like(phi)
        for run in range(runs):
            for group in pairing.groups(run, outer_step, range(replicas), group_size):
                members = list(group)
                mean[run, members] = phi[run, members].mean()
        delta = alpha * delta - gamma * (phi - mean)
        phi = phi + delta
        # With groups of unequal size the momenta do not sum to zero; only deviations from the mean are spread.
        phi -= phi.mean(1, keepdims=True)
        delta -= delta.mean(1, keepdims=True)
        spread.append((phi**2).mean())

    predicted = _predicted_spread(alpha, gamma, group_size, replicas, outer_steps)
    assert np.array(spread) / spread[0] == pytest.approx(np.array(predicted), rel=0.12)
    assert (stability.spectral_radius(alpha, gamma, group_size, replicas) < 1) == stable


def _predicted_spread(alpha, gamma, group_size, replicas, outer_steps):
    """a after each outer step from (a, b, c) = (1, 0, 0), by the recursion as it is printed in the documentation."""
    k = stability.consensus_fraction(group_size, replicas)
    a, b, c = 1.0, 0.0, 0.0
    series = [a]
    for _ in range(outer_steps):
        c_next = gamma**2 * k * a - 2 * alpha * gamma * k * b + alpha**2 * c
        cross = alpha * b - gamma * k * a
        a, b, c = a + 2 * cross + c_next, cross + c_next, c_next
        series.append(a)
    return series


@pytest.mark.parametrize(("group_size", "replicas"), [(2, 4), (2, 5), (3, 8), (4, 4), (3, 7)])
def test_what_a_group_removes(group_size, replicas):
    """k against its definition: the part of a random deviation that lies in the groups' own deviations."""
    rng = np.random.default_rng(1)
    removed = []
    for run in range(1500):
        deviation = rng.standard_normal(replicas)
        deviation -= deviation.mean()
        inside = deviation.copy()
        for group in pairing.groups(run, 0, range(replicas), group_size):
            inside[list(group)] -= deviation[list(group)].mean()
        removed.append((inside**2).sum() / (deviation**2).sum())
    assert stability.consensus_fraction(group_size, replicas) == pytest.approx(np.mean(removed), abs=0.03)


def test_the_limits_of_the_range():
    assert stability.stable_gamma_range(1.0, 2, 8) == (0.0, 0.0)
    assert stability.stable_gamma_range(0.5, 2, 1) == (0.0, np.inf)
    assert stability.spectral_radius(0.5, 0.7, 2, 1) == 0.25
