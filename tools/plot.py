"""Loss and spread of one or more runs as a picture.

python tools/plot.py runs/NAME [MORE ...] --output curves.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

from noloco_mega.entry import guarded
from noloco_mega.metrics import read_rows

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def series(rows: list[dict[str, Any]], key: str, replica: int) -> tuple[list[int], list[float]]:
    """Steps and values of one replica's rows that have `key`."""
    found = [(row["step"], row[key]) for row in rows if row["replica"] == replica and row[key] is not None]
    return [step for step, _ in found], [value for _, value in found]


def run(arguments: argparse.Namespace) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for folder in arguments.runs:
        rows = read_rows(folder / "metrics.jsonl")
        for replica in sorted({row["replica"] for row in rows}):
            label = f"{folder.name}, replica {replica}"
            (line,) = left.plot(*series(rows, "loss", replica), alpha=0.5, linewidth=1)
            left.plot(*series(rows, "val_loss", replica), "o-", color=line.get_color(), label=label, markersize=4)
            right.plot(*series(rows, "spread", replica), ".-", color=line.get_color(), label=label)
    left.set(xlabel="inner step", ylabel="nats per token", title="loss (lines: training, dots: validation)")
    right.set(xlabel="inner step", ylabel="‖c_i − c_j‖ / ‖c_i‖", title="spread, as each exchange measures it")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(arguments.output, dpi=120)
    print(f"wrote {arguments.output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="default: %(default)s")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
