"""One rank's journal: what a run writes in pieces is what it writes at once, whatever happens to its folder."""

import json
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from noloco_mega.config import parse
from noloco_mega.grid import Place
from noloco_mega.journal import Journal
from noloco_mega.metrics import read_rows
from noloco_mega.pipeline import StepLoss
from tests.unit.test_config import changed

PLACE = Place(replica=0, data=0, stage=0, tensor=0)
ALONE = SimpleNamespace(total=lambda values: [float(value) for value in values], members=lambda *_: (0,))
OUTER = SimpleNamespace(
    optimizer=SimpleNamespace(due=lambda step: step % 6 == 0, settings=None),
    last_report=SimpleNamespace(
        sent_bytes=8,
        missed={},
        received=(),
        asked=(),
        exchange_seconds=0.1,
        unacknowledged=(),
        spread=None,
        wrap_rate=None,
    ),
    last_probe=(torch.zeros(2), torch.ones(2)),
    step=0,
    skipped=0,
    outer_step=0,
)


def loss(step):
    return StepLoss(torch.tensor(1.0 / step, dtype=torch.float64), 1)


class Piece:
    """A part of a run, from step `start` (with the losses that wait there) to a chosen last one."""

    def __init__(self, root, start=0, losses=(), tensorboard=False):
        run = {"run__directory": str(root), "run__log_every": 4, "run__eval_every": 5, "run__tensorboard": tensorboard}
        resume = {"run__resume": "auto"} if start else {}
        self.config = parse(changed(topology={"replicas": 1}, **run, **resume))
        self.journal, self.step = Journal(self.config, PLACE), start
        self.rows = self.config.output / "metrics.jsonl"
        self.journal.begin(start, start // 6, losses)
        if not start:
            self.journal.started()

    def train(self, stop, *, last=False):
        """Up to step `stop`; the losses that wait there."""
        while self.step < stop:
            self.step += 1
            ends = last and self.step == stop
            if ends or self.step % 5 == 0:
                self.journal.evaluate(lambda domain: loss(self.step), ALONE)
            OUTER.step, OUTER.outer_step = self.step, self.step // 6
            self.journal.stepped(self.step, 0.1, 1.0, loss(self.step), OUTER, ALONE, (), last=ends)
        return self.journal.pending()


def rows(piece):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in read_rows(piece.rows)]


@pytest.mark.parametrize("stop", [7, 8, 10, 6, 1])
def test_a_run_that_ended_and_goes_on_writes_the_rows_of_one_that_did_not(tmp_path, stop):
    """Ending adds a row (7), or an evaluation to a row (8, 6); or nothing where both were due anyway (10)."""
    straight = Piece(tmp_path / "straight")
    straight.train(20, last=True)
    first = Piece(tmp_path / "pieces")
    losses = first.train(stop, last=True)
    ended = rows(first)[-1]
    assert ended["step"] == stop and ended["val_loss"] is not None
    assert ended["at_end"] == {7: "row", 1: "row", 8: "val_loss", 6: "val_loss", 10: None}[stop]
    second = Piece(tmp_path / "pieces", stop, losses)
    second.train(20, last=True)
    assert rows(second) == rows(straight)
    assert [row["step"] for row in rows(straight)] == [0, 4, 5, 6, 8, 10, 12, 15, 16, 18, 20]


def test_a_folder_that_is_removed_is_made_anew(tmp_path, capsys):
    piece = Piece(tmp_path, tensorboard=True)
    piece.train(7)
    while piece.config.output.exists():  # TensorBoard's thread may put a file into a folder that is being removed
        shutil.rmtree(piece.config.output, ignore_errors=True)
    piece.train(20, last=True)
    piece.journal.close()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "replica_00 was removed or moved away" in told[0]
    assert [row["step"] for row in rows(piece)] == [8, 10, 12, 15, 16, 18, 20]
    assert parse(json.loads((piece.config.output / "config.json").read_text())) == piece.config
    assert list((piece.config.output / "replica_00").glob("events.*"))
    probes = read_rows(piece.config.output / "replica_00" / "probe.jsonl", "outer_step")
    assert [row["outer_step"] for row in probes] == [2, 3]


def test_a_full_disk_where_a_run_goes_on_costs_rows_only(tmp_path, capsys):
    """No file may grow: the run warns once for each file, and writes later where it went on before its next row."""
    first = Piece(tmp_path)
    first.train(16)
    sizes = first.rows.stat().st_size, (first.config.output / "replica_00" / "probe.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (min(sizes), limits[1]))
        second = Piece(tmp_path, 10)
        second.train(13)
        assert (first.rows.stat().st_size, len(rows(second))) == (sizes[0], 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = capsys.readouterr().err
    assert "goes on" not in told and told.count("are lost from step") >= 2 and "rows are lost from step 12 on" in told
    second.train(20)
    assert [row["step"] for row in rows(second)] == [0, 4, 5, 6, 8, 10, 15, 16, 18, 20]


def test_a_new_run_does_not_start_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Piece(tmp_path / "file")
