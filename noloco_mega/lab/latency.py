"""How long do replicas wait for each other? All-reduces over N replicas against exchanges in pairs, message by message.

Times are drawn one by one: log-normal, or from a list of measured ones. Whoever has what a message needs sends it at
once; the two ways of a link are independent and carry one message at a time; adding up costs nothing.

Letters: N replicas, H inner steps per outer step; ln t ~ N(μ, σ²) for a log-normal time t.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from noloco_mega.plan import pairing

DRAWS = 4_000_000
"""Message times that one estimate draws at most."""
LINK_ROW = re.compile(r"^\W*\d+ - \d+\W+([0-9.]+) ms", re.MULTILINE)
"""A row of the link table that `check --live` prints; its first time is the link's latency."""


class Times(Protocol):
    """A distribution of positive times, in seconds."""

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray: ...


@dataclass(frozen=True)
class LogNormal:
    """ln t ~ N(μ, σ²)."""

    mu: float
    sigma: float

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.exp(self.mu + self.sigma * random.standard_normal(shape))

    @property
    def mean(self) -> float:
        return math.exp(self.mu + self.sigma**2 / 2)


@dataclass(frozen=True)
class Measured:
    """Times that occurred, all equally likely."""

    seconds: tuple[float, ...]

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.array(self.seconds)[random.integers(0, len(self.seconds), shape)]


def read_times(path: Path) -> Measured:
    """Measured times: a JSON list of seconds, or what `python -m noloco_mega check --live` printed (the latency of each
    link in its table). Raises ValueError for anything else."""
    text = path.read_text(encoding="utf-8")
    found: object = [float(match) / 1000 for match in LINK_ROW.findall(text)]
    if not found:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
    numbers = isinstance(found, list) and all(type(value) in (int, float) for value in found)
    if not found or not numbers or not all(0 < value < math.inf for value in found):  # type: ignore[attr-defined]
        raise ValueError(f"{path} holds neither a JSON list of seconds above 0, nor the link table of check --live")
    return Measured(tuple(map(float, found)))  # type: ignore[call-overload]


def expected_pair(times: LogNormal) -> float:
    """E max(t₁, t₂) = (1 + erf(σ/2))·exp(μ + σ²/2): a pair swaps one message each way, at once."""
    return (1 + math.erf(times.sigma / 2)) * times.mean


def pair_seconds(times: Times, random: np.random.Generator, samples: int) -> np.ndarray:
    """How long exchanges in pairs take: [samples]."""
    return times.draw(random, (samples, 2)).max(1)


def tree_seconds(times: Times, replicas: int, random: np.random.Generator, samples: int) -> np.ndarray:
    """How long all-reduces over a binomial tree take, from the first message to the last arrival: [samples].

    Level by level half of those left send their sum to one of the other half, which goes on when its own and that one
    are there; then the total returns the same way. On the longest path 2·log2 N messages follow each other where N is a
    power of two, and no more than 2·⌈log2 N⌉ elsewhere.
    """
    levels = math.ceil(math.log2(replicas))
    size = 2**levels
    ready = np.zeros((samples, size))
    for level in range(levels):
        parents = np.arange(0, size, 2 ** (level + 1))
        children = parents + 2**level
        present = children < replicas
        parents, children = parents[present], children[present]
        arrived = ready[:, children] + times.draw(random, (samples, len(children)))
        ready[:, parents] = np.maximum(ready[:, parents], arrived)
    ready[:, 1:] = 0.0
    for level in reversed(range(levels)):
        parents = np.arange(0, size, 2 ** (level + 1))
        children = parents + 2**level
        present = children < replicas
        parents, children = parents[present], children[present]
        ready[:, children] = ready[:, parents] + times.draw(random, (samples, len(children)))
    return ready[:, :replicas].max(1)


def ring_seconds(
    times: Times, replicas: int, random: np.random.Generator, samples: int, latency_share: float
) -> np.ndarray:
    """How long all-reduces around a ring take: 2·(N − 1) rounds in which everybody passes on 1/N of the data.

    Of a whole message's time, `latency_share` is independent of its size: a part of 1/N takes
    share + (1 − share)/N of it. 0 is the ring's best case (bandwidth alone), 1 its worst.
    """
    part = latency_share + (1 - latency_share) / replicas
    ready = np.zeros((samples, replicas))
    sent = np.zeros_like(ready)
    for _ in range(2 * (replicas - 1)):
        sent = np.maximum(ready, sent) + part * times.draw(random, ready.shape)
        ready = np.maximum(ready, np.roll(sent, 1, axis=1))
    return ready.max(1)


def samples_for(messages: int, wanted: int) -> int:
    """As many samples as are wanted, if they do not take more than DRAWS times of that many messages; at least 2."""
    return max(2, min(wanted, DRAWS // messages))


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Training time per outer step without any communication time, in seconds: what waiting for each other costs."""

    barrier: float
    """Everybody waits for everybody, as an all-reduce has it."""
    pairs: float
    """Each pair waits for its slower half."""
    alone: float
    """Nobody waits: H times the mean step."""


def waiting(times: Times, replicas: int, inner_steps: int, outer_steps: int, seed: int) -> Waiting:
    """N replicas take `outer_steps` phases of H inner steps of random length, in the pairs of plan/pairing.py.

    A time is that of the mean replica at the end; with pairs, replicas are then at different outer steps' ends.
    """
    random = np.random.default_rng(seed)
    barrier, clocks, total = 0.0, np.zeros(replicas), 0.0
    for outer_step in range(outer_steps):
        phase = np.zeros(replicas)
        for _ in range(inner_steps):
            phase += times.draw(random, (replicas,))
        barrier += phase.max()
        total += phase.mean()
        clocks += phase
        for group in pairing.groups(seed, outer_step, range(replicas), 2):
            clocks[list(group)] = clocks[list(group)].max()
    return Waiting(
        barrier=float(barrier / outer_steps), pairs=float(clocks.mean() / outer_steps), alone=float(total / outer_steps)
    )
