"""What waiting costs: all-reduces over N replicas against exchanges in pairs, drawn message by message.

    python tools/simulate_latency.py --output latency                # log-normal times, as in the paper's figure 5
    python tools/simulate_latency.py --messages check.txt --steps steps.json

Writes latency.json, figure_5a.png (how many times longer an all-reduce takes than an exchange of a pair) and
figure_5b.png (how many times longer training takes if each outer step waits for everybody), and prints the bytes of
the paper's runs against fully sharded training. --messages and --steps take measured times in place of log-normal
ones: a JSON list of seconds, such as [0.021, 0.034, 0.020], or for messages what `python -m noloco_mega check --live`
has printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from noloco_mega import config as configs
from noloco_mega.entry import guarded
from noloco_mega.lab import latency, traffic
from noloco_mega.metrics import write_json

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SIZES = ("small_noloco_random_8x2", "medium_noloco_random_16x4", "large_noloco_random_16x4")
VARIANCES = (0.0, 0.5, 1.0, 2.0, 2.5, 3.0)
PAPER_STEPS = latency.LogNormal(1.0, 0.5**0.5)
INNER_STEPS = (50, 100, 200)
SAMPLES = 2000


def all_reduces(times: latency.Times, replicas: list[int], random: np.random.Generator) -> list[dict[str, float]]:
    """Per N the mean seconds of a tree and of a ring (at its best and at its worst), and of an exchange in pairs."""
    pair = float(latency.pair_seconds(times, random, latency.DRAWS // 2).mean())
    rows = []
    for count in replicas:
        tree = latency.tree_seconds(times, count, random, latency.samples_for(2 * count, SAMPLES))
        samples = latency.samples_for(2 * count * count, SAMPLES)
        best, worst = (latency.ring_seconds(times, count, random, samples, share).mean() for share in (0.0, 1.0))
        rows.append(
            {
                "replicas": count,
                "pair": pair,
                "tree": float(tree.mean()),
                "ring_of_bandwidth": float(best),
                "ring_of_latency": float(worst),
                # The paper counts an exchange as two messages one after the other, which makes it log2 N at σ = 0.
                "figure_5a": float(tree.mean()) / (2 * pair),
            }
        )
    return rows


def messages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """all_reduces for each distribution of message times."""
    random = np.random.default_rng(0)
    if arguments.messages:
        return [
            {"label": arguments.messages.name, **row}
            for row in all_reduces(latency.read_times(arguments.messages), arguments.replicas, random)
        ]
    rows: list[dict[str, Any]] = []
    for variance in VARIANCES:
        times = latency.LogNormal(0.0, variance**0.5)
        found = all_reduces(times, arguments.replicas, random)
        expected = latency.expected_pair(times)
        print(f"σ² {variance:.1f}: a pair takes {found[0]['pair']:.4f}, by the closed form {expected:.4f}")
        rows += [{"label": f"σ² = {variance:g}", "expected_pair": expected, **row} for row in found]
    return rows


def steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The training time with a barrier against that in pairs, for each N and H."""
    times = latency.read_times(arguments.steps) if arguments.steps else PAPER_STEPS
    rows = []
    for inner_steps in INNER_STEPS:
        for count in (count for count in arguments.replicas if count <= arguments.most_waiting):
            found = latency.waiting(times, count, inner_steps, outer_steps=40, seed=0)
            rows.append(
                {
                    "label": f"H = {inner_steps}",
                    "replicas": count,
                    "barrier": found.barrier,
                    "pairs": found.pairs,
                    "alone": found.alone,
                    "figure_5b": found.barrier / found.pairs,
                }
            )
    return rows


def draw(rows: list[dict[str, Any]], name: str, ylabel: str, path: Path) -> None:
    """`name` over N, a line per label."""
    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    for label in dict.fromkeys(row["label"] for row in rows):
        own = [row for row in rows if row["label"] == label]
        axes.plot([row["replicas"] for row in own], [row[name] for row in own], "o-", label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="replicas", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def run(arguments: argparse.Namespace) -> None:
    if min(arguments.replicas) < 2:
        raise ValueError("--replicas: nobody waits for anybody among fewer than 2")
    arguments.output.mkdir(parents=True, exist_ok=True)
    found_messages, found_steps = messages(arguments), steps(arguments)
    for row in found_messages:
        print(
            f"{row['label']}, N {row['replicas']}: pair {row['pair']:.3f}, tree {row['tree']:.3f} (figure 5A: "
            f"{row['figure_5a']:.2f}), ring {row['ring_of_bandwidth']:.3f} to {row['ring_of_latency']:.3f}"
        )
    for row in found_steps:
        print(
            f"{row['label']}, N {row['replicas']}: waiting for all takes {row['figure_5b']:.3f} times as long as pairs"
        )
    compared = {}
    for name in SIZES:
        found = compared[name] = traffic.compare(configs.load(CONFIGS / f"{name}.json"))
        print(
            f"{name}: fully sharded training sends {found.outer_ratio:.0f} times as much as the outer steps, "
            f"{found.ratio:.0f} times as much as outer steps and routes"
        )
    sent = {name: {"outer_ratio": one.outer_ratio, "ratio": one.ratio} for name, one in compared.items()}
    figures = {"messages": found_messages, "steps": found_steps, "traffic": sent}
    write_json(arguments.output / "latency.json", figures)
    draw(found_messages, "figure_5a", "tree all-reduce / pair", arguments.output / "figure_5a.png")
    draw(found_steps, "figure_5b", "training time, barrier / pairs", arguments.output / "figure_5b.png")
    print(f"wrote latency.json, figure_5a.png and figure_5b.png into {arguments.output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("latency"), help="folder (default: %(default)s)")
    counts = [2**power for power in range(1, 13)]
    parser.add_argument("--replicas", type=int, nargs="+", default=counts, help="values of N; default: 2 4 8 ... 4096")
    parser.add_argument("--most-waiting", type=int, default=1024, help="largest N of figure 5B (default: %(default)s)")
    parser.add_argument("--messages", type=Path, help="file of measured message times")
    parser.add_argument("--steps", type=Path, help="file of measured inner step times")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
