"""What if all replicas average their gradients before every inner step? Ordinary data parallelism, the baseline of all.

    g ← (1/N)·Σ_j g_j        g_j the gradient of replica j's own batch, before clipping

From equal weights every replica then takes the same inner step, as one run with the batches of all N together would.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from noloco_mega.outer.base import OuterOptimizer, OuterReport, report_of_all

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


class AllReduce(OuterOptimizer):
    """The baseline without an outer step. Every `inner_steps` inner steps it only reports what they moved."""

    catches_up = False  # everybody waits for the slowest

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        self.settings = settings
        self._masters = masters
        self._everybody = peers.everybody(settings)
        self._outer_step: int | None = None
        self._inner_steps = 0
        self._step_bytes = 0
        self._seconds = 0.0

    def before_inner_step(self) -> None:
        began = time.monotonic()
        self._step_bytes = self._everybody.mean_(self._masters.gradients)
        self._masters.publish_gradients()
        self._inner_steps += 1
        self._seconds += time.monotonic() - began

    def launch(self, outer_step: int) -> None:
        assert self._outer_step is None, "launched twice without apply"
        self._outer_step = outer_step

    def apply(self) -> OuterReport:
        assert self._outer_step is not None, "apply without launch"
        outer_step, self._outer_step = self._outer_step, None
        payload_bytes = self._inner_steps * self._step_bytes
        report = report_of_all(self._everybody, outer_step, self._seconds, payload_bytes)
        self._inner_steps, self._seconds = 0, 0.0
        return report

    def state_dict(self) -> dict[str, Any]:
        """The inner steps that no report counts yet."""
        return {"inner_steps": self._inner_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"inner_steps"}:
            raise ValueError(f'the state to load belongs to another outer optimizer than "allreduce": {sorted(state)}')
        self._inner_steps = int(state["inner_steps"])
