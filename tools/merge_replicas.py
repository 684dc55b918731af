"""Several replicas of a finished run as one model: their mean, a mean of some of them, or a weighted one.

    python tools/merge_replicas.py runs/NAME --output WEIGHTS [--replicas 0,2] [--factors 3,1] [--no-evaluation]

Tensor by tensor: no more than two are in memory. Prints the validation loss of each replica that goes in, of the merged
weights, and their deviation from it; convert_to_hf.py, generate.py and run.init_from take WEIGHTS.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from noloco_mega import merging, streamed
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import open_loader
from noloco_mega.entry import guarded
from noloco_mega.metrics import write_json
from noloco_mega.plan import views


def chosen(run: Path, replicas: list[int] | None) -> list[SavedReplica]:
    """The weights to merge, in the order given. Raises ValueError naming a replica that the run does not have, or
    weights of another step or model."""
    found = {weights.manifest["replica"]: weights for weights in merging.weights_of(run)}
    wanted = sorted(found) if replicas is None else replicas
    missing = [replica for replica in wanted if replica not in found]
    if missing or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"--replicas must name different ones of {', '.join(map(str, found))}; given {', '.join(map(str, wanted))}"
        )
    weights = [found[replica] for replica in wanted]
    merging.refuse_mixture(weights)
    return weights


def shares(count: int, factors: list[float] | None) -> list[float]:
    """What part each of `count` replicas has in the merged weights; they add up to 1. Raises ValueError."""
    factors = [1.0] * count if factors is None else factors
    if len(factors) != count or sum(factors) <= 0 or min(factors) < 0:
        raise ValueError(f"--factors must be {count} numbers, none below 0 and not all 0; given {factors}")
    return [factor / sum(factors) for factor in factors]


def run(arguments: argparse.Namespace) -> None:
    weights = chosen(arguments.run, arguments.replicas)
    parts = shares(len(weights), arguments.factors)
    names = [entry.manifest["replica"] for entry in weights]
    facts = dict(weights[0].manifest)
    merged_from = [{"replica": replica, "share": part} for replica, part in zip(names, parts, strict=True)]
    facts |= {"replica": names[0], "merged": merged_from, "model": asdict(merging.model_of(weights[0]))}
    for key in ("format", "parts"):
        del facts[key]

    def tensors() -> Iterator[torch.Tensor]:
        for plan in merging.planned(weights[0]):
            yield merging.weighted_tensor(weights, parts, plan.name)

    with streamed.new_folder(arguments.output) as draft:
        size = streamed.size_bytes(arguments.max_shard_size)
        streamed.write_weights(draft, merging.planned(weights[0]), tensors(), facts, size, "merging")
    told = ", ".join(f"{part:.3f} of replica {replica}" for replica, part in zip(names, parts, strict=True))
    print(f"{arguments.output}: {told}")
    result = {"merged": merged_from, "deviation": merging.deviation(weights)}
    print(f"deviation of the replicas from their mean: {result['deviation']:.4f}")
    if not arguments.no_evaluation:
        result |= losses(weights, SavedReplica(arguments.output))
    if arguments.json:
        write_json(arguments.json, result)


def losses(weights: list[SavedReplica], merged: SavedReplica) -> dict[str, object]:
    """Validation losses of the replicas and of what was made of them, printed too."""
    config = merging.run_of(weights[0])
    if config is None:
        raise ValueError("weights that come from no run have no validation samples: give --no-evaluation")
    loader = open_loader(config, views.initial(1))
    each = {entry.manifest["replica"]: merging.loss_of(config, loader, entry.tensor) for entry in weights}
    for replica, loss in each.items():
        print(f"replica {replica}: validation loss {loss:.4f}")
    loss = merging.loss_of(config, loader, merged.tensor)
    print(f"merged: validation loss {loss:.4f}")
    return {"replicas": each, "merged_loss": loss}


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def decimals(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run, or of one step of its checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="the folder of weights to make")
    parser.add_argument("--replicas", type=integers, metavar="R,R", help="merge only these (default: all)")
    parser.add_argument("--factors", type=decimals, metavar="F,F", help="in the replicas' order; default: equal")
    parser.add_argument("--max-shard-size", default="5GB", help="of a weights file (default: %(default)s)")
    parser.add_argument("--no-evaluation", action="store_true", help="only merge, and give the deviation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
