"""The paper's comparison at small scale: every outer optimizer, its ablations, and routing in distributed runs.

    python -m tools.reproduce [--plan] [--report] [--quick | --better] [--directory runs/reproduce]

Runs all cells of noloco_mega/lab/matrix.py, two simulated ones at a time with one thread each, then the distributed
ones one by one. Each finished cell is one JSON in the directory and is not run again; a cell that was stopped or
killed goes on from its saved state. `--plan` prints the cells and how long they take, `--report` writes the tables of
docs/results.md from what is there; both run nothing. `--quick` runs a small part, in a folder of its own, and fails
unless all-reduce <= NoLoCo < local, with margins above two standard errors. `--better` compares the options of NoLoCo's
outer step with a larger model, in a folder of its own too.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from noloco_mega import config as configs
from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.costs import model_parameters
from noloco_mega.entry import guarded
from noloco_mega.lab import matrix, tables
from noloco_mega.lab.matrix import Cell, Scale
from noloco_mega.lab.record import RESULT
from noloco_mega.metrics import read_rows, write_json

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
"""Of the tables of a scale on the page."""
AT_ONCE = 2
LEAST_TEXT_BYTES = 20_000_000
FIRST_GUESS = {True: 3.0, False: 11.0}
"""GFlop/s of a distributed cell on two cores, and of a simulated one on one core, until cells have been measured. The
second is a measurement: the model of matrix.py did 9.6 (N = 16) to 14.4 (N = 4)."""
START_SECONDS = {True: 25.0, False: 7.0}
"""Of the imports and the first evaluation of such a cell."""
POLL_SECONDS = 0.2
SCALES = {
    "quick": "a small part, and a check of the order that comes out",
    "better": "the options of the outer step, with a model of a million parameters",
}
"""Beside the full one: the option's name, and what it says of itself. Each has a folder of its own."""
PAGE_MARKS = {"full": "tables", "better": "options"}


class Folder:
    """What a reproduction keeps on disk: NAME.json per finished cell, and what it is computed from."""

    def __init__(self, directory: Path, scale: Scale, data: Mapping[str, str]) -> None:
        self.directory, self.scale, self.data = directory, scale, data
        self.parameters = model_parameters(self._config(matrix.cells(scale)[0], 1e-3))
        self.results: dict[str, dict[str, Any]] = {}
        for cell in matrix.cells(scale):
            if (found := self._result(cell)) is not None:
                self.results[cell.name] = found

    def config(self, cell: Cell) -> configs.Config:
        """Raises ValueError where the learning rate is not chosen yet."""
        rate = cell.rate if cell.rate is not None else tables.rates(self.scale, self.results).get(cell.optimizer)
        if rate is None:
            raise ValueError(f"{cell.name} needs {cell.optimizer}'s learning rate, whose tuning runs are not finished")
        return self._config(cell, rate)

    def prepare(self, cell: Cell) -> tuple[configs.Config, Path]:
        """The cell's config, and the file that says so."""
        config = self.config(cell)
        path = self.directory / "configs" / f"{cell.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, config.to_json())
        return config, path

    def keep(self, cell: Cell, config: configs.Config, figures: Mapping[str, Any]) -> None:
        """Write a finished cell's result."""
        result = {
            "cell": asdict(cell),
            "rate": config.deepspeed["optimizer"]["params"]["lr"],
            "replicas": list(figures["replicas"].values()),
            "mean_of_weights": figures["mean_of_weights"],
            "deviation": figures["deviation"],
            "sent_bytes_per_replica": figures["sent_bytes_per_replica"],
            "diverged_step": figures["diverged_step"],
            "tokens": cell.steps * config.replica_step_tokens * cell.replicas,
            "seconds": trained_seconds(config),
            "curve": training_curve(config),
            "config": config.to_json(),
        }
        write_json(self.directory / f"{cell.name}.json", result)
        self.results[cell.name] = result

    def seconds(self, cell: Cell) -> float:
        """How long the cell takes, from the speed of finished cells of its kind."""
        distributed = is_distributed(cell)
        done = [c for c in matrix.cells(self.scale) if c.name in self.results and is_distributed(c) == distributed]
        work, speed = matrix.gigaflop(cell, self.scale, self.parameters), FIRST_GUESS[distributed]
        if done:
            taken = sum(self.results[c.name]["seconds"] for c in done)
            speed = sum(matrix.gigaflop(c, self.scale, self.parameters) for c in done) / taken
        return START_SECONDS[distributed] + work / speed

    def left_seconds(self) -> float:
        """Until all cells are finished, simulated ones AT_ONCE at a time."""
        left = [cell for cell in matrix.cells(self.scale) if cell.name not in self.results]
        return sum(self.seconds(cell) / (1 if is_distributed(cell) else AT_ONCE) for cell in left)

    def _config(self, cell: Cell, rate: float) -> configs.Config:
        runs = str(self.directory / "runs")
        return configs.parse(matrix.config_of(cell, self.scale, self.data, rate, runs))

    def _result(self, cell: Cell) -> dict[str, Any] | None:
        """The result that is there. Raises ValueError where it is of other settings."""
        path = self.directory / f"{cell.name}.json"
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_text())
        found = configs.with_defaults(result["config"])
        if _deciding(found) != _deciding(self._config(cell, result["rate"]).to_json()):
            raise ValueError(f"{path} is of other settings than {cell.name} has now; move {self.directory} away")
        return result


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the places of files, so that a directory may be moved."""
    run = {key: value for key, value in config["run"].items() if key != "directory"}
    return {**config, "run": run, "data": {}}


def is_distributed(cell: Cell) -> bool:
    return cell.part == "distributed"


def trained_seconds(config: configs.Config) -> float:
    """Time that replica 0 spent on its inner steps, evaluations in between included, over all attempts."""
    total, before = 0.0, 0
    for row in read_rows(ROOT / config.output / "metrics.jsonl"):
        if row["replica"] == 0 and row["tokens_per_second"]:
            total += (row["step"] - before) * config.replica_step_tokens / row["tokens_per_second"]
            before = row["step"]
    return total


def training_curve(config: configs.Config) -> list[float]:
    """Mean training loss over the replicas in each of tables.CURVE_PARTS parts of the run, nats per token."""
    parts: list[list[tuple[int, float]]] = [[] for _ in range(tables.CURVE_PARTS)]
    before: dict[int, int] = {}
    for row in read_rows(ROOT / config.output / "metrics.jsonl"):
        if row["loss"] is not None:
            steps = row["step"] - before.get(row["replica"], 0)
            parts[min((row["step"] - 1) * tables.CURVE_PARTS // config.run.steps, tables.CURVE_PARTS - 1)].append(
                (steps, row["loss"])
            )
            before[row["replica"]] = row["step"]
    return [sum(n * loss for n, loss in part) / max(sum(n for n, _ in part), 1) for part in parts]


def command(cell: Cell, path: Path) -> list[str]:
    """What computes the cell, from its beginning or from where it was stopped."""
    if is_distributed(cell):
        return [str(ROOT / "launch/local.sh"), str(path), "--resume", "auto"]
    return [sys.executable, "-m", "tools.simulate_convergence", "--config", str(path), "--resume", "auto"]


def figures_of(cell: Cell, config: configs.Config) -> dict[str, Any]:
    """The figures of a cell whose processes have ended well."""
    folder = ROOT / config.output
    if not is_distributed(cell):
        figures: dict[str, Any] = json.loads((folder / RESULT).read_text())
        return figures
    if not weights_are_final(config):
        raise ValueError(f"{folder} was stopped before its last step; the same command goes on with it")
    evaluation = folder / "evaluation.json"
    tool("-m", "tools.evaluate", config.output, "--json", evaluation)
    rows = read_rows(folder / "metrics.jsonl")
    sent = sum(row["exchange_bytes"] or 0 for row in rows) / cell.replicas
    return json.loads(evaluation.read_text()) | {"sent_bytes_per_replica": sent, "diverged_step": None}


def weights_are_final(config: configs.Config) -> bool:
    """Whether a distributed run has written its weights after its last step."""
    try:
        folders = [ROOT / config.replica_folder(replica) / "weights" for replica in range(config.topology.replicas)]
        return all(SavedReplica(folder).manifest["step"] == config.run.steps for folder in folders)
    except CheckpointError:
        return False


def tool(*words: str | Path | float) -> None:
    """Run one of the project's programs with this interpreter, quietly. Raises ValueError where it fails."""
    ended = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise ValueError(f"a program failed, see above: {' '.join(map(str, words))}")


class Workers:
    """The processes of the cells at work.

    They inherit the directory's lock, so that it is kept until the last one has ended. A Ctrl-C reaches them through
    `run` alone: launch/local.sh would take a second signal for haste.
    """

    def __init__(self, folder: Folder, lock: int) -> None:
        self._folder, self._lock = folder, lock
        self._running: dict[str, tuple[Cell, configs.Config, subprocess.Popen[bytes]]] = {}
        self.failed: list[str] = []

    def run(self, cells: Sequence[Cell], at_once: int) -> None:
        """Run the cells that are not finished; those that fail are named in `failed`, and the others go on."""
        waiting = [cell for cell in cells if cell.name not in self._folder.results]
        try:
            while waiting or self._running:
                while waiting and len(self._running) < at_once:
                    self._start(waiting.pop(0))
                self._collect()
                time.sleep(POLL_SECONDS)
        finally:
            for _, _, process in self._running.values():
                process.terminate()
            for _, _, process in self._running.values():
                process.wait()

    def _start(self, cell: Cell) -> None:
        config, path = self._folder.prepare(cell)
        logs = self._folder.directory / "logs"
        logs.mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        with open(logs / f"{cell.name}.log", "ab") as log:
            process = subprocess.Popen(
                command(cell, path), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(self._lock,), start_new_session=True,
            )  # fmt: skip
        self._running[cell.name] = (cell, config, process)

    def _collect(self) -> None:
        ended = [entry for entry in self._running.values() if entry[2].poll() is not None]
        for cell, config, process in ended:
            del self._running[cell.name]
            if process.returncode:
                self.failed.append(cell.name)
                log = self._folder.directory / "logs" / f"{cell.name}.log"
                print(f"{cell.name} failed with status {process.returncode}; see {log}", file=sys.stderr, flush=True)
                continue
            self._folder.keep(cell, config, figures_of(cell, config))
            self._tell(cell)

    def _tell(self, cell: Cell) -> None:
        folder, result = self._folder, self._folder.results[cell.name]
        print(
            f"[{len(folder.results)}/{len(matrix.cells(folder.scale))}] {cell.name}: perplexity "
            f"{tables.perplexity(result):.2f}, merged {tables.merged_perplexity(result):.2f}; {result['seconds']:.0f} "
            f"s; about {math.ceil(folder.left_seconds() / 60)} minutes left",
            flush=True,
        )


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """The directory's lock, a file descriptor. Raises ValueError where another process has it, or a cell it left."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"a reproduction is at work in {directory}; wait for it, or end it") from None
        yield file.fileno()


def run_cells(folder: Folder) -> None:
    """Run what is not finished: tuning, then what needs the rates, then the distributed cells one by one.

    Raises ValueError that names the cells that failed.
    """
    cells = matrix.cells(folder.scale)
    tuning = [cell for cell in cells if cell.part == "tuning"]
    simulated = [cell for cell in cells if cell.part in ("matrix", "ablation")]
    with locked(folder.directory) as lock:
        for group, at_once in ((tuning, AT_ONCE), (simulated, AT_ONCE), (list(filter(is_distributed, cells)), 1)):
            workers = Workers(folder, lock)
            workers.run(group, at_once)
            if workers.failed:
                raise ValueError(f"failed: {', '.join(workers.failed)}; the same command tries them again")


def data_block(folder: Path) -> dict[str, str]:
    """The `data` block of all configs."""
    return {
        "train": str(folder / "text_train"),
        "valid": str(folder / "text_valid"),
        "tokenizer": str(folder / "tokenizer.model"),
    }


def prepare_data(folder: Path, vocab_size: int) -> None:
    """Corpus, tokenizer and token files, each only where it is missing: the standard library's source with its tests.

    Raises ValueError where that is less than LEAST_TEXT_BYTES.
    """
    corpus, facts, data = folder / "corpus.jsonl", folder / "corpus_facts.json", data_block(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not facts.exists():
        print("corpus: the Python standard library's source, with its tests", flush=True)
        tool("-m", "tools.stdlib_corpus", "--output", corpus, "--with-tests")
        with open(corpus, encoding="utf-8") as lines:
            sizes = [len(json.loads(line)["text"].encode()) for line in lines]
        if sum(sizes) < LEAST_TEXT_BYTES:
            raise ValueError(
                f"the standard library of {sys.executable} has {sum(sizes) / 1e6:.1f} MB of text, less than "
                f"{LEAST_TEXT_BYTES / 1e6:g} MB; use a Python with its tests (Debian: package libpython3-testsuite)"
            )
        write_json(facts, {"files": len(sizes), "text_bytes": sum(sizes)})
    if not Path(data["tokenizer"]).exists():
        print("tokenizer", flush=True)
        sizes_of = ("--vocab-size", vocab_size, "--max-characters", 2_000_000)
        tool("-m", "tokenizer.train_tokenizer", corpus, "--output", data["tokenizer"], *sizes_of)
    if not all(Path(f"{data[part]}.idx").exists() for part in ("train", "valid")):
        print("data", flush=True)
        options = ("--valid-fraction", 0.05, "--workers", AT_ONCE)
        tool(
            "-m",
            "tools.preprocess_data",
            corpus,
            "--tokenizer",
            data["tokenizer"],
            "--output",
            folder / "text",
            *options,
        )


def print_plan(folder: Folder) -> None:
    for cell in matrix.cells(folder.scale):
        state = "done" if cell.name in folder.results else f"{folder.seconds(cell) / 60:.1f} min"
        print(f"{cell.part:12s} {cell.name:40s} {state}")
    done, total = len(folder.results), len(matrix.cells(folder.scale))
    print(f"{done} of {total} cells done, about {folder.left_seconds() / 60:.0f} minutes left on {AT_ONCE} cores")


def write_page(page: Path, text: str, name: str = "tables") -> None:
    """Put the tables between the marks of that name on the page. Raises ValueError where it has no such marks."""
    first, last = BEGIN.format(name), END.format(name)
    before, begin, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {first} and {last}, between which the tables go")
    page.write_text(f"{before}{first}\n\n{text}\n{last}{after}", encoding="utf-8")


def run(arguments: argparse.Namespace) -> None:
    directory = arguments.directory.resolve()
    scale = {"full": matrix.FULL, "quick": matrix.QUICK, "better": matrix.BETTER}[arguments.scale]
    data = directory / "data"
    folder = Folder(directory if arguments.scale == "full" else directory / arguments.scale, scale, data_block(data))
    if arguments.plan:
        print_plan(folder)
        return
    if not arguments.report:
        prepare_data(data, scale.model["vocab_size"])
        run_cells(folder)
    facts = data / "corpus_facts.json"
    report = tables.report_of_options if arguments.scale == "better" else tables.report
    text = report(scale, folder.results, json.loads(facts.read_text()) if facts.exists() else None)
    if arguments.report and arguments.scale != "quick":
        write_page(PAGE, text, PAGE_MARKS[arguments.scale])
        print(f"tables written to {PAGE.relative_to(ROOT)}")
    else:
        print(text)
    if arguments.scale == "quick" and not arguments.report:
        print("\n".join(tables.check_order(scale, folder.results, scale.replicas[0])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="print the cells and how long they take")
    what.add_argument("--report", action="store_true", help="write the tables of docs/results.md from what is there")
    how_much = parser.add_mutually_exclusive_group()
    for name, text in SCALES.items():
        how_much.add_argument(f"--{name}", dest="scale", action="store_const", const=name, help=text)
    parser.set_defaults(scale="full")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "reproduce", help="default: %(default)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
