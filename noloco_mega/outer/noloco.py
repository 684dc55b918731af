"""How do a few replicas step together? NoLoCo's modified Nesterov step, one exchange among n replicas.

NoLoCo (arXiv 2506.10911v1), Eq. 1 to 3, for the members j of replica i's group and Δ_j = θ_j − φ_j:

    δ_i ← α·δ_i + (β/n)·Σ_j Δ_j − γ·(φ_i − (1/n)·Σ_j φ_j)
    φ_i ← φ_i + δ_i
    θ_i ← φ_i

Deviations, each on purpose:
- The sign of β. Eq. 2 prints −β with Δ = θ − φ, which walks away from θ; Eq. 32 of the appendix has +β, as here.
- One tensor travels instead of two. The sums need only c_j = β·Δ_j + γ·φ_j, and the first line becomes
  δ_i ← α·δ_i + (1/n)·Σ_j c_j − γ·φ_i. A replica alone (n = 1) takes δ ← α·δ + β·Δ in the same form.
- With `codec` "modulo" c_j travels in a few bits per weight, and what stands for it in the sum is near it (coding.py).
- Decoupled weight decay λ, absent from the paper: φ ← φ + δ − β·λ·φ.

Shapes: all tensors are flat, [P] with P the elements of one master; c_j lives in θ_j's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from noloco_mega.outer import coding
from noloco_mega.outer.base import OuterReport, parts
from noloco_mega.outer.group import GroupExchange, mean
from noloco_mega.outer.slow import SlowWeights, momentum_step_

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


def contribution_(theta: torch.Tensor, phi: torch.Tensor, *, beta: float, gamma: float) -> None:
    """θ ← c = β·Δ + γ·φ = β·θ + (γ − β)·φ, in place: what one member brings to its group."""
    theta.mul_(beta).add_(phi, alpha=gamma - beta)


def update_(
    phi: torch.Tensor,
    delta: torch.Tensor,
    contributions: Sequence[torch.Tensor],
    *,
    alpha: float,
    beta: float,
    gamma: float,
    weight_decay: float,
) -> None:
    """δ ← α·δ + (1/n)·Σ_j c_j − γ·φ and φ ← φ + δ − β·λ·φ, in place; the contributions are only read.

    All members must pass them in the same order, their own included: floating-point sums depend on it, and with one
    order all members add the bitwise same mean.
    """
    move = mean(contributions).sub_(phi, alpha=gamma)
    momentum_step_(phi, delta, move, alpha=alpha, beta=beta, weight_decay=weight_decay)


class NoLoCo(SlowWeights):
    """The outer step on one rank's masters, among the group that the plan draws.

    Memory beside the masters: φ, δ, and what the exchange needs. There is no look-ahead evaluation, so with one group
    of all replicas this is DiLoCo with heavy-ball momentum.
    """

    catches_up = True

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        super().__init__(masters, settings, peers)
        # A replica that has not moved brings γ·φ.
        how = coding.build(settings, masters.tensors, peers.replica, self.phi, settings.gamma)
        self._exchange = GroupExchange(masters, settings, peers, how)

    @torch.no_grad()
    def launch(self, outer_step: int) -> None:
        assert self._exchange.idle, "launched twice without apply"
        for theta, phi in zip(self._masters.tensors, self.phi, strict=True):
            contribution_(theta, phi, beta=self.settings.outer_lr, gamma=self.settings.gamma)
        self._exchange.launch(outer_step)

    @torch.no_grad()
    def apply(self) -> OuterReport:
        settings, masters = self.settings, self._masters.tensors
        group = self._exchange.finish()
        for index, part in parts(masters):
            phi = self.phi[index][part]
            update_(
                phi,
                self.delta[index][part],
                group.tensors(index, part),
                alpha=settings.outer_momentum,
                beta=settings.outer_lr,
                gamma=settings.gamma,
                weight_decay=settings.weight_decay,
            )
            masters[index][part].copy_(phi)
        self._masters.publish()
        return group.report

    def state_dict(self) -> dict[str, Any]:
        assert self._exchange.idle, "the state is only whole between outer steps"
        return super().state_dict() | self._exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._exchange.load_state_dict(state)
