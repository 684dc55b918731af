"""Which number of inner steps do measurements of the spread call for?

Letters: H inner steps per outer step; D the replicas' relative deviation (merging.deviation) right before an outer
step, and A right after it.

The published rule knows three values of H and looks at how fast the spread grows, relative to itself. That growth is
the slower the longer the phase and the larger the spread, so that the rule calls for longer phases where the spread is
largest. `Target` asks what H would do to the spread: an outer step shrinks it by a factor that hardly depends on H,
and within a phase replicas drift apart steadily, their variance growing as H^p. Over many phases D² ∝ H^p, and
H·(target/D)^(2/p) is the number of inner steps at which D would be `target`. docs/laboratory.md has p as measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Rule(Protocol):
    """How H follows from the last phase."""

    def recommend(self, inner_steps: int, before: float, after_last: float) -> int:
        """H after a phase of `inner_steps` that began with the deviation `after_last` and ended with `before` (D)."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Always the same H."""

    def recommend(self, inner_steps: int, before: float, after_last: float) -> int:
        return inner_steps


@dataclass(frozen=True, kw_only=True)
class Published:
    """25 where the spread grows too fast, 100 where it is flat, 50 otherwise."""

    threshold: float = 0.01
    """Relative growth of the spread per inner step, (D/A − 1)/H: above it is too fast, below a quarter of it flat."""

    def recommend(self, inner_steps: int, before: float, after_last: float) -> int:
        growth = math.inf if after_last == 0 else (before / after_last - 1) / inner_steps
        if growth > self.threshold:
            return 25
        return 100 if growth < self.threshold / 4 else 50


@dataclass(frozen=True, kw_only=True)
class Target:
    """The H at which the spread before an outer step would be `target`."""

    target: float
    """D that is wanted."""
    power: float = 2.0
    """p: 2 for replicas that drift apart steadily, 1 for ones that walk at random."""
    least: int = 5
    most: int = 500

    def recommend(self, inner_steps: int, before: float, after_last: float) -> int:
        if before == 0:
            return self.most
        wanted = inner_steps * (self.target / before) ** (2 / self.power)
        return max(self.least, min(self.most, round(wanted)))
