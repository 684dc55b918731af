"""Which outer optimizer has which name in the configuration?"""

from __future__ import annotations

from noloco_mega.comm.membership import Peers
from noloco_mega.config import Noloco
from noloco_mega.engine.weights import Masters
from noloco_mega.outer.allreduce import AllReduce
from noloco_mega.outer.base import OuterOptimizer
from noloco_mega.outer.diloco import DiLoCo
from noloco_mega.outer.gossip import Gossip
from noloco_mega.outer.local import Local
from noloco_mega.outer.noloco import NoLoCo

OUTER_OPTIMIZERS: dict[str, type[OuterOptimizer]] = {
    "allreduce": AllReduce,
    "diloco": DiLoCo,
    "gossip": Gossip,
    "local": Local,
    "noloco": NoLoCo,
}


def build(masters: Masters, settings: Noloco, peers: Peers) -> OuterOptimizer:
    """The outer optimizer that `settings.optimizer` names. Raises ValueError for an unknown name."""
    if settings.optimizer not in OUTER_OPTIMIZERS:
        raise ValueError(
            f'noloco.optimizer "{settings.optimizer}" is unknown; known: {", ".join(sorted(OUTER_OPTIMIZERS))}'
        )
    return OUTER_OPTIMIZERS[settings.optimizer](masters, settings, peers)
