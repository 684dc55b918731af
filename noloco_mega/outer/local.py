"""What if the replicas never exchange? Each trains alone; outer steps are only counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noloco_mega.outer.base import OuterOptimizer, OuterReport, refuse_state

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


class Local(OuterOptimizer):
    """The baseline without an outer step: no bytes, and no change of any weight."""

    catches_up = False  # there is nobody to meet

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        self.settings = settings
        self._outer_step: int | None = None

    def launch(self, outer_step: int) -> None:
        assert self._outer_step is None, "launched twice without apply"
        self._outer_step = outer_step

    def apply(self) -> OuterReport:
        assert self._outer_step is not None, "apply without launch"
        report = OuterReport(outer_step=self._outer_step)
        self._outer_step = None
        return report

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_state("local", state)
