"""Do the replicas of a run stay together? Its spread over time, from what a run or a simulation has written.

At every outer step each replica writes down the same few of its weights, right before and right after it
(probe.jsonl). From those of all replicas follows the variance over replicas; from a pair's alone an estimate of it: for
a pair drawn at random, (x_i − x_j)²/2 has the unbiased variance over all replicas as its expectation.

Letters: N replicas, K weights of a probe, H inner steps per outer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noloco_mega.lab.inner_steps import Rule
from noloco_mega.metrics import read_rows


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The inner phase that ends with an outer step, and that step."""

    outer_step: int
    """Counted from 1."""
    step: int
    """Inner steps done by then."""
    inner_steps: int
    """H of this phase."""
    lr: float
    """Of its last inner step."""
    std_before: float
    """Standard deviation of a weight over replicas (root of the mean unbiased variance) right before the outer step."""
    std_after: float
    """Right after it."""
    std_of_pairs: float | None
    """std_before as the pairs of this outer step alone would estimate it; None where nobody had a partner."""
    relative_before: float
    """sqrt(mean_i ‖x_i − x̄‖²)/‖x̄‖ before the outer step, as merging.deviation has it for whole models."""
    relative_after: float
    scores: dict[int, float]
    """Of each replica: how far it is from the reference, in units of how far two replicas typically are."""


def variance(weights: np.ndarray) -> float:
    """The unbiased variance over replicas, mean over weights: [N, K]."""
    return float(weights.var(0, ddof=1).mean())


def pair_variance(weights: np.ndarray, pairs: Sequence[tuple[int, int]]) -> float:
    """The estimate of `variance` from pairs of rows alone; unbiased for pairs drawn at random."""
    return float(np.mean([((weights[i] - weights[j]) ** 2).mean() / 2 for i, j in pairs]))


def relative(weights: np.ndarray) -> float:
    """sqrt(mean_i ‖x_i − x̄‖²)/‖x̄‖ of [N, K]."""
    mean = weights.mean(0)
    return float(np.sqrt(((weights - mean) ** 2).sum(1).mean()) / np.linalg.norm(mean))


def divergence(weights: np.ndarray, reference: int) -> np.ndarray:
    """‖x_i − x_ref‖ over the root mean square of ‖x_i − x_j‖ over all pairs: [N].

    About 1 for replicas that differ alike; one replica that is far from all others stands out, and if all stand out
    it is the reference that is far away. Zeros where all are equal.
    """
    typical = math.sqrt(2 * variance(weights) * weights.shape[1])
    distance = np.linalg.norm(weights - weights[reference], axis=1)
    return distance / typical if typical > 0 else np.zeros(len(weights))


def phases(folder: Path, reference: int = 0) -> list[Phase]:
    """The phases of a run's or simulation's folder, for which at least two replicas have written their probes.

    Raises ValueError if there are none, or none in which the reference took part.
    """
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row.get("outer_step") is not None]
    probes = {
        int(path.parent.name.removeprefix("replica_")): {
            row["outer_step"]: row for row in read_rows(path, "outer_step")
        }
        for path in sorted(folder.glob("replica_*/probe.jsonl"))
    }
    of_step: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["outer_step"] in probes.get(row["replica"], {}):
            of_step.setdefault(row["outer_step"], {})[row["replica"]] = row
    found: list[Phase] = []
    last_step = 0
    for outer_step in sorted(of_step):
        members = of_step[outer_step]
        step = max(row["step"] for row in members.values())
        if len(members) > 1 and reference in members:
            pages = {replica: probes[replica][outer_step] for replica in members}
            found.append(_phase(members, pages, step - last_step, reference))
        last_step = step
    if not found:
        raise ValueError(
            f"{folder} has no outer step for which two replicas, one of them replica {reference}, have written probes"
        )
    return found


def _phase(
    rows: dict[int, dict[str, Any]], pages: dict[int, dict[str, Any]], inner_steps: int, reference: int
) -> Phase:
    """`rows` and `pages` are the members' rows and probes of one outer step, by replica."""
    members = sorted(rows)
    before, after = (np.array([pages[replica][when] for replica in members]) for when in ("before", "after"))
    place = {replica: number for number, replica in enumerate(members)}
    pairs = {
        (min(replica, partner), max(replica, partner))
        for replica, row in rows.items()
        for partner in _partners(row["partner"])
        if partner in place
    }
    numbered = [(place[one], place[other]) for one, other in sorted(pairs)]
    first = rows[reference]
    return Phase(
        outer_step=first["outer_step"],
        step=max(row["step"] for row in rows.values()),
        inner_steps=inner_steps,
        lr=first["lr"],
        std_before=math.sqrt(variance(before)),
        std_after=math.sqrt(variance(after)),
        std_of_pairs=math.sqrt(pair_variance(before, numbered)) if numbered else None,
        relative_before=relative(before),
        relative_after=relative(after),
        scores=dict(zip(members, divergence(before, place[reference]).tolist(), strict=True)),
    )


def _partners(partner: int | list[int] | None) -> list[int]:
    if partner is None:
        return []
    return partner if isinstance(partner, list) else [partner]


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's r; None where one of them does not vary."""
    if len(one) < 3 or np.std(one) == 0 or np.std(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What the phases of a run say together."""

    correlation_with_lr: float | None
    """Of the spread before outer steps with the inner learning rate."""
    variance_per_step: float
    """Growth of the variance over replicas per inner step, median over the later half of the phases."""
    growth_per_step: float
    """Relative growth of the spread per inner step, (std_before/the last std_after − 1)/H; the same median."""
    contraction: float
    """std_after / std_before, the same median: below 1 an outer step brings the replicas together."""
    relative_before: float
    """The same median of the relative spread."""
    scores: dict[int, float]
    """Of each replica, the median divergence score over the later half."""
    recommended: dict[str, int]
    """H by each rule, from the same medians."""


def analyse(found: Sequence[Phase], rules: dict[str, Rule]) -> Analysis:
    """Raises ValueError for fewer than three phases."""
    if len(found) < 3:
        raise ValueError(f"{len(found)} outer steps are too few to see how the spread develops; let the run take 3")
    later = range(max(1, len(found) // 2), len(found))

    def median(values: Sequence[float]) -> float:
        return float(np.median(values))

    before = median([found[t].relative_before for t in later])
    after_last = median([found[t - 1].relative_after for t in later])
    inner_steps = round(median([found[t].inner_steps for t in later]))
    replicas = sorted({replica for t in later for replica in found[t].scores})
    return Analysis(
        correlation_with_lr=correlation([phase.std_before for phase in found], [phase.lr for phase in found]),
        variance_per_step=median(
            [(found[t].std_before ** 2 - found[t - 1].std_after ** 2) / found[t].inner_steps for t in later]
        ),
        growth_per_step=median([_growth(found[t], found[t - 1].std_after) for t in later]),
        contraction=median([_ratio(found[t].std_after, found[t].std_before) for t in later]),
        relative_before=before,
        scores={
            replica: median([found[t].scores[replica] for t in later if replica in found[t].scores])
            for replica in replicas
        },
        recommended={name: rule.recommend(inner_steps, before, after_last) for name, rule in rules.items()},
    )


def exact_deviations(folder: Path) -> list[dict[str, Any]]:
    """The rows of a simulation's deviation.jsonl as one run; empty for a distributed run's folder."""
    path = folder / "deviation.jsonl"
    return read_rows(path) if path.exists() else []


def _growth(phase: Phase, after_last: float) -> float:
    return math.inf if after_last == 0 else (phase.std_before / after_last - 1) / phase.inner_steps


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0
