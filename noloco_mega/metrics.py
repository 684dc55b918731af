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
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Row = Mapping[str, Any]


class Tracker(Protocol):
    """A destination of rows."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends rows to one file that all replicas share.

    Each row is one write under a lock on the file, so rows of several replicas never mix, also on a network file
    system that supports POSIX locks.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def log(self, row: Row) -> None:
        line = json.dumps({key: _plain(value) for key, value in row.items()}) + "\n"
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            self._file.write(line.encode())
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

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
    """One live line: step, loss, tokens per second, time left. Off a terminal: a plain line every few seconds."""

    PLAIN_SECONDS = 5.0

    def __init__(self, steps: int, replicas: int) -> None:
        self._console = Console()
        self._steps = steps
        self._replicas = replicas
        self._began = time.monotonic()
        self._printed = -math.inf
        self._shown: dict[str, str] = {}
        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps)
        self._live.start()

    def log(self, row: Row) -> None:
        """`tokens_per_second` of a row is the replica's own; the line shows the whole run's."""
        for key, form in {"loss": "loss {:.4f}", "val_loss": "val_loss {:.4f}", "spread": "spread {:.4f}"}.items():
            if row.get(key) is not None:
                self._shown[key] = form.format(row[key])
        if row.get("tokens_per_second") is not None:
            self._shown["tokens_per_second"] = f"{row['tokens_per_second'] * self._replicas:,.0f} tokens/s"
        text = "  ".join(self._shown.values())
        self._live.update(self._task, completed=row["step"], description=text)
        now = time.monotonic()
        due = now - self._printed >= self.PLAIN_SECONDS or row["step"] == self._steps
        if not self._console.is_terminal and due:
            self._printed = now
            left = (now - self._began) / max(row["step"], 1) * (self._steps - row["step"])
            # One write with its newline: launchers pass on pieces of lines as they come.
            self._console.file.write(f"step {row['step']}/{self._steps}  {text}  {left:,.0f} s left\n")
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
