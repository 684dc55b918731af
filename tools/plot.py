"""Loss and spread of one or more runs as a picture.

python tools/plot.py runs/NAME [MORE ...] --output curves.png
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import matplotlib

from noloco_mega.entry import guarded
from noloco_mega.metrics import read_rows

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOMAINS = "val_loss_by_domain"


def series(rows: list[dict[str, Any]], key: str, replica: int) -> tuple[list[int], list[Any]]:
    """Steps and values of one replica's rows that have `key`."""
    found = [(row["step"], row[key]) for row in rows if row["replica"] == replica and row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def plot_domains(axes: Axes, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Validation loss on each domain of a run: a line per domain and replica, a colour per domain."""
    for domain in dict.fromkeys(name for row in rows for name in row.get(DOMAINS) or ()):
        color: Any = None
        label = f"{folder.name}, {domain}"
        for replica in sorted({row["replica"] for row in rows}):
            steps, losses = series(rows, DOMAINS, replica)
            values = [loss.get(domain, math.nan) for loss in losses]
            (line,) = axes.plot(steps, values, "o-", color=color, label=label, markersize=3, alpha=0.7)
            color, label = line.get_color(), "_nolegend_"
    axes.set(xlabel="inner step", ylabel="nats per token", title="validation loss by domain (a line per replica)")
    axes.legend(fontsize=8)


def run(arguments: argparse.Namespace) -> None:
    runs = {folder: read_rows(folder / "metrics.jsonl") for folder in arguments.runs}
    with_domains = {folder: rows for folder, rows in runs.items() if any(row.get(DOMAINS) for row in rows)}
    panels = 3 if with_domains else 2
    figure, (left, right, *more) = plt.subplots(1, panels, figsize=(6 * panels, 4.5), layout="constrained")
    for folder, rows in runs.items():
        for replica in sorted({row["replica"] for row in rows}):
            label = f"{folder.name}, replica {replica}"
            (line,) = left.plot(*series(rows, "loss", replica), alpha=0.5, linewidth=1)
            left.plot(*series(rows, "val_loss", replica), "o-", color=line.get_color(), label=label, markersize=4)
            right.plot(*series(rows, "spread", replica), ".-", color=line.get_color(), label=label)
    left.set(xlabel="inner step", ylabel="nats per token", title="loss (lines: training, dots: validation)")
    right.set(xlabel="inner step", ylabel="‖c_i − c_j‖ / ‖c_i‖", title="spread, as each exchange measures it")
    right.set_ylim(bottom=0)
    for axes in more:
        for folder, rows in with_domains.items():
            plot_domains(axes, folder, rows)
    for axes in (left, right, *more):
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
