"""Cells of the reproduction, killed and run again: real processes of a tiny scale."""

import dataclasses
import json
import os
import signal
import subprocess
import time

import pytest
import torch

from noloco_mega import config as configs
from noloco_mega.data.loader import open_loader
from noloco_mega.lab import matrix
from noloco_mega.lab.loop import simulate
from noloco_mega.lab.record import STATE
from noloco_mega.lab.simulation import Simulation
from noloco_mega.metrics import read_rows
from noloco_mega.plan import views
from tools import reproduce

TINY = matrix.Scale(
    steps=100, rates=(4e-3,), optimizers=("noloco",), replicas=(2,), tuning_replicas=2, seeds=(1,), ablations=(),
    distributed=(), batch_size=4, valid_samples=8, save_every=5,
    model={"vocab_size": 512, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 16,
           "seq_length": 16},
)  # fmt: skip
LIMIT_SECONDS = 200


def uninterrupted(cell, data, directory):
    """The figures of the cell, simulated in this process."""
    config = configs.parse(matrix.config_of(cell, TINY, data, cell.rate, str(directory)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return simulate(Simulation(config, open_loader(config, views.initial(2))), lambda text: None)
    finally:
        torch.set_num_threads(threads)


def killed_in_the_middle(folder, cell):
    """Start the cell as `run_cells` does, and kill it once it has saved its state."""
    config, path = folder.prepare(cell)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(reproduce.command(cell, path), cwd=reproduce.ROOT, env=environment) as process:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (config.output / STATE).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (config.output / "result.json").exists(), "killed too late to be resumed"
    return config


@pytest.mark.slow
def test_a_killed_cell_goes_on_and_a_finished_one_is_not_run_again(text_data, tmp_path, monkeypatch, capsys):
    tuning, cell = matrix.cells(TINY)
    folder = reproduce.Folder(tmp_path / "killed", TINY, text_data)
    config = killed_in_the_middle(folder, tuning)
    with pytest.raises(ValueError, match="tuning runs are not finished"):
        folder.config(cell)
    reproduce.run_cells(folder)
    assert "[2/2] noloco_2x1_seed1: perplexity" in capsys.readouterr().out
    marks = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["replica"] for row in marks if row.get("resumed") and row["step"] > 0] == [0, 1]
    whole = uninterrupted(tuning, text_data, tmp_path / "whole")
    kept = json.loads((folder.directory / f"{tuning.name}.json").read_text())
    assert kept["replicas"] == pytest.approx(list(whole["replicas"].values()), abs=1e-6)
    for key in ("mean_of_weights", "deviation", "sent_bytes_per_replica"):
        assert kept[key] == pytest.approx(whole[key], rel=1e-5)
    assert folder.results[tuning.name]["seconds"] > 0

    def nothing(*arguments, **options):
        raise AssertionError("a finished cell was started")

    monkeypatch.setattr(reproduce.subprocess, "Popen", nothing)
    again = reproduce.Folder(folder.directory, TINY, text_data)
    reproduce.run_cells(again)
    assert set(again.results) == {tuning.name, cell.name} and again.left_seconds() == 0
    with pytest.raises(ValueError, match="other settings"):
        reproduce.Folder(folder.directory, dataclasses.replace(TINY, batch_size=8), text_data)


def test_only_one_reproduction_works_in_a_directory(text_data, tmp_path):
    folder = reproduce.Folder(tmp_path, TINY, text_data)
    with reproduce.locked(tmp_path), pytest.raises(ValueError, match="at work"):
        reproduce.run_cells(folder)


@pytest.mark.slow
def test_a_distributed_cell(text_data, tmp_path):
    scale = dataclasses.replace(
        TINY,
        distributed=(("noloco", "random", 2),),
        distributed_steps=10,
        distributed_replicas=2,
        distributed_inner_steps=5,
    )
    folder = reproduce.Folder(tmp_path, scale, text_data)
    tuning, _, cell = matrix.cells(scale)
    folder.results[tuning.name] = {"replicas": [1.0], "diverged_step": None, "seconds": 1.0}
    with reproduce.locked(tmp_path) as lock:
        workers = reproduce.Workers(folder, lock)
        workers.run([cell], 1)
    assert not workers.failed
    result = json.loads((tmp_path / f"{cell.name}.json").read_text())
    assert result["rate"] == tuning.rate and result["seconds"] > 0
    assert result["sent_bytes_per_replica"] == 2 * 4 * folder.parameters
    last = [row for row in read_rows(tmp_path / "runs" / cell.name / "metrics.jsonl") if row["step"] == 10]
    assert sorted(row["val_loss"] for row in last if row["val_loss"]) == pytest.approx(
        sorted(result["replicas"]), abs=1e-4
    )
