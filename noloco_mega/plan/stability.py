"""Is (α, γ, n, N) stable? The exact second-moment map of the replicas' deviations from their common mean.

For N replicas drawn at random into groups of n at every outer step, with k the mean over replicas of the part of a
deviation that a group's mean removes, the moments (a, b, c) = (E φ², E φδ, E δ²) follow

    c' = γ²k·a − 2αγk·b + α²·c
    b' = (αb − γk·a) + c'
    a' = a + 2(αb − γk·a) + c'

and a run is stable only if the spectral radius of this 3x3 map is below 1. With the modulo codec γ²k·a becomes
γ²k·(1 + ν)·a: every member of a group of m keeps (1 − 1/m) of the variance s²/12 of a rounding error
(outer/coding.py), whose step s follows the difference of two replicas, 2N/(N − 1)·γ²·a.

The range printed in the paper (Eq. 74) is a bound on the mean, not on the variance, and is not safe: docs/method.md
shows the counter-example.
"""

from __future__ import annotations

import math

import numpy as np


def consensus_fraction(group_size: int, replicas: int) -> float:
    """k: the mean fraction of a replica's deviation (in variance) that its group's mean removes.

    A group of size m drawn without replacement from N removes (m − 1)/m · N/(N − 1) of it. With G = N/n equal groups
    this is (N − G)/(N − 1); when n does not divide N the left-over replicas form one smaller group, and k is the mean
    over replicas of the groups they land in.
    """
    if replicas == 1:
        return 1.0
    whole, rest = divmod(replicas, group_size)
    groups = [group_size] * whole + ([rest] if rest else [])
    return (replicas - len(groups)) / (replicas - 1)


def rounding_noise(bits: int, half_range: float) -> float:
    """ν of the modulo codec with steps of 2·half_range/2^bits, in rms of the difference that the range is made for.

    2/12 of the step's square: 0.065 for 4 bits and a range of 5.
    """
    return 2 / 12 * (2 * half_range / 2**bits) ** 2


def spectral_radius(alpha: float, gamma: float, group_size: int, replicas: int, noise: float = 0.0) -> float:
    """The growth per outer step of the replicas' second moments; below 1 the spread stays bounded. `noise` is ν."""
    if replicas == 1:
        return alpha**2
    k = consensus_fraction(group_size, replicas)
    row_c = np.array([gamma**2 * k * (1 + noise), -2 * alpha * gamma * k, alpha**2])
    row_b = np.array([-gamma * k, alpha, 0.0]) + row_c
    row_a = np.array([1 - 2 * gamma * k, 2 * alpha, 0.0]) + row_c
    return float(np.abs(np.linalg.eigvals(np.stack([row_a, row_b, row_c]))).max())


def stable_gamma_range(
    alpha: float, group_size: int, replicas: int, tolerance: float = 1e-6, noise: float = 0.0
) -> tuple[float, float]:
    """The open interval of γ that is stable for this α, n, N and ν, found by bisection.

    γ → 0+ is always inside for |α| < 1: the spread then shrinks, slowly. Returns (0, 0) when |α| >= 1 and (0, inf)
    for a single replica, where γ multiplies zero.
    """
    if abs(alpha) >= 1:
        return 0.0, 0.0
    if replicas == 1:
        return 0.0, math.inf
    low, high = 0.0, 8.0
    while high - low > tolerance:
        middle = (low + high) / 2
        if spectral_radius(alpha, middle, group_size, replicas, noise) < 1:
            low = middle
        else:
            high = middle
    return 0.0, low
