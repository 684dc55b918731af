"""By what of the run's configuration do the leaders decide, and which numbers may they name?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 50
"""No step and no announcement comes this far."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What of the run's configuration one leader decides by."""

    replica: int
    replicas: int
    site: tuple[int, ...]
    routes: bool
    """Whether microbatches are routed between replicas at all."""
    heals: bool
    """Whether a replica can take over a live one's state while the run goes on."""
    columns: int
    """D·T: each column of ranks has links, and a store to form them, of its own."""
    ranks: int
    inner_steps: int
    steps: int
    heartbeat_seconds: float
    form_seconds: float
    """How long a circuit may take to form."""
    host: str

    def next_number(self, highest: int) -> int:
        """Higher than `highest`, and never the number of another replica's, whoever else may speak at the moment."""
        return (highest // self.replicas + 1) * self.replicas + self.replica


def count(value: Any) -> int:
    """A number of steps or announcements that a run can reach. Raises ValueError."""
    found = int(value)
    if not 0 <= found < LARGEST:
        raise ValueError(f"{found} is no count of this run's")
    return found
