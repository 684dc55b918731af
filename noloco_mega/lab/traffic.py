"""How much less is sent than fully sharded training would send? Arithmetic on a config, for the same accelerators.

Letters: W accelerators of the run, P parameters of the model, a bytes of a parameter on the wire, H inner steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from noloco_mega import costs
from noloco_mega.config import Config

GATHERED = 3
"""Times that fully sharded training moves the model in an inner step: weights gathered for the forward and again for
the backward pass, gradients reduced and scattered (Zhao et al., arXiv 2304.11277, section 3.2). With gradient
accumulation it would be more."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Bytes that all accelerators together send per inner step."""

    fully_sharded: float
    """3·(W − 1)·P·a: each rank sends its part of the model to W − 1 others, three times, around a ring."""
    outer: float
    """The run's outer steps, spread over their inner steps."""
    routes: float
    """The run's activations and their gradients between stages, inside or outside a replica."""

    @property
    def outer_ratio(self) -> float:
        """How many times more fully sharded training sends than the outer steps."""
        return self.fully_sharded / self.outer

    @property
    def ratio(self) -> float:
        """The same with everything that the run sends between ranks."""
        return self.fully_sharded / (self.outer + self.routes)


def compare(config: Config) -> Comparison:
    """Raises ValueError for a run whose replicas exchange nothing in outer steps."""
    traffic = costs.traffic(config)
    if not traffic.replica_outer:
        raise ValueError(f"{config.run.name} sends nothing in outer steps, there is nothing to compare")
    ranks, replicas = config.topology.grid().size, config.topology.replicas
    sharded = GATHERED * (ranks - 1) * costs.model_parameters(config) * costs.activation_bytes(config)
    return Comparison(
        fully_sharded=float(sharded),
        outer=replicas * traffic.replica_outer / config.noloco.inner_steps,
        routes=float(replicas * traffic.replica_inner),
    )
