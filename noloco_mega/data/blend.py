"""Which sample is number i of several data sets mixed by weight?

One epoch of a blend holds every sample of every data set, and of those whose weight is larger than their size as many
repetitions as the weights ask for. Its numbers run through the data sets one after the other; the order in which they
are read is plan/sampling.py's business, as for a single data set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Samples(Protocol):
    """What a loader reads from: a data set, or a blend of several."""

    prefix: str

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> np.ndarray: ...

    def digest(self) -> str: ...


class Blend:
    """Several data sets as one, the share of each in an epoch being its weight (to one sample)."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        """`weights` are above 0; only their ratios count."""
        assert len(parts) == len(weights) > 0 and min(weights) > 0
        self.prefix = ", ".join(part.prefix for part in parts)
        self._parts = list(parts)
        shares = [weight / sum(weights) for weight in weights]
        length = max(len(part) / share for part, share in zip(parts, shares, strict=True))
        # The data set that decides the length must not gain a sample by rounding.
        self.counts = [math.ceil(share * length - 1e-6) for share in shares]
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Inputs and next tokens of some samples: int64 [count, S + 1]."""
        sources = np.searchsorted(self._ends, indices, side="right")
        rows: np.ndarray | None = None
        for source in np.unique(sources):
            mine = sources == source
            start = self._ends[source] - self.counts[source]
            found = self._parts[source].read((indices[mine] - start) % len(self._parts[source]))
            if rows is None:
                rows = np.empty((len(indices), found.shape[1]), dtype=found.dtype)
            rows[mine] = found
        assert rows is not None, "no samples asked for"
        return rows

    def digest(self) -> str:
        """The same for blends that hold the same samples under the same numbers."""
        whole = [f"{part.digest()} {count}" for part, count in zip(self._parts, self.counts, strict=True)]
        return hashlib.sha256("\n".join(whole).encode()).hexdigest()
