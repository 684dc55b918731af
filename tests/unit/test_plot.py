"""What a picture of a run shows."""

import json
import math

from matplotlib import pyplot as plt

from noloco_mega.metrics import JsonLines, read_rows
from tests.unit.test_hf import run
from tools import plot


def write(folder, domains):
    folder.mkdir()
    rows = JsonLines(folder / "metrics.jsonl")
    for step in range(3):
        for replica in range(2):
            row = {"step": step, "replica": replica, "loss": 3.0 - step, "val_loss": None, "spread": None}
            if domains and step != 1:
                losses = {"code": replica + step + 0.5, "prose": math.inf if step else 2.0}
                row |= {"val_loss": 1.0, "val_loss_by_domain": losses}
            rows.log(row)
    rows.close()


def test_domains_have_a_line_per_replica(tmp_path):
    write(tmp_path / "run", True)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    _, axes = plt.subplots()
    plot.plot_domains(axes, tmp_path / "run", rows)
    lines = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]
    assert lines == [([0, 2], [0.5, 2.5]), ([0, 2], [1.5, 3.5]), *[([0, 2], [2.0, math.inf])] * 2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["run, code", "run, prose"]
    stored = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert stored[-1]["val_loss_by_domain"]["prose"] == "inf"


def test_runs_with_and_without_domains_share_a_picture(tmp_path):
    write(tmp_path / "with", True)
    write(tmp_path / "without", False)
    for runs in (["with", "without"], ["without"]):
        target = tmp_path / f"{len(runs)}.png"
        assert run(plot, [*(tmp_path / name for name in runs), "--output", target]) == 0
        assert target.read_bytes().startswith(b"\x89PNG")
