"""Where do measurements go? Rows into metrics.jsonl, TensorBoard events, one live progress line.

A tracker takes rows: dictionaries with at least `step` and `replica`. What a row has no value for is None, never zero.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from rich.console import Console
from rich.progress import Progress, TextColumn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Row = Mapping[str, Any]

ORDER = ("loss", "val_loss", "spread", "speed", "left")
"""Of the parts of the progress line."""
TAIL_BYTES = 1 << 16
"""Read at once in search of the last line's beginning."""


class Tracker(Protocol):
    """A destination of rows."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends rows to one file that all replicas share.

    Each row is one write to the end of the file, under a lock where one can be had at once or soon: rows of several
    replicas never mix, also on a network file system that supports POSIX locks, and a process that was suspended
    while it held the lock holds nobody. A last line that a dying process or a full disk has cut off is removed. A file
    that is removed meanwhile is begun anew.
    """

    LOCK_SECONDS = 1.0

    def __init__(self, path: Path) -> None:
        """Nothing is opened before the first row."""
        self._path = path
        self._file: BinaryIO | None = None
        self._kept = b""

    def log(self, row: Row, *, keep: bool = False) -> None:
        """Append a row. Raises OSError; with `keep` it then goes before the next row that can be written."""
        line = (json.dumps({key: _plain(value) for key, value in row.items()}) + "\n").encode()
        try:
            self._append(self._kept + line)
        except OSError:
            self._kept += line if keep else b""
            raise
        self._kept = b""

    def _append(self, lines: bytes) -> None:
        if self._file is None or identity(self._path) != identity(self._file.fileno()):
            self.close()
            self._file = open(self._path, "ab+", buffering=0)  # noqa: SIM115 - lives as long as the run
            with self._locked():
                self._drop_cut_line()
        with self._locked():
            end = self._file.seek(0, os.SEEK_END)
            if self._file.write(lines) < len(lines):
                self._file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        assert self._file is not None
        locked = self._lock(self._file)
        try:
            yield
        finally:
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock(self, file: BinaryIO) -> bool:
        deadline = time.monotonic() + self.LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.005)
        return False

    def _drop_cut_line(self) -> None:
        assert self._file is not None
        end = position = self._file.seek(0, os.SEEK_END)
        tail = b""
        while position > 0 and b"\n" not in tail:
            start = max(0, position - TAIL_BYTES)
            self._file.seek(start)
            tail = self._file.read(position - start)
            position = start
        whole = position + tail.rfind(b"\n") + 1
        if whole < end:
            self._file.truncate(whole)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """The numeric values of a row as scalars, those of an object under KEY/NAME; one event file per replica, and
    a new one if the folder is removed."""

    def __init__(self, folder: Path, start: int | None = None) -> None:
        """`start`: the step that the run goes on from; events of later steps, which it left there, disappear."""
        self._folder, self._start = folder, start
        self._writer: SummaryWriter | None = None
        self._within: tuple[int, int] | None = None

    def log(self, row: Row) -> None:
        if self._writer is None or identity(self._folder) != self._within:
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            self._writer = SummaryWriter(str(self._folder), purge_step=None if self._start is None else self._start + 1)
            self._within = identity(self._folder)
        try:
            for key, value in row.items():
                parts = value if isinstance(value, Mapping) else {"": value}
                for tag, number in ((f"{key}/{name}" if name else key, part) for name, part in parts.items()):
                    if tag not in ("step", "replica") and isinstance(number, (int, float)):
                        self._writer.add_scalar(tag, number, row["step"])
        except OSError:
            self.close()  # a writer that has failed once fails for ever
            raise

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # of events that were lost before
                self._writer.close()
            self._writer = None


class ProgressLine:
    """One live line: step, loss, speed, time left. Off a terminal: a plain line every few seconds.

    Losses and spread are those of the replica that writes; tokens/s is its own speed times the number of replicas.
    """

    PLAIN_SECONDS = 5.0

    def __init__(self, steps: int, replicas: int, start: int = 0) -> None:
        self._console = Console()
        self._steps = steps
        self._replicas = replicas
        self._start = start
        self._began: float | None = None
        self._printed = -math.inf
        self._shown: dict[str, str] = {}
        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps, completed=start)
        self._live.start()

    def log(self, row: Row) -> None:
        step, now = row["step"], time.monotonic()
        if self._began is None:
            # The row of the start, which follows the first evaluation; or the first row of a resumed run.
            self._began, self._start = now, step
        if row.get("loss") is not None:
            self._shown["loss"] = f"loss {row['loss']:.3f}"
        if row.get("val_loss") is not None:
            self._shown["val_loss"] = f"val {row['val_loss']:.3f} @{step}"
        if row.get("spread") is not None:
            self._shown["spread"] = f"spread {row['spread']:.3f}"
        if row.get("tokens_per_second") is not None:
            self._shown["speed"] = f"{row['tokens_per_second'] * self._replicas:,.0f} tokens/s"
        if self._start < step < self._steps:
            left_seconds = (now - self._began) / (step - self._start) * (self._steps - step)
            self._shown["left"] = f"{left_seconds:,.0f} s left"
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
        """Give all of them the row. Raises the first OSError, once every one has had it."""
        errors = []
        for tracker in self._trackers:
            try:
                tracker.log(row)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def read_rows(path: Path, counter: str = "step") -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl (or of another file whose rows count by `counter`), in file order, as one run.

    A run that was resumed at `counter` c begins there with a row that says "resumed": true. Such rows are left out, and
    with them what the replica had written beyond c before (all of it, where c is 0: the run began anew), and what it
    had written at c only because the run ended there (`at_end`). A last line cut off by a killed process is left out.
    """
    rows: dict[int, dict[str, Any]] = {}
    of_replica: dict[Any, list[int]] = {}
    for number, row in enumerate(_lines(path)):
        own = of_replica.setdefault(row.get("replica"), [])
        if row.get("resumed"):
            while own and (rows[own[-1]][counter] > row[counter] or row[counter] == 0):
                del rows[own.pop()]
            if own and rows[own[-1]][counter] == row[counter]:
                _undo_end(rows, own)
            continue
        own.append(number)
        rows[number] = row
    return list(rows.values())


def _undo_end(rows: dict[int, dict[str, Any]], own: list[int]) -> None:
    """The run went on after a replica's last row: leave out what it would not have had without the end."""
    last = rows[own[-1]]
    if last.get("at_end") == "row":
        del rows[own.pop()]
    elif last.get("at_end") == "val_loss":
        last |= {"val_loss": None, "at_end": None}


def identity(file: Path | int) -> tuple[int, int] | None:
    """What tells a file or folder (by path or descriptor) from another one that takes its place; None: there is none.

    Raises OSError where that can't be found out.
    """
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            yield {key: _number(value) for key, value in json.loads(line).items()}
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1} is not JSON") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    os.replace(draft, path)


def _number(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, dict):
        return {key: _number(part) for key, part in value.items()}
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity; they are written as strings, so that a diverged run still parses everywhere."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
