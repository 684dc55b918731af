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
        "hypercube": [pairing.groups(seed, outer_step, range(4), 2, "hypercube") for outer_step in (0, 1, 2)],
        "tournament": [pairing.groups(seed, outer_step, range(5), 2, "tournament") for outer_step in (0, 1, 5)],
    }


GOLDEN = {
    "key": "0x42c4fc187e2473e17df0ecd1577ff15b",
    "raw": [17103193783213052106, 11150714314493977267],
    "permutation": [7, 3, 5, 6, 2, 1, 4, 0],
    "routes": [[5, 2, 1, 0], [1, 5, 2, 0], [2, 5, 0, 1]],
    "pairs": [[(0, 2), (1, 3), (4,)], [(0, 4), (1, 3), (2,)], [(0, 1), (2,), (3, 4)]],
    "triples": [(0, 4, 7), (1, 3, 5), (2, 6)],
    "hypercube": [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 2), (1, 3)]],
    "tournament": [[(0, 3), (1, 4), (2,)], [(0, 2), (1,), (3, 4)], [(0, 2), (1, 3), (4,)]],
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
@pytest.mark.parametrize(
    ("group_size", "scheme"), [(2, "random"), (3, "random"), (4, "random"), (2, "hypercube"), (2, "tournament")]
)
def test_groups_partition_the_members(size, group_size, scheme):
    members = [10 + 3 * i for i in range(size)]
    for outer_step in range(30):
        groups = pairing.groups(5, outer_step, members, group_size, scheme)
        assert sorted(replica for group in groups for replica in group) == members
        sizes = sorted((len(group) for group in groups), reverse=True)
        whole, rest = divmod(size, group_size)
        assert sizes == [group_size] * whole + [rest] * bool(rest)
        for group in groups:
            for replica in group:
                others = tuple(sorted(set(group) - {replica}))
                assert pairing.partners(5, outer_step, reversed(members), group_size, replica, scheme) == others


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


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_averaging_over_a_hypercube_ends_equal_in_a_cycle(dimensions):
    replicas, rng = 1 << dimensions, np.random.default_rng(0)
    assert pairing.period(replicas, "hypercube") == dimensions
    for cycle in range(5):
        values = rng.standard_normal(replicas)
        mean = values.mean()
        for outer_step in range(cycle * dimensions, (cycle + 1) * dimensions):
            assert np.ptp(values) > 1e-3
            for group in pairing.groups(3, outer_step, range(replicas), 2, "hypercube"):
                values[list(group)] = values[list(group)].mean()
        np.testing.assert_allclose(values, mean, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9, 16])
def test_in_a_tournament_everybody_meets_everybody_once_a_cycle(size):
    members = [10 + 3 * i for i in range(size)]
    period = pairing.period(size, "tournament")
    assert period == (size if size % 2 else size - 1)
    for cycle in range(3):
        steps = range(cycle * period, (cycle + 1) * period)
        met = [group for step in steps for group in pairing.groups(4, step, members, 2, "tournament")]
        assert sorted(group for group in met if len(group) == 2) == list(itertools.combinations(members, 2))
        assert sorted(group for group in met if len(group) == 1) == [(member,) for member in members] * (size % 2)


@pytest.mark.parametrize("scheme", ["hypercube", "tournament"])
def test_over_the_cycles_every_pair_is_equally_likely(scheme):
    size, first = 8, []
    number = {pair: i for i, pair in enumerate(itertools.combinations(range(size), 2))}
    for cycle in range(400):
        first += pairing.groups(9, cycle * pairing.period(size, scheme), range(size), 2, scheme)
    assert_uniform(np.bincount([number[pair] for pair in first], minlength=len(number)))


def test_those_whose_partner_is_absent_pair_among_each_other():
    everybody, present, idle = range(8), [0, 2, 3, 4, 7], 0
    for outer_step in range(60):
        whole = pairing.groups(5, outer_step, everybody, 2, "hypercube")
        left = pairing.groups(5, outer_step, present, 2, "hypercube")
        assert {group for group in whole if set(group) <= set(present)} <= set(left), "whom it leaves whole stay"
        assert sorted(len(group) for group in left) == [1, 2, 2]
        idle += (0,) in left
    assert 3 < idle < 21, "nobody is always left over"


def test_schemes_that_pair_refuse_larger_groups():
    for scheme in ("hypercube", "tournament"):
        with pytest.raises(ValueError, match=f'"{scheme}" makes pairs, and groups of 3'):
            pairing.groups(0, 0, range(8), 3, scheme)


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


def test_the_stable_range_of_pairs_with_look_ahead():
    """By the recursions of φ and δ written out, and the limits for N → ∞ that are known for them."""
    for alpha, limit in {0.5: 1.30, 0.7: 1.09, 0.9: 0.85}.items():
        _, high = stability.stable_gamma_range(alpha, 2, INFINITE, nesterov=True)
        assert high == pytest.approx(limit, abs=0.005)
    k, alpha, gamma = stability.consensus_fraction(2, 8), 0.6, 0.9
    # With m = −γ·(φ − its group's mean): E m² = γ²k·a, E mφ = −γk·a, E mδ = −γk·b.
    a, b, c = np.eye(3)
    mm, mphi, mdelta = gamma**2 * k * a, -gamma * k * a, -gamma * k * b
    new_c = alpha**2 * c + 2 * alpha * mdelta + mm
    new_b = alpha * b + mphi + alpha**3 * c + (alpha**2 + alpha * (1 + alpha)) * mdelta + (1 + alpha) * mm
    new_a = a + alpha**4 * c + (1 + alpha) ** 2 * mm + 2 * alpha**2 * b + 2 * (1 + alpha) * mphi
    new_a = new_a + 2 * alpha**2 * (1 + alpha) * mdelta
    expected = np.abs(np.linalg.eigvals(np.stack([new_a, new_b, new_c]))).max()
    assert stability.spectral_radius(alpha, gamma, 2, 8, nesterov=True) == pytest.approx(expected)


@pytest.mark.parametrize("pairing_", ["random", "hypercube", "tournament"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_adapting_first_is_stable_for_every_momentum(nesterov, pairing_):
    for alpha, replicas in itertools.product((0.0, 0.5, 0.95), (2, 8)):
        form = {"nesterov": nesterov, "combine": "after", "pairing": pairing_}
        assert stability.stable_gamma_range(alpha, 2, replicas, **form)[1] == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize("form", [{}, {"nesterov": True}, {"pairing": "hypercube"}, {"pairing": "tournament"}], ids=str)
def test_every_gamma_below_the_largest_stable_one_is_stable(form):
    for alpha, replicas in itertools.product((0.3, 0.9), (4, 8, 16)):
        _, high = stability.stable_gamma_range(alpha, 2, replicas, **form)
        radii = [stability.spectral_radius(alpha, gamma, 2, replicas, **form) for gamma in np.linspace(0.01, 4, 60)]
        assert [radius < 1 for radius in radii] == list(np.linspace(0.01, 4, 60) < high)


def test_the_limits_of_the_range():
    assert stability.stable_gamma_range(1.0, 2, 8) == (0.0, 0.0)
    assert stability.stable_gamma_range(0.5, 2, 1) == (0.0, np.inf)
    assert stability.spectral_radius(0.5, 0.7, 2, 1) == 0.25


@pytest.mark.parametrize("combine, nesterov", [("step", False), ("step", True), ("after", False)])
def test_rounding_errors_under_a_hypercube_grow_as_their_covariances_do(combine, nesterov):
    """The covariance of all replicas' (φ, δ), over cycles of pairs whose errors e and −e follow their difference."""
    alpha, gamma, noise, replicas = 0.5, 0.6, 0.3, 8
    form = {"nesterov": nesterov, "combine": combine}
    common, within = stability.step_matrices(alpha, gamma, **form)
    deviations = np.eye(replicas) - 1 / replicas
    moments, growth = np.array([[1.0, 0.0], [0.0, 0.0]]), 0.0
    for _ in range(300):  # new labels spread the moments evenly at the beginning of a cycle
        covariance = np.kron(deviations, moments) * replicas / (replicas - 1)
        for bit in (1, 2, 4):
            swap = np.eye(replicas)[np.arange(replicas) ^ bit]
            apart = (np.eye(replicas) - swap) / 2
            shown = np.kron(apart, common - within)  # half of what a pair's exchange shows of its difference
            step = np.kron(np.eye(replicas) - apart, common) + np.kron(apart, within)
            errors = noise * shown @ covariance @ shown.T
            covariance = step @ covariance @ step.T
            for one in range(replicas):  # e for one and −e for the other, and nothing between pairs
                for other in (one, one ^ bit):
                    at = np.ix_([2 * one, 2 * one + 1], [2 * other, 2 * other + 1])
                    covariance[at] += errors[at]
        ends = sum(covariance[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(replicas)) / replicas
        growth = np.trace(ends) / np.trace(moments)
        moments = ends / np.trace(ends)
    radius = stability.spectral_radius(alpha, gamma, 2, replicas, pairing="hypercube", noise=noise, **form)
    assert radius == pytest.approx(growth ** (1 / 3), rel=1e-6)
    quiet = stability.spectral_radius(alpha, gamma, 2, replicas, pairing="hypercube", **form)
    assert radius > quiet + 0.001
