"""How do replicas end equal? Rounds of averaging in random groups behind the last inner step, until all are close.

A round is an exchange of the weights θ themselves: the members of a group, drawn as for an outer step, take their mean.
That keeps the mean over all replicas, and in pairs the expected variance shrinks to (N − 2) / (2(N − 1)) of itself per
round (a third for N = 4, half for N → ∞).

Nobody knows the spread of all replicas. Each tells its partners the latest round in which it knows of a group that was
further apart than the tolerance; such news reaches everybody in about 2·log2 N rounds. When none is younger than that,
it stops, and so do the others in the same round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from noloco_mega.comm.seats import AFTER_TRAINING
from noloco_mega.engine.weights import Masters
from noloco_mega.outer.base import parts
from noloco_mega.outer.coding import Exact
from noloco_mega.outer.group import GroupExchange, Swapped, mean

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Config, Noloco

LONGER = 0.1
"""Of the deadline, added in each round: who waits for one that waits in vain, a round earlier, must outlast it."""
PATIENCE = 2
"""A partner that has been missed so often is not waited for any more."""


class Weights(Swapped, Protocol):
    """What is averaged: `Masters`."""

    def publish(self) -> None: ...


@dataclass(frozen=True)
class Consensus:
    """How it ended; equal on all ranks of a replica."""

    rounds: int
    reached: bool
    """Whether all that this replica has heard of are within the tolerance."""
    spread: float | None
    """‖θ_i − θ_j‖ / ‖θ_i‖ before the last round that met somebody, the mean over its partners j; None if none did."""
    missed: tuple[int, ...]
    """Partners that were missed, each as often as it was."""


def finish(
    config: Config, engine: DeepSpeedEngine, peers: Peers, step: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """At the end of a run that wants it, average until its replicas are close; what is to be noted with the weights.

    A run that was stopped before its last step is left alone: it will go on from its checkpoints.
    """
    run = config.run
    if not run.final_consensus or step < run.steps or config.topology.replicas == 1:
        return {}
    settings, tolerance = config.noloco, run.consensus_tolerance
    done = reach(Masters(engine), peers, settings, tolerance=tolerance, most_rounds=run.consensus_rounds)
    verdict = "consensus" if done.reached else f"no consensus (spread above {tolerance:g})"
    last = "nobody was met" if done.spread is None else f"spread {done.spread:.2e} before the last one"
    missed = f"; missed replicas: {', '.join(map(str, dict.fromkeys(done.missed)))}" if done.missed else ""
    tell(f"{verdict} after {done.rounds} rounds, {last}{missed}")
    return {"consensus": asdict(done)}


@torch.no_grad()
def reach(weights: Weights, peers: Peers, settings: Noloco, *, tolerance: float, most_rounds: int) -> Consensus:
    """Average this rank's part of the weights with its twins, in place. Collective over the replica.

    Bounded by `most_rounds` rounds, each by a deadline, whoever is missing. A replica whose weights are not finite
    stays out, as nobody would take them.
    """
    if not peers.agree(all(bool(tensor.isfinite().all()) for tensor in weights.tensors))[0]:
        return Consensus(0, False, None, ())
    replicas = len(peers.members(AFTER_TRAINING, settings))
    quiet_rounds = 2 * math.ceil(math.log2(max(replicas, 2))) + 1
    misses: Counter[int] = Counter()
    spread, apart, number = None, torch.tensor([-1]), -1
    exchange = GroupExchange(weights, settings, peers, Exact(weights.tensors), notes=[apart])
    while number < most_rounds - 1 and number - int(apart) < quiet_rounds:
        number += 1
        outer_step = AFTER_TRAINING + number
        given_up = [replica for replica, times in misses.items() if times >= PATIENCE]
        exchange.launch(outer_step, but=given_up, patience=1 + LONGER * number)
        group = exchange.finish()
        misses.update(missed := group.report.missed.keys())
        if group.report.received:
            spread = group.report.spread or 0.0  # none where all weights are 0
            for index, part in parts(weights.tensors):
                weights.tensors[index][part].copy_(mean(group.tensors(index, part)))
            if spread > tolerance:
                apart[0] = number
            apart[0] = max(int(tensors[-1]) for tensors in group.members.values())
        if missed:
            # Who has waited in vain goes on with the round that others are at, and knows nothing of those between.
            (furthest,) = peers.agree(peers.exchange.latest_after_training)
            if furthest > outer_step + 1:
                number = min(furthest - AFTER_TRAINING, most_rounds) - 1
                apart[0] = max(int(apart), number)
    weights.publish()
    reached = number - int(apart) >= quiet_rounds and spread is not None
    return Consensus(number + 1, reached, spread, tuple(misses.elements()))
