"""Run a function on several processes, as a run's ranks, with a hang limit and a preloaded forkserver.

    results = run_ranks(worker, grid, tmp_path, argument, limit_seconds=60)

calls ``worker(grid.place(rank), tmp_path, argument)`` in one process per rank; values in rank order. A worker
that raises fails the test with its traceback; one that outlives the limit is killed, as are all its siblings (only
processes started here are ever signalled).
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from noloco_mega.grid import Grid, Place

PRELOAD = [
    "noloco_mega",
    "torch",
    "torch.distributed",
    "deepspeed",
    "deepspeed.comm",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.datasets.gpt_dataset",
    "noloco_mega.pipeline",
    "noloco_mega.bootstrap",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def _enter(results: Any, rank: int, worker: Callable[..., Any], place: Any, directory: Path, args: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, worker(place, directory, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


class Ranks:
    """The processes of one test run. `processes[rank].pid` is there for tests that kill or suspend one."""

    def __init__(self, worker: Callable[..., Any], places: list[Any], directory: Path, args: tuple) -> None:
        self._results = _context.Queue()
        self.processes = [
            _context.Process(target=_enter, args=(self._results, rank, worker, place, directory, args), daemon=True)
            for rank, place in enumerate(places)
        ]
        for process in self.processes:
            process.start()

    def wait(self, limit_seconds: float, expect_missing: frozenset[int] = frozenset()) -> dict[int, Any]:
        """Each rank's return value. `expect_missing` names ranks that the test itself kills."""
        deadline = time.monotonic() + limit_seconds
        values: dict[int, Any] = {}
        wanted = set(range(len(self.processes))) - expect_missing
        try:
            while wanted - values.keys():
                try:
                    rank, good, value = self._results.get(timeout=0.2)
                except queue.Empty:
                    dead = [r for r in wanted - values.keys() if self.processes[r].exitcode not in (None, 0)]
                    assert not dead, f"ranks {dead} died: exit codes {[self.processes[r].exitcode for r in dead]}"
                    assert time.monotonic() < deadline, (
                        f"hang: ranks {sorted(wanted - values.keys())} not done in {limit_seconds} s"
                    )
                    continue
                assert good or rank in expect_missing, f"rank {rank} failed:\n{value}"
                values[rank] = value
            return values
        finally:
            self.stop()

    def stop(self) -> None:
        for process in self.processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()


def run_ranks(
    worker: Callable[..., Any], grid: Grid | int, directory: Path, *args: Any, limit_seconds: float = 120
) -> list[Any]:
    """Run worker(place, directory, *args) on every place of a grid (or on plain ranks 0..n-1); values in rank order."""
    places: list[Any] = list(grid.places()) if isinstance(grid, Grid) else list(range(grid))
    values = Ranks(worker, places, directory, args).wait(limit_seconds)
    return [values[rank] for rank in range(len(places))]


def replica_world(grid: Grid, place: Place, directory: Path, timeout_seconds: float = 60, name: str = "store") -> Any:
    """This rank's ReplicaWorld for a test, on a file store of the replica's own."""
    import torch.distributed as dist

    from noloco_mega import device
    from noloco_mega.comm import groups

    store = dist.FileStore(str(directory / f"{name}_{place.replica}"), grid.replica_size)
    return groups.start_replica(grid, place, device.select(0), store, timedelta(seconds=timeout_seconds))
