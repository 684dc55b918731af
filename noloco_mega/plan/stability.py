"""Are the settings of an outer step stable? The exact second moments of the replicas' deviations from their mean.

Without inner progress (Δ = 0) an outer step takes what the members of a group have in common by one 2x2 matrix A of
(φ, δ), and their deviations from it by another one, B (`step_matrices`). For N replicas drawn at random into groups of
n at every outer step, with k the mean over replicas of the part of a deviation that lies within its group, the second
moments S = E (φ, δ)(φ, δ)ᵀ of the replicas' deviations from their common mean follow

    S ← (1 − k)·A S Aᵀ + k·B S Bᵀ

and a run is stable only if the spectral radius of this map is below 1. For NoLoCo's own step it is, written out for
(a, b, c) = (E φ², E φδ, E δ²),

    c' = γ²k·a − 2αγk·b + α²·c
    b' = (αb − γk·a) + c'
    a' = a + 2(αb − γk·a) + c'

Pairs by hypercube or tournament have cycles, each with new random labels, and what is random in them are the labels
alone: the map over a cycle is the mean over labels of the cycle's products of A and B.

With the modulo codec every member of a group of m keeps (1 − 1/m) of the variance s²/12 of a rounding error
(outer/coding.py), whose step s follows the difference of two replicas. What they exchange enters a step by A − B, so
that k·B S Bᵀ becomes k·(B S Bᵀ + ν·(A − B) S (A − B)ᵀ); for NoLoCo's own step γ²k·a becomes γ²k·(1 + ν)·a. Under a
hypercube the errors of an outer step stay among the Walsh functions that have its bit, which alone show in differences.

The range printed in the paper (Eq. 74) is a bound on the mean, not on the variance, and is not safe: docs/method.md
shows the counter-example.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from noloco_mega.plan import pairing as pairs


def consensus_fraction(group_size: int, replicas: int) -> float:
    """k: the mean fraction of a replica's deviation (in variance) that its group's mean removes.

    A group of size m drawn without replacement from N removes (m − 1)/m · N/(N − 1) of it. With G = N/n equal groups
    this is (N − G)/(N − 1); when n does not divide N the left-over replicas form one smaller group, and k is the mean
    over replicas of the groups they land in.
    """
    if replicas == 1:
        return 1.0
    return (replicas - math.ceil(replicas / group_size)) / (replicas - 1)


def rounding_noise(bits: int, half_range: float) -> float:
    """ν of the modulo codec with steps of 2·half_range/2^bits, in rms of the difference that the range is made for.

    2/12 of the step's square: 0.065 for 4 bits and a range of 5.
    """
    return 2 / 12 * (2 * half_range / 2**bits) ** 2


def step_matrices(
    alpha: float, gamma: float, *, nesterov: bool = False, combine: str = "step"
) -> tuple[np.ndarray, np.ndarray]:
    """A and B, [2, 2] each: one outer step of (φ, δ) without inner progress, of what a group has in common and of the
    deviations from it. The formulas are those of outer/noloco.py with Δ = 0, where the group's mean of φ is φ itself
    for A and 0 for B."""
    ahead = alpha if nesterov else 1.0
    common = np.array([[1.0, ahead * alpha], [0.0, alpha]])
    if combine == "after":
        return common, np.array([[1 - gamma, 0.0], [0.0, 1.0]]) @ common
    pull = np.array([[1 + alpha if nesterov else 1.0, 0.0], [1.0, 0.0]])
    return common, common - gamma * pull


def spectral_radius(
    alpha: float,
    gamma: float,
    group_size: int,
    replicas: int,
    *,
    nesterov: bool = False,
    combine: str = "step",
    pairing: str = "random",
    noise: float = 0.0,
) -> float:
    """The growth per outer step of the replicas' second moments; below 1 the spread stays bounded.

    `noise` is ν. Raises ValueError for a tournament with noise, whose map is not known.
    """
    if replicas == 1:
        return alpha**2
    common, within = step_matrices(alpha, gamma, nesterov=nesterov, combine=combine)
    difference = common - within
    moments = np.kron(common, common), np.kron(within, within) + noise * np.kron(difference, difference)
    match pairing:
        case "hypercube":
            cycle = _hypercube_cycle(*moments, replicas)
        case "tournament":
            if noise:
                raise ValueError("what rounding errors do under a tournament is not known")
            cycle = _tournament_cycle(common, within, replicas)
        case _:
            k = consensus_fraction(group_size, replicas)
            cycle = (1 - k) * moments[0] + k * moments[1]
    return float(np.abs(np.linalg.eigvals(cycle)).max()) ** (1 / pairs.period(replicas, pairing))


@cache
def stable_gamma_range(
    alpha: float,
    group_size: int,
    replicas: int,
    tolerance: float = 1e-6,
    *,
    nesterov: bool = False,
    combine: str = "step",
    pairing: str = "random",
    noise: float = 0.0,
) -> tuple[float, float]:
    """The open interval of γ that is stable for these settings, found by bisection.

    γ → 0+ is always inside for |α| < 1: the spread then shrinks, slowly. Returns (0, 0) when |α| >= 1 and (0, inf)
    for a single replica, where γ multiplies zero. A tournament's takes time that grows with N³, 2 s for N = 128.
    """
    if abs(alpha) >= 1:
        return 0.0, 0.0
    if replicas == 1:
        return 0.0, math.inf
    low, high = 0.0, 8.0
    while high - low > tolerance:
        middle = (low + high) / 2
        radius = spectral_radius(
            alpha, middle, group_size, replicas, nesterov=nesterov, combine=combine, pairing=pairing, noise=noise
        )
        if radius < 1:
            low = middle
        else:
            high = middle
    return 0.0, low


def _hypercube_cycle(common: np.ndarray, within: np.ndarray, replicas: int) -> np.ndarray:
    """The map [4, 4] of a cycle of d = log2 N outer steps, from the maps A ⊗ A and B ⊗ B of its steps.

    The N Walsh functions of the labels are not mixed: in each outer step one goes by B where it has the step's bit, and
    by A where it lacks it. Random labels spread a deviation evenly over all but the constant one, which has no bit, and
    the mean over them is ((A⊗A + B⊗B)^d − (A⊗A)^d) / (N − 1).
    """
    steps = pairs.period(replicas, "hypercube")
    everything = np.linalg.matrix_power(common + within, steps)
    return (everything - np.linalg.matrix_power(common, steps)) / (replicas - 1)


def _tournament_cycle(common: np.ndarray, within: np.ndarray, replicas: int) -> np.ndarray:
    """The map [4, 4] of a cycle: with C the product of its steps on the deviations of all labels, it is the mean over
    replicas of C S Cᵀ, where S goes to every replica and −S/(N − 1) between two of them."""
    columns = 2 * replicas
    # (φ, δ) of every label, for each deviation that a cycle can begin with: [2, N, 2N].
    state = np.eye(columns).reshape(2, replicas, columns)
    state -= state.mean(1, keepdims=True)
    for number in range(pairs.period(replicas, "tournament")):
        other = np.arange(replicas)
        for group in pairs.tournament_round(replicas, number):
            other[list(group)] = group[::-1]
        mean = (state + state[:, other]) / 2
        state -= mean
        state = (common @ mean.reshape(2, -1) + within @ state.reshape(2, -1)).reshape(state.shape)
    ends = state.reshape(2, replicas, 2, replicas).transpose(0, 2, 1, 3).reshape(4, -1)
    products = (ends @ ends.T).reshape(2, 2, 2, 2)  # Σ of C's (a, b) times its (c, d)
    return products.transpose(0, 2, 1, 3).reshape(4, 4) / (replicas - 1)
