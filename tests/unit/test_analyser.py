"""The analyser on weights and folders whose answers are known."""

import json

import numpy as np
import pytest

from noloco_mega.lab import analyser, inner_steps
from noloco_mega.plan import pairing


def test_pair_differences_estimate_the_variance_without_bias():
    weights = np.random.default_rng(0).standard_normal((8, 40)) * np.linspace(1, 3, 8)[:, None]
    estimates = [
        analyser.pair_variance(weights, pairing.groups(0, outer_step, range(8), 2)) for outer_step in range(4000)
    ]
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - np.var(weights, axis=0, ddof=1).mean()) < 3 * error
    assert error < 0.01 * np.mean(estimates)


def test_a_replica_far_away_has_a_high_score():
    weights = np.random.default_rng(0).standard_normal((6, 500))
    scores = analyser.divergence(weights, 2)
    assert scores[2] == 0 and scores[[0, 1, 3, 4, 5]] == pytest.approx(1, abs=0.15)
    weights[4] += 10
    scores = analyser.divergence(weights, 2)
    assert scores[4] > 1.5 and scores[[0, 1, 3, 5]].max() < 0.3
    assert analyser.divergence(np.ones((3, 5)), 0).tolist() == [0, 0, 0]


def write_run(folder, deviations, *, replicas=4, inner_steps=10, absent=()):
    """A run whose replica r sits at 5 ± deviations[t]·(r − mean) before outer step t + 1, and at half of that after."""
    rows = []
    offsets = np.arange(replicas) - (replicas - 1) / 2
    for replica in range(replicas):
        (folder / f"replica_{replica:02d}").mkdir(parents=True)
        with open(folder / f"replica_{replica:02d}" / "probe.jsonl", "w") as file:
            for t, deviation in enumerate(deviations):
                if (replica, t) not in absent:
                    places = {"before": [5 + deviation * offsets[replica]] * 3}
                    places["after"] = [5 + deviation * offsets[replica] / 2] * 3
                    file.write(json.dumps({"outer_step": t + 1, **places}) + "\n")
        for t, deviation in enumerate(deviations):
            outer = {"outer_step": t + 1, "partner": replica ^ 1, "lr": deviation / 10}
            rows += [{"step": (t + 1) * inner_steps - 5, "replica": replica, "outer_step": None, "lr": 1.0}]
            rows += [{"step": (t + 1) * inner_steps, "replica": replica, **outer}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_runs_phases(tmp_path):
    deviations = [0.4, 0.3, 0.2, 0.1]
    found = analyser.phases(write_run(tmp_path, deviations))
    std = np.std(np.arange(4), ddof=1)
    assert [phase.step for phase in found] == [10, 20, 30, 40]
    assert [phase.inner_steps for phase in found] == [10] * 4
    for phase, deviation in zip(found, deviations, strict=True):
        assert phase.std_before == pytest.approx(deviation * std)
        assert phase.std_after == pytest.approx(deviation * std / 2)
        # Partners lie side by side here, so that their difference is one offset.
        assert phase.std_of_pairs == pytest.approx(deviation / np.sqrt(2))
        assert phase.relative_before == pytest.approx(deviation * np.std(np.arange(4)) / 5)
        assert phase.scores[3] == pytest.approx(3 * phase.scores[1])
    analysis = analyser.analyse(found, {"published": inner_steps.Published()})
    assert analysis.correlation_with_lr == pytest.approx(1.0)
    assert analysis.contraction == pytest.approx(0.5)
    # From 0.3/2 to 0.2 and from 0.2/2 to 0.1, in 10 steps.
    assert analysis.growth_per_step == pytest.approx((1 / 30 + 0) / 2)
    assert analysis.variance_per_step == pytest.approx(std**2 * (0.2**2 - 0.15**2 + 0.1**2 - 0.1**2) / 10 / 2)


def test_replicas_may_be_absent(tmp_path):
    folder = write_run(tmp_path, [0.4, 0.3, 0.2, 0.1], absent={(3, 1), (0, 2), (1, 3), (2, 3), (3, 3)})
    assert [sorted(phase.scores) for phase in analyser.phases(folder)] == [[0, 1, 2, 3], [0, 1, 2]]
    assert [phase.outer_step for phase in analyser.phases(folder, reference=1)] == [1, 2, 3]
    with pytest.raises(ValueError, match="replica 9"):
        analyser.phases(folder, reference=9)
    with pytest.raises(ValueError, match="too few"):
        analyser.analyse(analyser.phases(folder), {})


def test_the_published_rule():
    rule = inner_steps.Published(threshold=0.01)
    assert rule.recommend(50, before=0.16, after_last=0.10) == 25
    assert rule.recommend(50, before=0.13, after_last=0.10) == 50
    assert rule.recommend(50, before=0.11, after_last=0.10) == 100
    assert rule.recommend(50, before=0.10, after_last=0.0) == 25


def test_the_target_rule_finds_the_phase_that_gives_the_target():
    """Replicas that walk at random, and an outer step that halves the spread: D² = walk·H/(1 − 1/4)."""

    def spread(steps, walk=1e-5):
        return np.sqrt(walk * steps / (1 - 1 / 4))

    rule = inner_steps.Target(target=spread(80), power=1)
    assert [rule.recommend(steps, spread(steps), 0.0) for steps in (10, 50, 200)] == [80, 80, 80]
    assert inner_steps.Target(target=0.1).recommend(50, 0.2, 0.0) == 25
    assert inner_steps.Target(target=0.1, least=7, most=60).recommend(50, 10.0, 0.0) == 7
    assert inner_steps.Target(target=0.1, least=7, most=60).recommend(50, 0.0, 0.0) == 60
