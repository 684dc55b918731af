"""How do all replicas step together every H inner steps? DiLoCo (arXiv 2311.08105): an all-reduce of outer gradients.

With the outer gradient Δ_j = θ_j − φ of replica j, the same φ and δ on all N replicas:

    δ ← α·δ + (β/N)·Σ_j Δ_j
    φ ← φ + δ                               heavy-ball: NoLoCo's step with one group of everybody
    φ ← φ + α·δ + (β/N)·Σ_j Δ_j             in place of it with `nesterov: true`
    θ ← φ

The second is torch.optim.SGD(lr=β, momentum=α, nesterov=True) on φ with the gradient −(1/N)·Σ_j Δ_j, which DiLoCo's
authors and most other code use; the paper on NoLoCo compares with momentum 0.3 and does not say which form it ran.
Weight decay λ is decoupled as in outer/noloco.py. Shapes: all tensors are flat, [P] with P the elements of one master.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from noloco_mega import checks
from noloco_mega.outer.base import OuterReport, parts, report_of_all
from noloco_mega.outer.slow import SlowWeights, momentum_step_

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


class DiLoCo(SlowWeights):
    """The baseline that waits for everybody. Memory beside the masters: φ and δ; Δ and its mean live in θ's memory."""

    catches_up = False  # everybody waits for the slowest

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        """Raises ValueError for a codec, which only the simulator has."""
        for problem in checks.run_problems(settings):
            raise ValueError(problem)
        super().__init__(masters, settings, peers)
        self._everybody = peers.everybody(settings)
        self._outer_step: int | None = None

    @torch.no_grad()
    def launch(self, outer_step: int) -> None:
        assert self._outer_step is None, "launched twice without apply"
        self._outer_step = outer_step
        for theta, phi in zip(self._masters.tensors, self.phi, strict=True):
            theta.sub_(phi)

    @torch.no_grad()
    def apply(self) -> OuterReport:
        assert self._outer_step is not None, "apply without launch"
        outer_step, self._outer_step = self._outer_step, None
        began = time.monotonic()
        payload_bytes = self._everybody.mean_(self._masters.tensors)
        seconds = time.monotonic() - began
        self._refuse_not_finite(outer_step)
        self._step()
        self._masters.publish()
        return report_of_all(self._everybody, outer_step, seconds, payload_bytes)

    def state_dict(self) -> dict[str, Any]:
        assert self._outer_step is None, "the state is only whole between outer steps"
        return super().state_dict()

    def _refuse_not_finite(self, outer_step: int) -> None:
        """One replica whose weights have become NaN has handed that on to all others by now."""
        masters = self._masters.tensors
        finite = all(bool(torch.isfinite(masters[index][part]).all()) for index, part in parts(masters))
        if self._peers.agree(finite) != (1,):
            raise ValueError(
                f"outer step {outer_step + 1}: the mean of the replicas' outer gradients is not finite, so that at "
                "least one replica's weights are not. DiLoCo hands that on to all: go on from an earlier checkpoint "
                "(--resume STEP), with a lower learning rate or more clipping"
            )

    def _step(self) -> None:
        """θ, which holds the mean of Δ, becomes φ."""
        settings, masters = self.settings, self._masters.tensors
        for index, part in parts(masters):
            phi, theta = self.phi[index][part], masters[index][part]
            momentum_step_(
                phi,
                self.delta[index][part],
                theta.mul_(settings.outer_lr),
                alpha=settings.outer_momentum,
                beta=settings.outer_lr,
                weight_decay=settings.weight_decay,
                nesterov=settings.nesterov,
            )
            theta.copy_(phi)
