"""What the theory says against simulation: the noisy quadratic, and the stability boundary."""

import numpy as np
import pytest

from noloco_mega.config import Noloco
from noloco_mega.lab import theory
from noloco_mega.plan.stability import stable_gamma_range

OMEGAS = [0.002, 0.004, 0.008, 0.016]


def measured(omega, replicas=8, group_size=2, **changes):
    settings = Noloco(group_size=group_size, **changes)
    quadratic = theory.Quadratic(omega=omega, inner_steps=5)
    moments = theory.simulate_quadratic(
        quadratic, settings, replicas, coordinates=20, warmup=100, outer_steps=1500, start=0.0
    )
    return moments, theory.quadratic_variances(quadratic, settings, replicas)


def test_the_variance_over_replicas_grows_with_the_square_of_the_inner_rate():
    found = [measured(omega) for omega in OMEGAS]
    simulated = theory.exponent(OMEGAS, [moments.replica_variance for moments, _ in found])
    exact = theory.exponent(OMEGAS, [variance for _, (_, variance) in found])
    assert simulated == pytest.approx(2.0, abs=0.1)
    assert exact == pytest.approx(2.0, abs=0.1)
    for moments, (_, variance) in found:
        assert moments.replica_variance == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("group_size, changes", [(2, {}), (4, {"gamma": 1.2}), (2, {"outer_momentum": 0.2})])
def test_the_exact_variances_are_those_of_a_simulation(group_size, changes):
    moments, (of_mean, of_replicas) = measured(0.05, group_size=group_size, **changes)
    assert moments.replica_variance == pytest.approx(of_replicas, rel=0.03)
    assert moments.mean_variance == pytest.approx(of_mean, rel=0.1)


def test_the_mean_goes_to_the_optimum():
    settings, quadratic = Noloco(), theory.Quadratic(omega=0.02, inner_steps=10)
    coordinates, outer_steps = 500, 100
    moments = theory.simulate_quadratic(
        quadratic, settings, 4, coordinates=coordinates, warmup=200, outer_steps=outer_steps, start=10.0
    )
    of_mean, _ = theory.quadratic_variances(quadratic, settings, 4)
    # Outer steps are correlated with each other, coordinates are not.
    assert abs(moments.mean) < 4 * np.sqrt(of_mean / coordinates)


def test_settings_without_a_stationary_state_are_refused():
    quadratic = theory.Quadratic(omega=0.02, inner_steps=10)
    with pytest.raises(ValueError, match="no stationary state"):
        theory.quadratic_variances(quadratic, Noloco(outer_momentum=0.9, gamma=0.7), 8)
    with pytest.raises(ValueError, match="do not divide"):
        theory.quadratic_variances(quadratic, Noloco(group_size=3), 8)


OPTIONS = [
    {"nesterov": True},
    {"combine": "after"},
    {"nesterov": True, "combine": "after"},
    {"pairing": "hypercube"},
    {"pairing": "tournament"},
    {"pairing": "tournament", "nesterov": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "replicas, momenta",
    [(4, (0.5, 0.9)), *(pytest.param(n, (0.0, 0.3, 0.5, 0.7, 0.9), marks=pytest.mark.slow) for n in (2, 5, 8, 16))],
)
def test_the_boundary_of_every_option_lies_within_two_percent_of_the_simulated_one(replicas, momenta, options):
    if options.get("pairing") == "hypercube" and replicas == 5:
        pytest.skip("no hypercube has 5 corners")
    form = {name: value for name, value in options.items() if name != "pairing"}
    meter = theory.GrowthMeter(2, replicas, options.get("pairing", "random"), elements=4096, drawn=2000)
    for alpha in momenta:
        _, gamma = stable_gamma_range(alpha, 2, replicas, **options)
        inside, outside = (meter.growth(alpha, factor * gamma, steps=120, **form) for factor in (0.98, 1.02))
        assert inside < 0 < outside, (alpha, gamma)


@pytest.mark.parametrize(
    "replicas, momenta",
    [
        (4, (0.0, 0.5, 0.9)),
        (8, (0.5,)),
        *(pytest.param(n, (0.0, 0.3, 0.5, 0.7, 0.9), marks=pytest.mark.slow) for n in (2, 4, 8, 64)),
    ],
)
def test_the_boundary_lies_within_two_percent_of_the_simulated_one(replicas, momenta):
    """A spread just inside the predicted range shrinks, one just outside grows: real groups, no theory."""
    for group_size in range(2, min(4, replicas) + 1):
        meter = theory.GrowthMeter(group_size, replicas, elements=4096)
        for alpha in momenta:
            _, gamma = stable_gamma_range(alpha, group_size, replicas)
            inside, outside = (meter.growth(alpha, factor * gamma, steps=120) for factor in (0.98, 1.02))
            assert inside < 0 < outside, (group_size, alpha, gamma)


def test_the_meter_sees_what_a_typical_walker_does_not():
    """Averaging logarithms instead of moments would call unstable settings stable."""
    meter = theory.GrowthMeter(2, 4)
    assert meter.growth(0.9, 0.56) > 0
    random, gamma, alpha = np.random.default_rng(0), 0.56, 0.9
    state, total = random.standard_normal((2, 4)), 0.0
    state -= state.mean(1, keepdims=True)
    for _ in range(6000):
        phi, delta = state[:, random.permutation(4)]
        pairs = phi.reshape(2, 2)
        delta = alpha * delta - gamma * (pairs - pairs.mean(1, keepdims=True)).ravel()
        state = np.stack((phi + delta, delta))
        norm = np.linalg.norm(state)
        total += np.log(norm)
        state /= norm
    assert total / 6000 < 0


def test_exponent_of_a_power_law():
    assert theory.exponent([1.0, 2.0, 5.0], [3.0, 3 * 2**1.7, 3 * 5**1.7]) == pytest.approx(1.7)


def test_the_boundary_is_found_where_a_spread_vanishes_in_one_step():
    """α = 0 and one group of all: every γ in (0, 2) shrinks it, γ = 1 to nothing."""
    assert theory.GrowthMeter(2, 2, elements=64, drawn=10).boundary(0.0) == pytest.approx(2.0, rel=0.01)
