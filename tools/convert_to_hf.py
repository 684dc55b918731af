"""From a finished run to a folder that transformers' AutoModelForCausalLM and AutoTokenizer load.

    python tools/convert_to_hf.py --checkpoint runs/NAME --output DIR [--replica R | --merge mean]

Works from any number of stages and tensor ranks, one tensor at a time. The checkpoint is a run, one step's folder in
its checkpoints (their fp32 masters are exported), one replica, or a folder of weights. DIR is written beside and
renamed; an existing one is never touched.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from noloco_mega import convert, merging, streamed
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.convert import Source
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.entry import guarded
from noloco_mega.model.hf import ARCHITECTURES


def choose(found: list[SavedReplica], replica: int | None, merge: str | None) -> list[SavedReplica]:
    """The weights to export: one replica's, or all of them to be averaged. Raises ValueError if it is not clear."""
    if replica is not None:
        chosen = [weights for weights in found if weights.manifest.get("replica") == replica]
        if not chosen:
            known = ", ".join(str(weights.manifest.get("replica")) for weights in found)
            raise ValueError(f"there is no replica {replica}; there are {known}")
        return chosen
    if len(found) > 1 and merge is None:
        raise ValueError(f"the checkpoint has {len(found)} replicas: give --replica R, or --merge mean")
    merging.refuse_mixture(found)
    return found


def source_of(chosen: list[SavedReplica]) -> Source:
    """One replica's weights, or the mean of several, with what the model card says about them."""
    first = chosen[0]
    run = merging.run_of(first)
    step = first.manifest.get("step", 0)
    which = f"replica {first.manifest.get('replica', 0)}"
    if len(chosen) > 1:
        which = f"the mean of {len(chosen)} replicas"
    story = f"Weights of {which} after {step} inner steps"
    facts = {"inner steps": step, "replicas": which}
    if run is not None:
        story += f' of the run "{run.run.name}", trained with noloco_mega ({run.noloco.optimizer}).'
        tokens = step * run.replica_batch_size * run.model.seq_length
        facts |= {
            "outer optimizer": f"{run.noloco.optimizer}, every {run.noloco.inner_steps} inner steps",
            "routing": run.noloco.routing,
            "run": f"{run.topology.replicas} replicas of {run.topology.stages} stages",
            "tokens": f"{tokens:,} per replica, {tokens * run.topology.replicas:,} in all",
        }
    else:
        story += ", imported and not trained since."
    factors = [1 / len(chosen)] * len(chosen)
    return Source(
        model=merging.model_of(first),
        planned=merging.planned(first),
        tensor=lambda name: merging.weighted_tensor(chosen, factors, name) if len(chosen) > 1 else first.tensor(name),
        story=story,
        run=first.manifest.get("config"),
        facts=facts,
    )


def run(arguments: argparse.Namespace) -> None:
    chosen = choose(merging.weights_of(arguments.checkpoint), arguments.replica, arguments.merge)
    origin = convert.origin_of(chosen[0])
    settings = merging.run_of(chosen[0])
    path = arguments.tokenizer or (settings and settings.data.tokenizer) or chosen[0].folder / "tokenizer"
    remarks = convert.export(
        source_of(chosen),
        arguments.output,
        tokenizer=Tokenizer(path),
        architecture=arguments.architecture or origin.get("architecture"),
        max_shard_bytes=streamed.size_bytes(arguments.max_shard_size),
        tie=origin.get("tied"),
    )
    for remark in remarks:
        print(remark)
    print(f"{arguments.output}: written")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="runs/NAME, a step of its checkpoints, ...")
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--replica", type=int, help="export this replica's weights")
    which.add_argument("--merge", choices=["mean"], help="export the mean of all replicas' weights")
    parser.add_argument("--tokenizer", type=Path, help="default: the run's own")
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), help="default: the first one that fits")
    parser.add_argument("--max-shard-size", default="5GB", help="of a weights file (default: %(default)s)")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
