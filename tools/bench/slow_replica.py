"""How much does one slow replica cost? NoLoCo against an all-reduce of every inner step, side by side.

    python -m tools.bench.slow_replica [--replicas 8] [--steps 60] [--slowdown 4]

Each run trains the demo's model (its data must be there: `make demo` or `make demo-short` makes it) with one rank per
replica, of which one is suspended for most of the time, so that it takes SLOWDOWN times longer for its steps. Printed
for each: seconds from the first row to the end, tokens that all replicas trained on per second, and the ratio. All
processes share this machine's cores, so that only the ratio means something.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from noloco_mega import config as configs
from noloco_mega.comm.rendezvous import RendezvousServer
from noloco_mega.entry import guarded
from noloco_mega.metrics import read_rows

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "noloco": "configs/demo_noloco_fixed_4x2.json",
    "allreduce": "configs/demo_allreduce_fixed_4x2.json",
}
PERIOD_SECONDS = 0.2
"""Of suspending and resuming the slow replica."""


def overrides(arguments: argparse.Namespace, directory: Path) -> list[str]:
    steps = arguments.steps
    return [
        f"topology.replicas={arguments.replicas}",
        "topology.stages=1",
        f"run.directory={directory}",
        f"run.steps={steps}",
        f"scheduler.params.total_num_steps={steps}",
        "run.log_every=1",
        "run.eval_every=0",
        "run.eval_microbatches=1",
        "run.tensorboard=false",
        "noloco.exchange_deadline_seconds=20",
        "noloco.link_timeout_seconds=120",
    ]


def start(name: str, settings: list[str], replica: int, address: str, secret: str) -> subprocess.Popen:
    """The one rank of a replica."""
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "NOLOCO_REPLICA": str(replica),
        "NOLOCO_RENDEZVOUS": address,
        "NOLOCO_SECRET": secret,
    }
    words = [sys.executable, "-m", "noloco_mega.train", "--config", CONFIGS[name]]
    words += [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(words, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)


def hold_back(process: subprocess.Popen, others: list[subprocess.Popen], slowdown: float) -> None:
    """Let a process run for 1/slowdown of the time until all have ended."""
    while any(each.poll() is None for each in (process, *others)):
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(PERIOD_SECONDS * (1 - 1 / slowdown))
            process.send_signal(signal.SIGCONT)
        time.sleep(PERIOD_SECONDS / slowdown)


def measure(name: str, arguments: argparse.Namespace) -> float:
    """Tokens per second of all replicas together, once everybody trains."""
    with tempfile.TemporaryDirectory() as folder:
        settings = overrides(arguments, Path(folder))
        config = configs.load(ROOT / CONFIGS[name], settings)
        secret = secrets.token_hex(16)
        server = RendezvousServer(secret.encode())
        address = "{}:{}".format(*server.address)
        processes = [start(name, settings, replica, address, secret) for replica in range(arguments.replicas)]
        rows_path = config.output / "metrics.jsonl"
        try:
            while not (rows_path.exists() and any(row["loss"] is not None for row in read_rows(rows_path))):
                if any(process.poll() not in (None, 0) for process in processes):
                    raise ValueError(f"the run with {name} could not start; its output above says why")
                time.sleep(0.1)
            began = time.monotonic()
            hold_back(processes[0], processes[1:], arguments.slowdown)
            seconds = time.monotonic() - began
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            server.close()
        rows = read_rows(rows_path)
    last = {row["replica"]: row for row in rows}
    tokens = sum(row["tokens"] for row in last.values())
    skipped = sum(row["skipped_steps"] or 0 for row in rows)
    missed = sum(row["missed"] or 0 for row in rows)
    print(
        f"{name:10} {seconds:7.1f} s  {tokens / seconds:9,.0f} tokens/s of {arguments.replicas} replicas; "
        f"{skipped} inner steps left out, {missed} exchanges missed",
        flush=True,
    )
    return tokens / seconds


def run(arguments: argparse.Namespace) -> None:
    rates = {name: measure(name, arguments) for name in CONFIGS}
    print(f"noloco / allreduce: {rates['noloco'] / rates['allreduce']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slowdown", type=float, default=4.0, help="how many times longer the slow replica takes")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
