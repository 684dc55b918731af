"""The theory's two claims, measured: variance on a noisy quadratic, and the range of stable γ.

    python tools/theory.py --output theory        # folder for theory.json, quadratic.png and stability.png

The quadratic: NoLoCo at several inner rates ω, its variances against the exact ones, and the fitted exponents.
Stability: the boundary that plan/stability.py computes, against the one that simulated random groups show (some
minutes on one core; --replicas and --momenta choose other cells).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from noloco_mega.config import Noloco
from noloco_mega.entry import guarded
from noloco_mega.lab import theory
from noloco_mega.metrics import write_json
from noloco_mega.plan.stability import spectral_radius, stable_gamma_range

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OMEGAS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
INNER_STEPS = 10
SMALL = 0.05
"""The power laws are those of ω·H ≪ 1: exponents are fitted up to here."""
GROUP_SIZES = (2, 3, 4)
HIGHEST_GAMMA = 4.0
OPTIONS: tuple[dict[str, Any], ...] = (
    {"nesterov": True},
    {"combine": "after"},
    {"pairing": "hypercube"},
    {"pairing": "tournament"},
)


def quadratic(replicas: int) -> list[dict[str, float]]:
    """The quadratic at every ω, for the default settings of a run."""
    settings, rows = Noloco(), []
    for omega in OMEGAS:
        loss = theory.Quadratic(omega=omega, inner_steps=INNER_STEPS)
        warmup = round(6 / (omega * INNER_STEPS))
        found = theory.simulate_quadratic(
            loss, settings, replicas, coordinates=100, warmup=warmup, outer_steps=3000, start=1.0
        )
        of_mean, of_replicas = theory.quadratic_variances(loss, settings, replicas)
        rows.append(
            {
                "omega": omega,
                "mean": found.mean,
                "mean_variance": found.mean_variance,
                "exact_mean_variance": of_mean,
                "replica_variance": found.replica_variance,
                "exact_replica_variance": of_replicas,
            }
        )
    return rows


def stability(replicas: list[int], momenta: list[float]) -> list[dict[str, Any]]:
    """The boundary of γ in every cell, computed and simulated: of the paper's step, and for pairs of its options."""
    rows = []
    for count in replicas:
        for group_size in (size for size in GROUP_SIZES if size <= count):
            rows += _boundaries(count, group_size, momenta, {})
        for options in OPTIONS:
            if options.get("pairing") != "hypercube" or count.bit_count() == 1:
                rows += _boundaries(count, 2, momenta, options)
    return rows


def _boundaries(replicas: int, group_size: int, momenta: list[float], options: dict[str, Any]) -> list[dict[str, Any]]:
    form = {name: value for name, value in options.items() if name != "pairing"}
    meter = theory.GrowthMeter(group_size, replicas, options.get("pairing", "random"))
    rows = []
    for alpha in momenta:
        _, exact = stable_gamma_range(alpha, group_size, replicas, **options)
        simulated = meter.boundary(alpha, **form)
        cell = {"replicas": replicas, "group_size": group_size, "alpha": alpha, "options": options}
        rows.append({**cell, "exact": exact, "simulated": simulated})
        words = " ".join(f"{name}={value}" for name, value in options.items())
        print(
            f"N {replicas:3d}  n {group_size}  α {alpha:.1f}  γ < {exact:.3f}  simulated {simulated:.3f} "
            f"({100 * (simulated / exact - 1):+.2f} %)  {words}".rstrip(),
            flush=True,
        )
    return rows


def draw_quadratic(rows: list[dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    omegas = [row["omega"] for row in rows]
    for name, label in (("replica_variance", "over replicas"), ("mean_variance", "of the replicas' mean")):
        (line,) = axes.loglog(omegas, [row[f"exact_{name}"] for row in rows], label=f"{label}, exact")
        axes.loglog(omegas, [row[name] for row in rows], "o", color=line.get_color(), label=f"{label}, simulated")
    axes.set(xlabel="inner learning rate ω", ylabel="variance of slow weights", title="noisy quadratic, NoLoCo")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_stability(rows: list[dict[str, Any]], path: Path) -> None:
    """Where the spread shrinks, per (N, n): colour is its factor per outer step, dots the simulated boundary."""
    cells = sorted({(row["replicas"], row["group_size"]) for row in rows})
    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(3.4 * columns, 3 * lines),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    alphas, gammas = np.linspace(0, 0.99, 67), np.linspace(0.01, HIGHEST_GAMMA, 134)
    for axes, (replicas, group_size) in zip(grid.flat, cells, strict=False):
        factor = [[spectral_radius(a, g, group_size, replicas) ** 0.5 for a in alphas] for g in gammas]
        image = axes.pcolormesh(alphas, gammas, factor, vmin=0.5, vmax=1.5, cmap="RdBu_r")
        axes.contour(alphas, gammas, factor, levels=[1.0], colors="black")
        own = [row for row in rows if (row["replicas"], row["group_size"]) == (replicas, group_size)]
        axes.plot([row["alpha"] for row in own], [row["simulated"] for row in own], "o", color="black", markersize=4)
        axes.set_title(f"N = {replicas}, n = {group_size}")
    for axes in grid.flat[len(cells) :]:
        axes.set_axis_off()
    figure.supxlabel("outer momentum α")
    figure.supylabel("consensus strength γ")
    figure.colorbar(image, ax=grid, label="factor of the spread per outer step")
    figure.savefig(path, dpi=120)


def run(arguments: argparse.Namespace) -> None:
    if min(arguments.replicas) < 2:
        raise ValueError("--replicas: a spread needs at least 2")
    if not all(0 <= alpha < 1 for alpha in arguments.momenta):
        raise ValueError("--momenta: α lies in [0, 1)")
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = quadratic(replicas=8)
    for row in rows:
        print("  ".join(f"{name} {value:.3e}" for name, value in row.items()))
    small = [row for row in rows if row["omega"] * INNER_STEPS <= SMALL]
    exponents = {
        name: theory.exponent([row["omega"] for row in small], [row[name] for row in small])
        for name in ("replica_variance", "mean_variance")
    }
    print(f"variance over replicas ∝ ω^{exponents['replica_variance']:.2f}, ", end="")
    print(f"of their mean ∝ ω^{exponents['mean_variance']:.2f}")
    cells = stability(arguments.replicas, arguments.momenta)
    write_json(arguments.output / "theory.json", {"quadratic": rows, "exponents": exponents, "stability": cells})
    draw_quadratic(rows, arguments.output / "quadratic.png")
    draw_stability([cell for cell in cells if not cell["options"]], arguments.output / "stability.png")
    print(f"wrote theory.json, quadratic.png and stability.png into {arguments.output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("theory"), help="folder (default: %(default)s)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 64], help="default: 2 4 8 64")
    parser.add_argument("--momenta", type=float, nargs="+", default=[0, 0.3, 0.5, 0.7, 0.9], help="values of α")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
