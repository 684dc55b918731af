"""How do a few replicas average their weights and nothing else? Gossip: no outer learning rate, no momentum.

For the members j of replica i's group, drawn as NoLoCo draws it:

    θ_i ← (1/n)·Σ_j θ_j

which is NoLoCo's step with α = 0 and β = γ = 1. With `codec` "modulo" θ_j travels in a few bits per weight (coding.py).
Shapes: all tensors are flat, [P] with P the elements of one master.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from noloco_mega.outer import coding
from noloco_mega.outer.base import OuterOptimizer, OuterReport, parts, refuse_state
from noloco_mega.outer.group import GroupExchange, mean
from noloco_mega.outer.slow import load_flat

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


class Gossip(OuterOptimizer):
    """The baseline of pairwise averaging. A replica whose partners do not answer keeps its weights.

    With a codec it also keeps φ, what the last outer step has left, by which a movement is told.
    """

    catches_up = True

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None:
        self.settings = settings
        self._masters = masters
        self._coded = settings.codec != "none"
        self.phi = [theta.detach().clone() for theta in masters.tensors] if self._coded else []
        how = coding.build(settings, masters.tensors, peers.replica, self.phi, gamma=1.0)
        self._exchange = GroupExchange(masters, settings, peers, how)

    @torch.no_grad()
    def launch(self, outer_step: int) -> None:
        self._exchange.launch(outer_step)

    @torch.no_grad()
    def apply(self) -> OuterReport:
        masters = self._masters.tensors
        group = self._exchange.finish()
        for index, part in parts(masters):
            masters[index][part].copy_(mean(group.tensors(index, part)))
        if self._coded:
            for phi, theta in zip(self.phi, masters, strict=True):
                phi.copy_(theta)
        self._masters.publish()
        return group.report

    def state_dict(self) -> dict[str, Any]:
        assert self._exchange.idle, "the state is only whole between outer steps"
        return {"phi": self.phi, **self._exchange.state_dict()} if self._coded else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._coded:
            refuse_state("gossip", state)
            return
        if "phi" not in state:
            raise ValueError(
                'the outer optimizer "gossip" with a codec needs φ, and the state to load was saved without'
            )
        load_flat("phi", self.phi, state["phi"])
        self._exchange.load_state_dict(state)
