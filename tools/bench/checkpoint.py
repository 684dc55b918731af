"""How fast are checkpoints written and read, beside plain files? And for how long does training stand still for them?

    python -m tools.bench.checkpoint [--megabytes 400] [--rounds 5] [--folder FOLDER] [--stall-steps 60]

Throughput: one rank's state (five flat fp32 tensors) against the same bytes in one plain file on the same disk, taking
turns, synced to disk and read back: with a cold cache, and again with a warm one, where a read is a copy in memory and
the checksums decide. Saving writes the file with its checksums, the manifest, and renames; loading reads every tensor
into its place and verifies all checksums, as a resumed rank does. The ratio is the median over the rounds, each of
which compares the two at nearly the same moment.

Stall: the demo's configuration for `--stall-steps` steps with a checkpoint at every third of them, written behind
training; the share of the time between checkpoints for which the loop stood still. 0 leaves it out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from noloco_mega import config as configs
from noloco_mega.checkpoint.format import RankContent, Span, Stored, commit, write_rank
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.comm.transfer import bytes_of
from noloco_mega.metrics import read_rows
from noloco_mega.model.parameters import ParameterSlices, Piece
from tools import demo

KINDS = ("master", "exp_avg", "exp_avg_sq", "outer.phi", "outer.delta")
PAIRS = (("save", "write"), ("load", "read"), ("load again", "read again"))
"""What is compared: ours, and the plain way."""


def state(megabytes: int) -> RankContent:
    """Random tensors, as one rank of a replica would hold them."""
    numel = megabytes * 250_000 // len(KINDS)
    box = ((0, numel),)
    return RankContent(
        tensors=[Stored(key=f"{kind}.0", kind=kind, tensor=torch.randn(numel), layout="0") for kind in KINDS],
        layouts={"0": [Span("weight", 0, 0, numel)]},
        slices=[ParameterSlices("weight", (numel,), (Piece(box, box),))],
        numbers={},
    )


def save(folder: Path, content: RankContent) -> None:
    draft = folder.with_name(".draft")
    draft.mkdir()
    write_rank(draft, 0, content)
    commit(draft, folder, [0], {"step": 0})


def load(folder: Path, targets: list[torch.Tensor]) -> None:
    saved = SavedReplica(folder)
    (part,) = saved.parts
    saved.load(part, {tensor["key"]: target for tensor, target in zip(part["tensors"], targets, strict=True)})


def plain_write(path: Path, content: RankContent) -> None:
    with open(path, "wb", buffering=0) as file:
        for stored in content.tensors:
            data = bytes_of(stored.tensor)
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())


def plain_read(path: Path, targets: list[torch.Tensor]) -> None:
    with open(path, "rb", buffering=0) as file:
        for target in targets:
            data = bytes_of(target)
            while data:
                data = data[file.readinto(data) :]  # type: ignore[attr-defined]


def forget(path: Path) -> None:
    """Drop a file's pages from the cache, so that it is read from the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def seconds_of(function, *arguments) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def throughput(root: Path, megabytes: int, rounds: int) -> None:
    content = state(megabytes)
    targets = [torch.empty_like(stored.tensor) for stored in content.tensors]
    folder, plain = root / "saved", root / "plain"
    taken: dict[str, list[float]] = {name: [] for pair in PAIRS for name in pair}
    for number in range(rounds + 1):
        shutil.rmtree(folder, ignore_errors=True)
        plain.unlink(missing_ok=True)
        one = {}
        # Who comes first changes from round to round.
        for name in ("write", "save")[:: 1 - 2 * (number % 2)]:
            one[name] = (
                seconds_of(plain_write, plain, content) if name == "write" else seconds_of(save, folder, content)
            )
        forget(plain)
        one["read"] = seconds_of(plain_read, plain, targets)
        one["read again"] = seconds_of(plain_read, plain, targets)
        for target in targets:
            target.zero_()
        forget(folder / "rank_000.safetensors")
        one["load"] = seconds_of(load, folder, targets)
        one["load again"] = seconds_of(load, folder, targets)
        assert all(torch.equal(t, s.tensor) for t, s in zip(targets, content.tensors, strict=True))
        if number > 0:  # the first round warms up
            for name, value in one.items():
                taken[name].append(value)
    for ours, theirs in PAIRS:
        ratios = [b / a for a, b in zip(taken[ours], taken[theirs], strict=True)]
        rate = {name: megabytes / 1e3 / statistics.median(taken[name]) for name in (ours, theirs)}
        print(
            f"{ours:10s}  {rate[ours]:5.2f} GB/s, plain {theirs} {rate[theirs]:5.2f} GB/s: "
            f"{statistics.median(ratios):4.2f} x (rounds {min(ratios):.2f}-{max(ratios):.2f})"
        )


def stall(root: Path, steps: int) -> None:
    sets = [f"run.directory={root}", "run.tensorboard=false", f"run.steps={steps}", "run.eval_every=0"]
    sets += ["run.log_every=5", f"run.save_every={steps // 3}", "run.eval_microbatches=2"]
    config = configs.load(demo.ROOT / demo.CONFIG, sets)
    demo.prepare(config)
    words = [word for override in sets for word in ("--set", override)]
    subprocess.run(
        ["launch/local.sh", demo.CONFIG, *words],
        check=True,
        cwd=demo.ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
    )
    tokens = config.replica_step_tokens
    shares = []
    for replica in range(config.topology.replicas):
        rows = [
            r for r in read_rows(config.output / "metrics.jsonl") if r["replica"] == replica and r["loss"] is not None
        ]
        before = [0, *(row["step"] for row in rows[:-1])]
        total = sum((r["step"] - b) * tokens / r["tokens_per_second"] for r, b in zip(rows, before, strict=True))
        stopped = [row["save_seconds"] for row in rows if row["save_seconds"] is not None]
        shares.append(sum(stopped) / total)
        print(
            f"stall  replica {replica}: {len(stopped)} saves, {1e3 * statistics.mean(stopped):.1f} ms each; "
            f"{100 * shares[-1]:.2f} % of {total:.1f} s"
        )
    print(f"stall  at most {100 * max(shares):.2f} % of the time between checkpoints, {steps // 3} steps apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder's)")
    parser.add_argument("--stall-steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        throughput(Path(folder), arguments.megabytes, arguments.rounds)
        if arguments.stall_steps:
            stall(Path(folder), arguments.stall_steps)


if __name__ == "__main__":
    main()
