"""Run all ranks of a config as a launcher would, one launch per replica, in processes of the preloaded forkserver."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path

from noloco_mega import config as configs
from noloco_mega import launcher
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.comm.rendezvous import RendezvousServer
from noloco_mega.metrics import read_rows
from tests.harness import Ranks

SECRET = "a secret for these tests only"


def train_rank(place, directory, raw, address, errors=None, step_seconds=None):
    """What one launched process does; the worker of a test. Its stderr is appended to the file `errors`.

    With `step_seconds` each of its inner steps takes that much longer: one number for each replica.
    """
    if errors is not None:
        with open(errors, "ab") as file:
            os.dup2(file.fileno(), 2)
    config = configs.parse(raw)
    grid = config.topology.grid()
    os.environ.update(
        RANK=str(grid.replica_rank(place)),
        WORLD_SIZE=str(grid.replica_size),
        LOCAL_RANK=str(grid.replica_rank(place)),
        NOLOCO_REPLICA=str(place.replica),
        NOLOCO_RENDEZVOUS=address,
        NOLOCO_SECRET=SECRET,
    )
    from noloco_mega.train import train

    if step_seconds is not None:
        _slow_down(step_seconds[place.replica])
    launch = launcher.read()
    assert launcher.place(launch, grid) == place
    return train(config, launch, place)


def poisoned_rank(place, directory, raw, address, victim, step):
    """`train_rank`, in which the weights of place `victim` become NaN right before inner step `step`."""
    import torch

    from noloco_mega.engine import deepspeed as engines
    from noloco_mega.engine.weights import Masters

    begin, begun = engines.begin, [0]

    def poisoning(engine):
        begin(engine)
        begun[0] += 1
        if tuple(place) == tuple(victim) and begun[0] == step:
            with torch.no_grad():
                Masters(engine).tensors[0].fill_(float("nan"))
            Masters(engine).publish()

    engines.begin = poisoning
    return train_rank(place, directory, raw, address)


def _slow_down(seconds: float):
    from noloco_mega.pipeline import Pipeline

    whole = Pipeline.forward_backward

    def slow(self, *arguments):
        time.sleep(seconds)
        return whole(self, *arguments)

    Pipeline.forward_backward = slow


@contextmanager
def launched(raw, directory: Path, errors: Path | None = None, step_seconds=None, poison=None, only=None):
    """The running ranks of a config, in rank order; their stderr goes into the file `errors`, if one is given.

    `only`: of these replicas. `restart` starts one of any, again or for the first time.
    """
    server = RendezvousServer(SECRET.encode())
    places = list(configs.parse(raw).topology.grid().places())
    address = "{}:{}".format(*server.address)
    if poison is None:
        begin = [place for place in places if only is None or place.replica in only]
        ranks = Ranks(train_rank, begin, directory, (raw, address, errors, step_seconds))
    else:
        ranks = Ranks(poisoned_rank, places, directory, (raw, address, *poison))
    again: list[Ranks] = []

    def restart(replica: int, **changes) -> Ranks:
        """The ranks of a replica, started now."""
        own = [place for place in places if place.replica == replica]
        again.append(Ranks(train_rank, own, directory, ({**raw, **changes}, address, errors, step_seconds)))
        return again[-1]

    ranks.restart, ranks.rendezvous = restart, server
    try:
        yield ranks
    finally:
        for each in (ranks, *again):
            each.stop()
        server.close()


def run(raw, directory: Path, limit_seconds: float = 120):
    """Run a config to its end; its rows."""
    with launched(raw, directory) as ranks:
        ranks.wait(limit_seconds)
    return rows_of(raw)


def rows_of(raw):
    return read_rows(configs.parse(raw).output / "metrics.jsonl")


def values(rows, key, replica=None):
    """The column `key` of the rows that have a value there."""
    return [row[key] for row in rows if row[key] is not None and (replica is None or row["replica"] == replica)]


def wait_for_step(raw, step, ranks, limit_seconds=90, replica=None):
    """Wait until some row of that step is there, which proves that training is under way."""
    path = configs.parse(raw).output / "metrics.jsonl"
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        if path.exists():
            rows = [row for row in rows_of(raw) if row["loss"] is not None and replica in (None, row["replica"])]
            if any(row["step"] >= step for row in rows):
                return
        assert any(process.is_alive() for process in ranks.processes), "all ranks are gone"
        time.sleep(0.05)
    raise AssertionError(f"no row of step {step} in {limit_seconds} s")


def weights(raw):
    output = configs.parse(raw).output
    return [SavedReplica(folder) for folder in sorted(output.glob("replica_*/weights"))]
