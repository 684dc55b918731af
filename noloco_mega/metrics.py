"""Where do measurements go? Rows into metrics.jsonl, TensorBoard events, one live progress line.

A tracker takes rows: dictionaries with at least `step` and `replica`. What a row has no value for is None, never zero.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress, TextColumn

Row = Mapping[str, Any]

ORDER = ("loss", "val_loss", "spread", "speed", "left")
"""Of the parts of the progress line."""


class Tracker(Protocol):
    """A destination of rows."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends rows to one file that all replicas share.

    Each row is one write to the end of the file, under a lock where one can be had at once or soon: rows of several
    replicas never mix, also on a network file system that supports POSIX locks, and a process that was suspended
    while it held the lock holds nobody.
    """

    LOCK_SECONDS = 1.0

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def log(self, row: Row) -> None:
        line = json.dumps({key: _plain(value) for key, value in row.items()}) + "\n"
        locked = self._lock()
        try:
            self._file.write(line.encode())
        finally:
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        deadline = time.monotonic() + self.LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.005)
        return False

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """The numeric values of a row as scalars, one event file per replica."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, row: Row) -> None:
        for key, value in row.items():
            if key not in ("step", "replica") and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class ProgressLine:
    """One live line: step, loss, speed, time left. Off a terminal: a plain line every few seconds.

    Losses and spread are those of the replica that writes; tokens/s is its own speed times the number of replicas.
    """

    PLAIN_SECONDS = 5.0

    def __init__(self, steps: int, replicas: int) -> None:
        self._console = Console()
        self._steps = steps
        self._replicas = replicas
        self._began: float | None = None
        self._printed = -math.inf
        self._shown: dict[str, str] = {}
        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps)
        self._live.start()

    def log(self, row: Row) -> None:
        step, now = row["step"], time.monotonic()
        if self._began is None:
            self._began = now  # the row of the start, which follows the first evaluation
        if row.get("loss") is not None:
            self._shown["loss"] = f"loss {row['loss']:.3f}"
        if row.get("val_loss") is not None:
            self._shown["val_loss"] = f"val {row['val_loss']:.3f} @{step}"
        if row.get("spread") is not None:
            self._shown["spread"] = f"spread {row['spread']:.3f}"
        if row.get("tokens_per_second") is not None:
            self._shown["speed"] = f"{row['tokens_per_second'] * self._replicas:,.0f} tokens/s"
        if 0 < step < self._steps:
            self._shown["left"] = f"{(now - self._began) / step * (self._steps - step):,.0f} s left"
        else:
            self._shown.pop("left", None)
        text = "  ".join(self._shown[key] for key in ORDER if key in self._shown)
        self._live.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and (now - self._printed >= self.PLAIN_SECONDS or step == self._steps):
            self._printed = now
            # One write with its newline: launchers pass on pieces of lines as they come.
            self._console.file.write(f"step {step}/{self._steps}  {text}\n")
            self._console.file.flush()

    def close(self) -> None:
        self._live.stop()


class Trackers:
    """Several trackers as one; none at all on ranks that do not write."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, row: Row) -> None:
        for tracker in self._trackers:
            tracker.log(row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl, in file order. A last line cut off by a killed process is left out."""
    rows = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            rows.append({key: _number(value) for key, value in json.loads(line).items()})
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1} is not JSON") from None
    return rows


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    os.replace(draft, path)


def _number(value: Any) -> Any:
    """The inverse of `_plain`."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity; they are written as strings, so that a diverged run still parses everywhere."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
