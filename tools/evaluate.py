"""Validation loss of a finished run: of each replica, and of the mean of their weights.

    python tools/evaluate.py runs/NAME [--json FILE]

Reads the weights one tensor at a time and one model at a time; the validation samples are those of the run itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from noloco_mega import config as configs
from noloco_mega.checkpoint.reader import SavedReplica, mean_tensor
from noloco_mega.data.loader import Loader, open_loader
from noloco_mega.entry import guarded
from noloco_mega.metrics import write_json
from noloco_mega.model.whole import whole_model
from noloco_mega.plan import views


def weights_of(run: Path) -> list[SavedReplica]:
    """The final weights of every replica of a run. Raises ValueError if there are none."""
    folders = sorted(run.glob("replica_*/weights"))
    if not folders:
        raise ValueError(f"{run} holds no replica_*/weights: not a finished run")
    return [SavedReplica(folder) for folder in folders]


@torch.no_grad()
def loss_of(config: configs.Config, loader: Loader, tensor_of: Callable[[str], torch.Tensor]) -> float:
    """Nats per token over the run's validation samples."""
    total = 0.0
    with whole_model(config.model, tensor_of) as model:
        device = next(model.parameters()).device
        for microbatch in range(config.run.eval_microbatches):
            batch = loader.valid(microbatch)
            losses = model(batch.tokens.to(device), None, None, labels=batch.labels.to(device))
            mask = batch.loss_mask.to(device)
            total += float((losses * mask).sum() / mask.sum())
    return total / config.run.eval_microbatches


def run(arguments: argparse.Namespace) -> None:
    replicas = weights_of(arguments.run)
    config = configs.parse(replicas[0].manifest["config"])
    loader = open_loader(config, views.initial(1))
    result: dict[str, Any] = {
        "replicas": {w.manifest["replica"]: loss_of(config, loader, w.tensor) for w in replicas},
        "mean_of_weights": loss_of(config, loader, lambda name: mean_tensor(replicas, name)),
        "deviation": deviation(replicas),
    }
    steps = sorted({w.manifest["step"] for w in replicas})
    print(f"weights after step {', '.join(map(str, steps))} of {config.run.steps}")
    for replica, loss in result["replicas"].items():
        print(f"replica {replica}: validation loss {loss:.4f} (perplexity {math.exp(loss):.2f})")
    loss = result["mean_of_weights"]
    print(f"mean of the {len(replicas)} replicas' weights: {loss:.4f} (perplexity {math.exp(loss):.2f})")
    print(f"deviation of the replicas' weights from their mean: {result['deviation']:.4f}")
    if arguments.json:
        write_json(arguments.json, result)


def deviation(replicas: list[SavedReplica]) -> float:
    """sqrt(mean_i ‖θ_i − θ̄‖²) / ‖θ̄‖ over all parameters; 0 for one replica."""
    squares = norm = 0.0
    for name in replicas[0].names:
        parts = torch.stack([weights.tensor(name).float() for weights in replicas]).double()
        mean = parts.mean(0)
        squares += float((parts - mean).square().sum()) / len(replicas)
        norm += float(mean.square().sum())
    return math.sqrt(squares / norm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run, runs/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
