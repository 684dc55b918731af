"""Do the replicas of a run stay together, and which inner_steps would suit it? For runs and simulations alike.

    python tools/analyse_convergence.py runs/NAME [--output spread.png] [--json FILE]
    python tools/analyse_convergence.py runs/NAME --target 0.05      # the H that would keep the spread at 5 %

Reads metrics.jsonl and every replica's probe.jsonl, of a run that is over or still going on. Prints the spread before
and after outer steps, its correlation with the inner learning rate, how it grows in between, how far each replica is
from the reference (about 1 where all differ alike), and the H that two rules recommend (lab/inner_steps.py).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import matplotlib

from noloco_mega.entry import guarded
from noloco_mega.lab import analyser, inner_steps
from noloco_mega.metrics import write_json

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SHOWN = 12
"""Outer steps that are printed at most, evenly spaced."""


def draw(phases: list[analyser.Phase], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    steps = [phase.step for phase in phases]
    axes.plot(steps, [phase.std_before for phase in phases], ".-", label="before outer steps")
    axes.plot(steps, [phase.std_after for phase in phases], ".-", label="after outer steps")
    estimated = [(phase.step, phase.std_of_pairs) for phase in phases if phase.std_of_pairs is not None]
    axes.plot([step for step, _ in estimated], [std for _, std in estimated], ".", label="before, from pairs alone")
    axes.set(xlabel="inner step", ylabel="standard deviation over replicas", title="spread of the replicas' weights")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    (line,) = rates.plot(steps, [phase.lr for phase in phases], color="gray", linewidth=1, label="learning rate")
    rates.set(ylabel="inner learning rate")
    rates.set_ylim(bottom=0)
    axes.legend(handles=[*axes.lines, line], fontsize=8)
    figure.savefig(path, dpi=120)


def tell(phases: list[analyser.Phase], analysis: analyser.Analysis) -> None:
    print("outer step   step    lr         before     after      from pairs  relative")
    for phase in phases[:: -(-len(phases) // SHOWN)]:
        pairs = "-" if phase.std_of_pairs is None else f"{phase.std_of_pairs:.3e}"
        print(
            f"{phase.outer_step:10d} {phase.step:6d}  {phase.lr:.3e}  {phase.std_before:.3e}  {phase.std_after:.3e}  "
            f"{pairs:>10}  {phase.relative_before:.4f}"
        )
    r = analysis.correlation_with_lr
    print(f"correlation of the spread with the inner learning rate: {'none' if r is None else f'{r:.3f}'}")
    print(f"growth between outer steps: {100 * analysis.growth_per_step:.2f} % of the spread per inner step")
    print(f"an outer step leaves {100 * analysis.contraction:.1f} % of the spread")
    for replica, score in analysis.scores.items():
        print(f"replica {replica}: divergence score {score:.2f}")
    for name, steps in analysis.recommended.items():
        print(f"inner_steps by the {name} rule: {steps}")


def run(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.target < 1 or not 1 <= arguments.power <= 2 or arguments.threshold <= 0:
        raise ValueError("--target lies in (0, 1), --power in [1, 2], --threshold is above 0")
    phases = analyser.phases(arguments.run, arguments.reference)
    rules: dict[str, inner_steps.Rule] = {
        "published": inner_steps.Published(threshold=arguments.threshold),
        "target": inner_steps.Target(target=arguments.target, power=arguments.power),
    }
    analysis = analyser.analyse(phases, rules)
    tell(phases, analysis)
    exact = [row["std"] for row in analyser.exact_deviations(arguments.run) if row["when"] == "before"]
    if len(exact) == len(phases):
        r = analyser.correlation(exact, [phase.lr for phase in phases])
        print(f"correlation over all weights instead of the probed ones: {'none' if r is None else f'{r:.3f}'}")
    if arguments.json:
        write_json(arguments.json, {"phases": [asdict(phase) for phase in phases], "analysis": asdict(analysis)})
    if arguments.output:
        draw(phases, arguments.output)
        print(f"wrote {arguments.output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run or a simulation")
    parser.add_argument("--reference", type=int, default=0, help="replica that others are compared with (default: 0)")
    parser.add_argument("--target", type=float, default=0.05, help="relative spread to keep (default: %(default)s)")
    parser.add_argument("--power", type=float, default=2.0, help="p of the target rule (default: %(default)s)")
    parser.add_argument(
        "--threshold", type=float, default=0.01, help="growth per inner step that the published rule calls too fast"
    )
    parser.add_argument("--output", type=Path, help="picture to write")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
