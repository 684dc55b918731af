"""Validation loss of a finished run: of each replica, and of the mean of their weights.

    python tools/evaluate.py runs/NAME [--json FILE]

Reads the weights one tensor at a time and one model at a time; the validation samples are those of the run itself.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from noloco_mega import config as configs
from noloco_mega import merging
from noloco_mega.checkpoint.reader import SavedReplica, mean_tensor
from noloco_mega.data.loader import Loader, open_loader
from noloco_mega.entry import guarded
from noloco_mega.metrics import write_json
from noloco_mega.plan import views


def run(arguments: argparse.Namespace) -> None:
    replicas = merging.weights_of(arguments.run)
    config = configs.parse(replicas[0].manifest["config"])
    loader = open_loader(config, views.initial(1))
    result: dict[str, Any] = {
        "replicas": {w.manifest["replica"]: merging.loss_of(config, loader, w.tensor) for w in replicas},
        "mean_of_weights": merging.loss_of(config, loader, lambda name: mean_tensor(replicas, name)),
        "deviation": merging.deviation(replicas),
    }
    steps = sorted({w.manifest["step"] for w in replicas})
    print(f"weights after step {', '.join(map(str, steps))} of {config.run.steps}")
    for replica, loss in result["replicas"].items():
        print(f"replica {replica}: validation loss {loss:.4f} (perplexity {math.exp(loss):.2f})")
    loss = result["mean_of_weights"]
    print(f"mean of the {len(replicas)} replicas' weights: {loss:.4f} (perplexity {math.exp(loss):.2f})")
    print(f"deviation of the replicas' weights from their mean: {result['deviation']:.4f}")
    if config.data.valid_domains:
        result["domains"] = {name: domain(name, config, loader, replicas) for name in config.data.valid_domains}
    if arguments.json:
        write_json(arguments.json, result)


def domain(name: str, config: configs.Config, loader: Loader, replicas: list[SavedReplica]) -> dict[str, Any]:
    """The losses on one of data.valid_domains, of each replica and of their mean; printed too."""
    each = {w.manifest["replica"]: merging.loss_of(config, loader, w.tensor, name) for w in replicas}
    mean = merging.loss_of(config, loader, lambda tensor: mean_tensor(replicas, tensor), name)
    told = ", ".join(f"replica {replica} {loss:.4f}" for replica, loss in each.items())
    print(f"{name}: validation loss {told}, mean of the weights {mean:.4f}")
    return {"replicas": each, "mean_of_weights": mean}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run, runs/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
