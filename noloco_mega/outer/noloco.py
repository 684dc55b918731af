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

Two options change the formula, alone or together:

`nesterov: true` looks ahead. With m_i = (β/n)·Σ_j Δ_j − γ·(φ_i − (1/n)·Σ_j φ_j), what the step adds to α·δ_i,

    δ_i ← α·δ_i + m_i
    φ_i ← φ_i + α·δ_i + m_i

which is torch.optim.SGD(lr=β, momentum=α, nesterov=True) on φ_i with the gradient −m_i/β: both the outer gradients and
the pull of γ are evaluated where the momentum leads. With one group of all replicas it is DiLoCo's step of that name.

`combine: "after"` adapts, then combines (as diffusion strategies do: Sayed, "Adaptation, Learning, and Optimization
over Networks", 2014). Every replica steps by its own outer gradient, and the weights ψ that come out are averaged:

    δ_i ← α·δ_i + β·Δ_i
    ψ_i ← φ_i + δ_i                         with `nesterov`: φ_i + α·δ_i + β·Δ_i
    φ_i ← ψ_i − γ·(ψ_i − (1/n)·Σ_j ψ_j)     γ = 1: the mean

One tensor travels as well, ψ_j. The momentum stays the replica's own, and the pull does not enter it: no overshooting
can build up, so that any α < 1 is stable with any γ in (0, 2), whoever pairs with whom. To average momenta too would
take a second tensor; to let the pull enter them (δ_i ← new φ_i − old φ_i) would bring back the bounds of look-ahead.
The mean over replicas takes the same steps in both forms.

Shapes: all tensors are flat, [P] with P the elements of one master; c_j and ψ_j live in θ_j's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
    nesterov: bool = False,
) -> None:
    """δ ← α·δ + m with m = (1/n)·Σ_j c_j − γ·φ, and φ ← φ + δ − β·λ·φ (`nesterov`: φ + α·δ + m − β·λ·φ), in place; the
    contributions are only read.

    All members must pass them in the same order, their own included: floating-point sums depend on it, and with one
    order all members add the bitwise same mean.
    """
    move = mean(contributions).sub_(phi, alpha=gamma)
    momentum_step_(phi, delta, move, alpha=alpha, beta=beta, weight_decay=weight_decay, nesterov=nesterov)


class Form(Protocol):
    """The two halves of a step, on flat tensors [P] and in place."""

    @staticmethod
    def at_rest(settings: Noloco) -> float:
        """What a member brings that has not moved, in units of φ."""
        ...

    @staticmethod
    def contribute_(theta: torch.Tensor, phi: torch.Tensor, delta: torch.Tensor, settings: Noloco) -> None:
        """θ becomes what this member brings to its group; φ stays as it is."""
        ...

    @staticmethod
    def update_(
        phi: torch.Tensor,
        delta: torch.Tensor,
        own: torch.Tensor,
        contributions: Sequence[torch.Tensor],
        settings: Noloco,
    ) -> None:
        """φ and δ become what they are after the step. `contributions` are what all members bring, in an order that is
        the same for all of them, and `own` is this member's. Both are only read."""
        ...


class InStep(Form):
    """`combine: "step"`."""

    @staticmethod
    def at_rest(settings: Noloco) -> float:
        return settings.gamma

    @staticmethod
    def contribute_(theta: torch.Tensor, phi: torch.Tensor, delta: torch.Tensor, settings: Noloco) -> None:
        contribution_(theta, phi, beta=settings.outer_lr, gamma=settings.gamma)

    @staticmethod
    def update_(
        phi: torch.Tensor,
        delta: torch.Tensor,
        own: torch.Tensor,
        contributions: Sequence[torch.Tensor],
        settings: Noloco,
    ) -> None:
        update_(
            phi,
            delta,
            contributions,
            alpha=settings.outer_momentum,
            beta=settings.outer_lr,
            gamma=settings.gamma,
            weight_decay=settings.weight_decay,
            nesterov=settings.nesterov,
        )


class AfterStep(Form):
    """`combine: "after"`. Between the halves δ belongs to the step that is under way, and φ to the last one."""

    @staticmethod
    def at_rest(settings: Noloco) -> float:
        return 1.0

    @staticmethod
    def contribute_(theta: torch.Tensor, phi: torch.Tensor, delta: torch.Tensor, settings: Noloco) -> None:
        alpha, beta = settings.outer_momentum, settings.outer_lr
        move = theta.sub_(phi).mul_(beta)
        delta.mul_(alpha).add_(move)
        psi = move.add_(delta, alpha=alpha) if settings.nesterov else move.copy_(delta)
        psi.add_(phi, alpha=1 - beta * settings.weight_decay)

    @staticmethod
    def update_(
        phi: torch.Tensor,
        delta: torch.Tensor,
        own: torch.Tensor,
        contributions: Sequence[torch.Tensor],
        settings: Noloco,
    ) -> None:
        torch.lerp(own, mean(contributions), settings.gamma, out=phi)


FORMS: dict[str, type[Form]] = {"step": InStep, "after": AfterStep}
"""By the name that noloco.combine has."""


class NoLoCo(SlowWeights):
    """The outer step on one rank's masters, among the group that the plan draws.

    Memory beside the masters: φ, δ, and what the exchange needs. With one group of all replicas this is DiLoCo.
    """

    catches_up = True

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        super().__init__(masters, settings, peers)
        self._form = FORMS[settings.combine]
        how = coding.build(settings, masters.tensors, peers.replica, self.phi, self._form.at_rest(settings))
        self._exchange = GroupExchange(masters, settings, peers, how)

    @torch.no_grad()
    def launch(self, outer_step: int) -> None:
        assert self._exchange.idle, "launched twice without apply"
        for theta, phi, delta in zip(self._masters.tensors, self.phi, self.delta, strict=True):
            self._form.contribute_(theta, phi, delta, self.settings)
        self._exchange.launch(outer_step)

    @torch.no_grad()
    def apply(self) -> OuterReport:
        masters = self._masters.tensors
        group = self._exchange.finish()
        for index, part in parts(masters):
            phi = self.phi[index][part]
            theta, delta = masters[index][part], self.delta[index][part]
            self._form.update_(phi, delta, theta, group.tensors(index, part), self.settings)
            theta.copy_(phi)
        self._masters.publish()
        return group.report

    def state_dict(self) -> dict[str, Any]:
        assert self._exchange.idle, "the state is only whole between outer steps"
        return super().state_dict() | self._exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._exchange.load_state_dict(state)
