"""The demo: train a small Llama-style model on the Python standard library's own source, with NoLoCo, on this machine.

    python tools/demo.py [--short] [--check] [--set KEY=VALUE ...]

Corpus, tokenizer, data and the run itself are made where they are missing, so a second call only reports. 4 replicas of
2 pipeline stages are 8 processes; nothing is downloaded. `--short` trains less; `--check` ends with an error unless the
figures are what they should be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from noloco_mega import config as configs
from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.costs import model_parameters
from noloco_mega.entry import guarded
from noloco_mega.metrics import read_rows

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/demo_noloco_random_4x2.json"
SHORT = {"run.name": "demo_short", "run.steps": 160, "run.eval_every": 80, "scheduler.params.total_num_steps": 160}
PROMPTS = ("def __init__(self", "import ", "class ")


def tool(*words: str | Path | float) -> None:
    """Run one of the project's programs with this interpreter. Raises CalledProcessError."""
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT)


def prepare(config: configs.Config) -> None:
    """Corpus, tokenizer and token files, each only where it is missing."""
    folder = ROOT / Path(config.data.tokenizer).parent
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        print("corpus: the Python standard library's source", flush=True)
        tool("tools/stdlib_corpus.py", "--output", corpus)
    if not (ROOT / config.data.tokenizer).exists():
        print("tokenizer", flush=True)
        tool(
            "tokenizer/train_tokenizer.py",
            corpus,
            "--output",
            config.data.tokenizer,
            "--vocab-size",
            config.model.vocab_size,
            "--max-characters",
            4_000_000,
        )
    if not all((ROOT / f"{prefix}.idx").exists() for prefix in (config.data.train, config.data.valid)):
        print("data", flush=True)
        tool(
            "tools/preprocess_data.py",
            corpus,
            "--tokenizer",
            config.data.tokenizer,
            "--output",
            config.data.train.removesuffix("_train"),
            "--valid-fraction",
            0.05,
            "--workers",
            2,
        )


def finished(config: configs.Config) -> bool:
    """Whether the run is there, from this very config, to its last step."""
    for replica in range(config.topology.replicas):
        try:
            facts = SavedReplica(ROOT / config.replica_folder(replica) / "weights").manifest
        except CheckpointError:
            return False
        if facts["step"] != config.run.steps or facts["config"] != config.to_json():
            return False
    return True


def train(config: configs.Config, overrides: list[str]) -> None:
    """Run launch/local.sh, unless the run is there already; another or an unfinished one is moved aside."""
    folder = ROOT / config.output
    if finished(config):
        print(f"{config.output} is there already; `make clean-demo` forgets it", flush=True)
        return
    if folder.exists():
        aside = next(
            path for n in range(1, 1000) if not (path := folder.with_name(f"{folder.name}.before-{n}")).exists()
        )
        folder.rename(aside)
        print(f"another or unfinished run moved to {aside.relative_to(ROOT)}", flush=True)
    print(f"training: {config.topology.replicas} replicas of {config.topology.stages} stages", flush=True)
    words = ["launch/local.sh", CONFIG, *(word for override in overrides for word in ("--set", override))]
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}) as launch:
        while True:
            try:
                status = launch.wait()
                break
            except KeyboardInterrupt:
                pass  # the terminal told launch/local.sh too: it stops the run, saves and cleans up
    if status:
        raise subprocess.CalledProcessError(status, words)
    if not finished(config):
        raise ValueError(f"the run was stopped before its last step; its weights are in {config.output}")


def report(config: configs.Config) -> dict[str, Any]:
    """Print what the run did, and return the figures."""
    folder = ROOT / config.output
    tool("tools/evaluate.py", config.output, "--json", folder / "evaluation.json")
    tool("tools/plot.py", config.output, "--output", config.output / "curves.png")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    rows = read_rows(folder / "metrics.jsonl")

    print("\nvalidation loss, nats per token (first -> last)")
    last = {}
    for replica in range(config.topology.replicas):
        losses = [row["val_loss"] for row in rows if row["replica"] == replica and row["val_loss"] is not None]
        last[replica] = losses[-1]
        print(f"  replica {replica}                 {losses[0]:.4f} -> {losses[-1]:.4f}")
    first = rows[0]["val_loss"]
    print(f"  mean of their weights     {first:.4f} -> {evaluation['mean_of_weights']:.4f}")
    outer = [row for row in rows if row["exchange_bytes"] is not None]
    before, after = deviations(folder)
    figures = {
        "worst_val_loss": max(last.values()),
        "bound": 0.6 * math.log(config.model.vocab_size),
        "outer_steps": max(row["outer_step"] for row in outer),
        "exchange_bytes": sum(row["exchange_bytes"] for row in outer),
        "missed": sum(row["missed"] for row in outer),
        "deviation_falls": float(np.mean(after < before)),
        "final_deviation": evaluation["deviation"],
    }
    print(f"\n60 % of ln(vocabulary)      {figures['bound']:.4f} (every replica should end below)")
    print(
        f"outer steps                 {figures['outer_steps']}, {figures['missed']} exchanges missed, "
        f"{figures['exchange_bytes'] / 1e6:,.1f} MB of outer state sent by all replicas"
    )
    print(
        f"deviation from the mean     falls at {figures['deviation_falls']:.0%} of the outer steps, "
        f"on average from {before.mean():.4f} to {after.mean():.4f}; at the end {figures['final_deviation']:.4f}"
    )
    return figures


def deviations(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """How far the replicas are apart right before and right after each outer step: float [outer steps] each.

    sqrt(mean_i ‖θ_i − θ̄‖²) / ‖θ̄‖ over the weights that each replica's probe.jsonl samples.
    """
    probes = [read_rows(path, "outer_step") for path in sorted(folder.glob("replica_*/probe.jsonl"))]
    answer = []
    for when in ("before", "after"):
        weights = np.array([[row[when] for row in rows] for rows in probes])  # [N, outer steps, sampled weights]
        mean = weights.mean(0)
        deviation = np.sqrt(np.square(weights - mean).sum(-1).mean(0))
        answer.append(deviation / np.linalg.norm(mean, axis=-1))
    return answer[0], answer[1]


def check(config: configs.Config, figures: dict[str, Any], parameters: int) -> None:
    """Raise ValueError unless the run shows what NoLoCo promises."""
    replicas = config.topology.replicas
    expected_bytes = 4 * parameters * figures["outer_steps"] * replicas
    wrong = []
    if not figures["worst_val_loss"] < figures["bound"]:
        wrong.append(f"validation loss {figures['worst_val_loss']:.4f} is not below {figures['bound']:.4f}")
    if figures["missed"]:
        wrong.append(f"{figures['missed']} exchanges missed")
    if figures["exchange_bytes"] != expected_bytes:
        wrong.append(
            f"{figures['exchange_bytes']} bytes sent, not 4 · {parameters} parameters · {figures['outer_steps']} outer "
            f"steps · {replicas} replicas = {expected_bytes}"
        )
    if figures["deviation_falls"] < 0.9:
        wrong.append(
            f"the replicas' deviation from their mean fell at only {figures['deviation_falls']:.0%} of the outer steps"
        )
    if wrong:
        raise ValueError("the demo's figures are wrong: " + "; ".join(wrong))
    print("\nall figures as they should be")


def run(arguments: argparse.Namespace) -> None:
    overrides = [f"{key}={value}" for key, value in SHORT.items()] if arguments.short else []
    overrides += arguments.overrides
    config = configs.load(ROOT / CONFIG, overrides)
    try:
        prepare(config)
        train(config, overrides)
        figures = report(config)
        print("\nwhat the mean of the replicas writes", flush=True)
        weights = sorted((ROOT / config.output).glob("replica_*/weights"))
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        tool("tools/generate.py", *weights, *prompts, "--tokens", 60)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"a step failed, see above: {' '.join(map(str, error.cmd))}") from None
    if arguments.check:
        check(config, figures, model_parameters(config))
    print(f"curves: {config.output / 'curves.png'}   rows: {config.output / 'metrics.jsonl'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="train less")
    parser.add_argument("--check", action="store_true", help="fail unless the figures are right")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
