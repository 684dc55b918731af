"""What do outer optimizers with slow weights have in common? φ and δ beside the masters, and one kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from noloco_mega.outer.base import OuterOptimizer

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


def momentum_step_(
    phi: torch.Tensor,
    delta: torch.Tensor,
    move: torch.Tensor,
    *,
    alpha: float,
    beta: float,
    weight_decay: float,
    nesterov: bool = False,
) -> None:
    """δ ← α·δ + move and φ ← φ + δ − β·λ·φ, in place; `nesterov` looks ahead: φ ← φ + α·δ + move − β·λ·φ.

    `move` already has β in it, so δ is β times the momentum buffer of torch.optim.SGD.
    """
    delta.mul_(alpha).add_(move)
    phi.mul_(1 - beta * weight_decay)
    if nesterov:
        phi.add_(delta, alpha=alpha).add_(move)
    else:
        phi.add_(delta)


class SlowWeights(OuterOptimizer):
    """The state of one rank: slow weights φ and outer momentum δ, flat and sharded exactly as the masters are."""

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        self.settings = settings
        self.phi = [theta.detach().clone() for theta in masters.tensors]
        self.delta = [torch.zeros_like(phi) for phi in self.phi]
        self._masters = masters
        self._peers = peers

    def state_dict(self) -> dict[str, Any]:
        return {"phi": self.phi, "delta": self.delta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_flat("phi", self.phi, state["phi"])
        load_flat("delta", self.delta, state["delta"])


@torch.no_grad()
def load_flat(name: str, own: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy `values` into an optimizer's own flat tensors. Raises ValueError for other sizes."""
    sizes, loaded = [tensor.numel() for tensor in own], [value.numel() for value in values]
    if loaded != sizes:
        raise ValueError(
            f"the outer optimizer's {name} has tensors of {sizes} elements on this rank, the state to load {loaded}; "
            "load it with the topology that saved it"
        )
    for tensor, value in zip(own, values, strict=True):
        tensor.copy_(value)
