"""Rows of several replicas in one file, and what reads them."""

import json
import math
import multiprocessing

import pytest

from noloco_mega.metrics import JsonLines, Trackers, read_rows, write_json


def _write(path, replica):
    tracker = JsonLines(path)
    for step in range(200):
        tracker.log({"step": step, "replica": replica, "text": "x" * 9000, "nothing": None})
    tracker.close()


def test_rows_of_several_writers_never_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, replica)) for replica in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    rows = read_rows(path)
    assert all(len(row["text"]) == 9000 and row["nothing"] is None for row in rows)
    for replica in range(3):
        assert [row["step"] for row in rows if row["replica"] == replica] == list(range(200))


def test_not_a_number_stays_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.log({"step": 1, "replica": 0, "loss": math.nan, "lr": math.inf})
    tracker.close()
    assert json.loads(path.read_text()) == {"step": 1, "replica": 0, "loss": "nan", "lr": "inf"}
    (row,) = read_rows(path)
    assert math.isnan(row["loss"]) and row["lr"] == math.inf and row["step"] == 1


def test_a_cut_last_line_is_left_out_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert read_rows(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


def test_no_trackers_take_rows_too():
    Trackers().log({"step": 1})
    Trackers().close()


def test_write_json_replaces_whole_files(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_resumed_run_reads_as_one(tmp_path):
    """Replica 0 had written to step 5 and goes on from 3; replica 1 begins anew; replica 2 is not resumed."""
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    for step in range(6):
        for replica in range(3):
            tracker.log({"step": step, "replica": replica, "loss": step})
    tracker.log({"step": 3, "replica": 0, "resumed": True})
    tracker.log({"step": 0, "replica": 1, "resumed": True})
    for step in (4, 5):
        tracker.log({"step": step, "replica": 0, "loss": 10 * step})
    tracker.log({"step": 0, "replica": 1, "loss": 7})
    tracker.close()
    rows = read_rows(path)
    assert [row["loss"] for row in rows if row["replica"] == 0] == [0, 1, 2, 3, 40, 50]
    assert [row["loss"] for row in rows if row["replica"] == 1] == [7]
    assert [row["loss"] for row in rows if row["replica"] == 2] == [0, 1, 2, 3, 4, 5]
    assert not any("resumed" in row for row in rows)


def test_what_a_dying_process_has_cut_off_is_removed_before_the_next_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in ("", '{"ste', '{"step": 1, "replica": 0}\n{"step": 2, "text": "' + "x" * 200_000):
        path.write_text(text)
        tracker = JsonLines(path)
        tracker.log({"step": 2, "replica": 0})
        tracker.close()
        assert [row["step"] for row in read_rows(path)] == ([1, 2] if len(text) > 10 else [2])
