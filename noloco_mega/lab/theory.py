"""Does the method do what its theory says? A noisy quadratic, and the growth of a spread under real random groups.

The quadratic (arXiv 2506.10911, section 3.3): the loss is ½·a·(θ − c)² per coordinate with c ~ N(0, σ²) drawn anew for
every inner step, and an inner step is SGD with rate ω: θ ← θ − ω·a·(θ − c). Its H inner steps take φ to
θ = r·φ + η with r = (1 − ω·a)^H and Var η = s² = ω²a²σ²·(1 − r²)/(1 − (1 − ω·a)²).

Letters: N replicas, n group size, d independent coordinates, H inner steps, ω inner rate; α, β, γ, φ, δ, Δ as in
outer/noloco.py; k the consensus fraction of plan/stability.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from noloco_mega.config import Noloco
from noloco_mega.plan.pairing import groups, period
from noloco_mega.plan.stability import consensus_fraction

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """Inner steps on the noisy quadratic."""

    omega: float
    """ω, with 0 < ω·a < 2."""
    inner_steps: int
    """H"""
    curvature: float = 1.0
    """a"""
    noise: float = 1.0
    """σ of the optimum."""

    def shrinkage(self) -> float:
        """r: what is left of φ after H inner steps, in expectation."""
        return (1 - self.omega * self.curvature) ** self.inner_steps

    def noise_variance(self) -> float:
        """s²: variance of θ around r·φ after H inner steps."""
        one = 1 - self.omega * self.curvature
        return (self.omega * self.curvature * self.noise) ** 2 * (1 - one ** (2 * self.inner_steps)) / (1 - one**2)

    def inner_phase(self, phi: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """θ after H inner steps from φ, any shape, step by step."""
        theta = phi.copy()
        for _ in range(self.inner_steps):
            theta -= self.omega * self.curvature * (theta - self.noise * random.standard_normal(theta.shape))
        return theta


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Slow weights on the quadratic, averaged over coordinates and outer steps."""

    mean: float
    """Of φ over replicas, coordinates and outer steps."""
    mean_variance: float
    """Variance of the replicas' mean around the optimum 0."""
    replica_variance: float
    """Unbiased variance over replicas."""


def simulate_quadratic(
    quadratic: Quadratic,
    settings: Noloco,
    replicas: int,
    *,
    coordinates: int,
    warmup: int,
    outer_steps: int,
    start: float,
) -> Moments:
    """NoLoCo's outer steps on the quadratic from φ = `start`, with the groups of plan/pairing.py.

    The first `warmup` outer steps are not measured. The formula is the paper's, in NumPy: the tests compare it with
    what follows from it, and outer/noloco.py has tests of its own.
    """
    random = np.random.default_rng(settings.seed)
    phi = np.full((replicas, coordinates), start)
    delta = np.zeros_like(phi)
    means, mean_squares, variances = [], [], []
    for outer_step in range(warmup + outer_steps):
        progress = quadratic.inner_phase(phi, random) - phi
        for group in groups(settings.seed, outer_step, range(replicas), settings.group_size):
            members = list(group)
            pull = phi[members] - phi[members].mean(0)
            delta[members] = (
                settings.outer_momentum * delta[members]
                + settings.outer_lr * progress[members].mean(0)
                - settings.gamma * pull
            )
        phi += delta
        if outer_step >= warmup:
            mean = phi.mean(0)
            means.append(mean.mean())
            mean_squares.append((mean**2).mean())
            variances.append(phi.var(0, ddof=1).mean())
    return Moments(
        mean=float(np.mean(means)),
        mean_variance=float(np.mean(mean_squares)),
        replica_variance=float(np.mean(variances)),
    )


def quadratic_variances(quadratic: Quadratic, settings: Noloco, replicas: int) -> tuple[float, float]:
    """The exact stationary (mean_variance, replica_variance) of `Moments`, for groups of equal size.

    A deviation from the common mean splits into its group's mean, a fraction 1 − k of its variance, and the rest. The
    step acts on the first with −β·(1 − r) and on the second with −γ, and the noise enters through the groups' means:
    with g = γ·k + β·(1 − r)·(1 − k) and q = γ²·k + β²·(1 − r)²·(1 − k), the moments (A, B, C) = (E φ², E φδ, E δ²)
    follow C' = α²C − 2αg·B + q·A + v, B' = αB − g·A + C', A' = A + 2(αB − g·A) + C', v = β²s²·(1/n − 1/N) for the
    unbiased variance times (N − 1)/N. The mean over all replicas follows the same with k = 0 and v = β²s²/N.

    Raises ValueError where this has no stationary state.
    """
    n = settings.group_size
    if replicas % n:
        raise ValueError(f"groups of {n} do not divide {replicas} replicas; the closed form is for equal groups")
    alpha, beta, gamma = settings.outer_momentum, settings.outer_lr, settings.gamma
    loss, noise = beta * (1 - quadratic.shrinkage()), beta**2 * quadratic.noise_variance()
    k = consensus_fraction(n, replicas)
    of_mean = _stationary(alpha, loss, loss**2, noise / replicas)
    pull, square = gamma * k + loss * (1 - k), gamma**2 * k + loss**2 * (1 - k)
    of_replicas = _stationary(alpha, pull, square, noise * (1 / n - 1 / replicas))
    return of_mean, of_replicas * replicas / (replicas - 1)


def _stationary(alpha: float, pull: float, square: float, noise: float) -> float:
    """A of the fixed point of the map in `quadratic_variances`."""
    row_c = np.array([square, -2 * alpha * pull, alpha**2])
    row_b = np.array([-pull, alpha, 0.0]) + row_c
    row_a = np.array([1 - 2 * pull, 2 * alpha, 0.0]) + row_c
    step = np.stack([row_a, row_b, row_c])
    if np.abs(np.linalg.eigvals(step)).max() >= 1:
        raise ValueError("these settings have no stationary state: lower α, γ or the inner rate")
    return float(np.linalg.solve(np.eye(3) - step, np.full(3, noise))[0])


def exponent(x: list[float], y: list[float]) -> float:
    """p of the power law y ∝ x^p, fitted by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


class GrowthMeter:
    """The growth of the replicas' second moments under real groups, measured by simulation alone.

    `walkers` independent copies of N deviations (φ, δ) take outer steps without inner ones, each in cycles of its own
    out of those that plan/pairing.py draws (a cycle of random groups is one outer step). The mean of ‖φ‖² + ‖δ‖² over
    walkers is dominated by the few that happened to grow most, so that after each cycle walkers are drawn anew in
    proportion to it and scaled back to 1: the product of the mean factors estimates E‖·‖², not the growth of a typical
    walker, which is smaller.
    """

    def __init__(
        self, group_size: int, replicas: int, pairing: str = "random", *, elements: int = 8192, drawn: int = 6000
    ) -> None:
        """`elements` bounds walkers · N, `drawn` is about how many outer steps' groups are drawn."""
        self._walkers = max(elements // replicas, 16)
        self._replicas = replicas
        whole = replicas // group_size
        self._parts = [slice(0, whole * group_size), slice(whole * group_size, replicas)]
        self._group_size = group_size
        self._period = period(replicas, pairing)
        cycles = []
        for cycle in range(-(-drawn // self._period)):
            orders = []
            for outer_step in range(cycle * self._period, (cycle + 1) * self._period):
                drawn_groups = groups(0, outer_step, range(replicas), group_size, pairing)
                # The smaller group of those left over comes last.
                ordered = sorted(drawn_groups, key=lambda group: -len(group))
                orders.append([replica for group in ordered for replica in group])
            cycles.append(orders)
        # Each order as places in the one before it, in which a walker lies by then.
        self._orders = np.array(sorted(cycles))
        before = np.argsort(self._orders[:, :-1], 2)
        self._orders[:, 1:] = np.take_along_axis(before, self._orders[:, 1:], 2)

    def growth(
        self,
        alpha: float,
        gamma: float,
        *,
        nesterov: bool = False,
        combine: str = "step",
        warmup: int = 60,
        steps: int = 200,
    ) -> float:
        """ln of the factor per outer step; −inf where nothing is left. The same random numbers at every call. About
        `warmup` and `steps` outer steps are taken, in whole cycles."""
        random = np.random.default_rng(0)
        state = random.standard_normal((2, self._walkers, self._replicas))
        state -= state.mean(2, keepdims=True)
        ahead = alpha if nesterov else 1.0
        warmup_cycles, measured_cycles = -(-warmup // self._period), -(-steps // self._period)
        total = 0.0
        for cycle in range(warmup_cycles + measured_cycles):
            # Copies of a walker lie side by side; multiples of the golden ratio give them cycles far from each other.
            places = (np.arange(self._walkers) * GOLDEN_RATIO + random.random()) % 1
            orders = self._orders[(places * len(self._orders)).astype(int)]
            for number in range(self._period):
                phi, delta = np.take_along_axis(state, orders[None, :, number], 2)
                if combine == "after":
                    delta = alpha * delta
                    phi = phi + ahead * delta
                    phi = phi - gamma * self._deviations(phi)
                else:
                    pull = -gamma * self._deviations(phi)
                    delta = alpha * delta + pull
                    phi = phi + (alpha * delta + pull if nesterov else delta)
                state = np.stack((phi, delta))
                # Rounding leaves a common mean behind, which no group removes and which would outlive what shrinks.
                state -= state.mean(2, keepdims=True)
            weights = np.square(state).sum((0, 2))
            if not weights.any():
                return -math.inf
            if cycle >= warmup_cycles:
                total += math.log(weights.mean())
            chosen = _systematic(weights, random.random())
            state = state[:, chosen] / np.sqrt(weights[chosen])[None, :, None]
        return total / (measured_cycles * self._period)

    def boundary(
        self,
        alpha: float,
        *,
        nesterov: bool = False,
        combine: str = "step",
        highest: float = 8.0,
        tolerance: float = 2e-3,
    ) -> float:
        """The γ where the growth turns from negative to positive, by bisection in (0, highest); relative tolerance."""
        low, high = 0.0, highest
        while high - low > tolerance * high:
            middle = (low + high) / 2
            if self.growth(alpha, middle, nesterov=nesterov, combine=combine) < 0:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _deviations(self, phi: np.ndarray) -> np.ndarray:
        """φ − the mean of its group, groups lying side by side: [walkers, N]."""
        found = np.empty_like(phi)
        for part in self._parts:
            size = part.stop - part.start
            if size:
                grouped = phi[:, part].reshape(len(phi), -1, min(self._group_size, size))
                found[:, part] = (grouped - grouped.mean(2, keepdims=True)).reshape(len(phi), size)
        return found


def _systematic(weights: np.ndarray, offset: float) -> np.ndarray:
    """As many indices as there are weights, each about in proportion to its weight (systematic resampling)."""
    edges = np.cumsum(weights / weights.sum())
    places = (np.arange(len(weights)) + offset) / len(weights)
    return np.minimum(np.searchsorted(edges, places), len(weights) - 1)
