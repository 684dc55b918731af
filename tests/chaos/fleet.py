"""The processes of a run on a network of their own, what is done to them, and what they write meanwhile."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from noloco_mega import config as configs
from noloco_mega.comm.rendezvous import RendezvousServer
from tests.chaos import network as networks
from tests.chaos.network import HUB, Network
from tests.e2e.runs import SECRET, train_rank

PORT = 29400
LOOK_SECONDS = 0.05

_context = multiprocessing.get_context("forkserver")


def _rank(namespace: str, host: str, output: Path, place: Any, raw: dict[str, Any], address: str) -> None:
    networks.enter(namespace)
    os.environ.update(OMP_NUM_THREADS="1", NOLOCO_HOST=host)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
    import torch

    torch.set_num_threads(1)
    train_rank(place, output.parent, raw, address, output)


def _rendezvous(namespace: str, host: str) -> None:
    networks.enter(namespace)
    RendezvousServer(SECRET.encode(), host, PORT)
    threading.Event().wait()


@dataclass(frozen=True)
class Stamped:
    """A row of metrics.jsonl, and when it was there (monotonic seconds)."""

    at: float
    row: dict[str, Any]


class Fleet:
    """A context manager: the run's processes live inside it. Only processes started here are ever signalled."""

    def __init__(self, raw: dict[str, Any], network: Network, folder: Path) -> None:
        self.raw, self.network, self.folder = raw, network, folder
        self.config = configs.parse(raw)
        self.grid = self.config.topology.grid()
        self.replicas, self.ranks = self.grid.replicas, self.grid.replica_size
        self.rows: list[Stamped] = []
        """All training rows so far, by arrival."""
        self._processes: dict[tuple[int, int], Any] = {}
        self._rendezvous: Any = None
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Fleet:
        self.folder.mkdir(exist_ok=True)
        self.serve_rendezvous()
        for replica in range(self.replicas):
            self.start(replica)
        self._reader.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._reader.join()
        for process in [*self._processes.values(), self._rendezvous]:
            process.kill()
            process.join()

    # What can be done to it

    def serve_rendezvous(self) -> None:
        arguments = (self.network.namespace(HUB), self.network.address(HUB))
        self._rendezvous = _context.Process(target=_rendezvous, args=arguments, daemon=True)
        self._rendezvous.start()

    def end_rendezvous(self) -> None:
        assert self._rendezvous.is_alive()
        self._rendezvous.kill()
        self._rendezvous.join()

    def start(self, replica: int) -> None:
        """Start all ranks of a replica, none of which may run."""
        namespace, host = self.network.namespace(replica), self.network.address(replica)
        meeting = f"{self.network.address(HUB)}:{PORT}"
        for rank in range(self.ranks):
            assert not self.runs(replica, rank)
            output = self.output(replica, rank)
            place = self.grid.place(replica * self.ranks + rank)
            arguments = (namespace, host, output, place, self.raw, meeting)
            process = _context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self._processes[(replica, rank)] = process

    def signal(self, replica: int, rank: int, number: signal.Signals) -> None:
        os.kill(self._processes[(replica, rank)].pid, number)

    # What can be seen of it

    def output(self, replica: int, rank: int) -> Path:
        """What the rank prints, over all its lives."""
        return self.folder / f"replica_{replica}_rank_{rank}.log"

    def outputs(self) -> str:
        """The end of what all ranks have printed."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def runs(self, replica: int, rank: int) -> bool:
        """Whether the process exists and is neither suspended nor ended."""
        process = self._processes.get((replica, rank))
        return process is not None and self._state(process.pid) not in (None, psutil.STATUS_STOPPED)

    def suspended(self, replica: int, rank: int) -> bool:
        return self._state(self._processes[(replica, rank)].pid) == psutil.STATUS_STOPPED

    def ended(self, replica: int) -> bool:
        """Whether all ranks of a replica have ended."""
        return all(self._processes[(replica, rank)].exitcode is not None for rank in range(self.ranks))

    def statuses(self, replica: int) -> list[int | None]:
        """The exit statuses of a replica's ranks, None for those that run."""
        return [self._processes[(replica, rank)].exitcode for rank in range(self.ranks)]

    def step(self) -> int:
        """The furthest inner step of any replica."""
        return max((stamped.row["step"] for stamped in list(self.rows)), default=0)

    def rows_since(self, at: float, replica: int | None = None) -> list[Stamped]:
        return [s for s in list(self.rows) if s.at > at and replica in (None, s.row["replica"])]

    def wait(self, ready: Callable[[], bool], what: str, limit_seconds: float, meanwhile: Callable[[], None]) -> None:
        """Wait for something, calling `meanwhile` often. Raises AssertionError after the limit."""
        deadline = time.monotonic() + limit_seconds
        while not ready():
            meanwhile()
            assert time.monotonic() < deadline, f"{what}: not in {limit_seconds} s\n{self.outputs()}"
            time.sleep(LOOK_SECONDS)

    @staticmethod
    def _state(pid: int) -> str | None:
        try:
            state = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return None
        return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state

    def _read(self) -> None:
        path, position = self.config.output / "metrics.jsonl", 0
        while not self._ended.wait(LOOK_SECONDS):
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(position)
                whole = file.read().rpartition(b"\n")[0]
            now = time.monotonic()
            for line in whole.splitlines():
                row = json.loads(line)
                if row.get("loss") is not None:
                    self.rows.append(Stamped(now, row))
            position += len(whole) + bool(whole)
