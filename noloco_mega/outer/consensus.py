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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from noloco_mega.comm.exchange import AFTER_TRAINING, Received
from noloco_mega.engine.weights import Masters
from noloco_mega.outer.base import parts

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Config, Noloco

LONGER = 0.1
"""Of the deadline, added in each round: who waits for one that waits in vain, a round earlier, must outlast it."""
PATIENCE = 2
"""A partner that has been missed so often is not waited for any more."""


class Weights(Protocol):
    """What is averaged: `Masters`."""

    @property
    def tensors(self) -> list[torch.Tensor]: ...

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
    while number < most_rounds - 1 and number - int(apart) < quiet_rounds:
        number += 1
        outer_step = AFTER_TRAINING + number
        asked = [p for p in peers.partners(outer_step, settings) if p in peers.addresses and misses[p] < PATIENCE]
        deadline_seconds = settings.exchange_deadline_seconds * (1 + LONGER * number)
        received = _swap([*weights.tensors, apart], peers, outer_step, asked, deadline_seconds, settings)
        misses.update(missed := set(asked) - received.keys())
        if received:
            spread = _spread(weights.tensors, list(received.values()), peers)
            _average(weights.tensors, list(received.values()))
            if spread > tolerance:
                apart[0] = number
            apart[0] = max(int(apart), *(int(tensors[-1]) for tensors in received.values()))
        if missed:
            # Who has waited in vain goes on with the round that others are at, and knows nothing of those between.
            (furthest,) = peers.agree(peers.exchange.latest_after_training)
            if furthest > outer_step + 1:
                number = min(furthest - AFTER_TRAINING, most_rounds) - 1
                apart[0] = max(int(apart), number)
    weights.publish()
    reached = number - int(apart) >= quiet_rounds and spread is not None
    return Consensus(number + 1, reached, spread, tuple(misses.elements()))


def _swap(
    own: Sequence[torch.Tensor],
    peers: Peers,
    outer_step: int,
    asked: Sequence[int],
    deadline_seconds: float,
    settings: Noloco,
) -> dict[int, list[torch.Tensor]]:
    """What all ranks of this replica hold of the partners, whole and finite: tensors like `own`."""
    sent = [tensor.detach().cpu() for tensor in own]
    buffers = {partner: [torch.empty_like(tensor) for tensor in sent] for partner in asked}
    pending = peers.exchange.launch(
        outer_step,
        sent,
        buffers,
        {partner: peers.addresses[partner] for partner in asked},
        deadline_seconds,
        settings.transfer_cap_seconds,
    )
    outcomes = pending.wait()
    good = [
        isinstance(outcomes[partner], Received) and all(bool(t.isfinite().all()) for t in buffers[partner])
        for partner in asked
    ]
    return {p: buffers[p] for p, whole in zip(asked, peers.agree(*good), strict=True) if whole}


def _spread(own: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]], peers: Peers) -> float:
    """‖θ_i − θ_j‖ / ‖θ_i‖ over the whole replica, the mean over partners j."""
    squares = [_squared_distance(own, None), *(_squared_distance(own, other) for other in others)]
    norm, *differences = peers.total(squares)
    return sum((difference / norm) ** 0.5 for difference in differences) / len(differences) if norm else 0.0


def _squared_distance(own: Sequence[torch.Tensor], other: Sequence[torch.Tensor] | None) -> float:
    """Σ (θ − other)², or Σ θ²."""
    total = 0.0
    for index, part in parts(own):
        difference = own[index][part]
        if other is not None:
            difference = difference - other[index][part].to(difference.device)
        total += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
    return total


def _average(own: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]]) -> None:
    """θ becomes the mean over the group. In a pair both get the same bits."""
    for index, part in parts(own):
        theta = own[index][part]
        for other in others:
            theta.add_(other[index][part].to(theta.device))
        theta.div_(1 + len(others))
