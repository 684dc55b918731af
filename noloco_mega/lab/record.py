"""What does a simulation leave on disk? A run's files, its exact deviations, and one state to go on from.

config.json, metrics.jsonl, replica_RR/probe.jsonl      as a run writes them (journal.py explains the columns)
deviation.jsonl     the replicas' exact deviation at logged steps and right before and after each outer step:
                    step, outer_step, when ("logged", "before", "after"), lr, relative, std (simulation.Deviation)
state.safetensors   what the simulation goes on from
result.json         validation losses, deviation and bytes of the last step
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from noloco_mega.config import Config
from noloco_mega.journal import COLUMNS
from noloco_mega.lab.outer import Exchanged
from noloco_mega.lab.simulation import Counters, Evaluation, InnerReport, Simulation
from noloco_mega.metrics import JsonLines, write_json

STATE, RESULT = "state.safetensors", "result.json"


class Record:
    """The files of one simulation, and the sums between two rows."""

    def __init__(self, simulation: Simulation) -> None:
        """Opens the folder, and with run.resume "auto" takes over the state in it.

        Raises ValueError for a folder that exists and is not to be resumed, or whose state is of another config.
        """
        config = simulation.config
        self._simulation, self._config, self.folder = simulation, config, config.output
        resume = config.run.resume
        if resume not in ("no", "auto"):
            raise ValueError(f'a simulation keeps one state: resume with "auto", not {resume!r}')
        if resume == "no" and self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} exists; go on with it (--resume auto), choose another run.name or move it away"
            )
        self.sent_bytes = [0] * simulation.replicas
        """By each replica, since the start."""
        self._loss, self._loss_steps = torch.zeros(simulation.replicas, dtype=torch.float64), 0
        self._since, self._logged_step = time.monotonic(), 0
        found = resume == "auto" and (self.folder / STATE).exists()
        if found:
            self._load()
        self._open()
        if not found:
            write_json(self.folder / "config.json", config.to_json())
            self.row({}, simulation.evaluate())

    def stepped(self, inner: InnerReport) -> None:
        """An inner step is done."""
        self._loss += torch.tensor(inner.losses, dtype=torch.float64)
        self._loss_steps += 1
        self._add_bytes(inner.sent_bytes)

    def exchanged(self, exchanged: Exchanged, before: torch.Tensor) -> dict[str, list[Any]]:
        """An outer step is done; the columns that its rows have. `before` is the probe from before it."""
        simulation = self._simulation
        self._add_bytes(exchanged.sent_bytes)
        for replica, probes in enumerate(self._probes):
            values = {"before": before[replica].tolist(), "after": simulation.probe()[replica].tolist()}
            probes.log({"outer_step": simulation.outer_step, **values})
        pairs = self._config.noloco.group_size == 2
        partners = [(p[0] if p else None) if pairs and len(p) <= 1 else list(p) for p in exchanged.partners]
        return {
            "outer_step": [simulation.outer_step] * simulation.replicas,
            "partner": partners,
            "exchange_bytes": exchanged.payload_bytes,
            "spread": exchanged.spread,
            "wrap_rate": exchanged.wrap_rate,
            "missed": [0] * simulation.replicas,
            "unacknowledged": [0] * simulation.replicas,
        }

    def deviation(self, when: str, lr: float) -> None:
        simulation = self._simulation
        found = simulation.deviation()
        self._deviations.log(
            {
                "step": simulation.step,
                "outer_step": simulation.outer_step,
                "when": when,
                "inner_steps": simulation.counters.inner_steps,
                "lr": lr,
                "relative": found.relative,
                "std": found.std,
            }
        )

    def row(self, columns: dict[str, list[Any]], evaluation: Evaluation | None = None) -> None:
        """One row per replica; `columns` give each replica's value."""
        step, now = self._simulation.step, time.monotonic()
        tokens = self._config.replica_step_tokens
        for replica in range(self._simulation.replicas):
            row: dict[str, Any] = {name: values[replica] for name, values in columns.items()}
            if self._loss_steps:
                row["loss"] = float(self._loss[replica]) / self._loss_steps
                row["tokens"] = step * tokens
                row["tokens_per_second"] = (step - self._logged_step) * tokens / (now - self._since)
            if evaluation is not None:
                row |= {"val_loss": evaluation.replicas[replica], "merged_val_loss": evaluation.merged}
            self._rows.log(dict.fromkeys(COLUMNS) | {"step": step, "replica": replica} | row)
        self._loss.zero_()
        self._loss_steps, self._since, self._logged_step = 0, now, step

    def save(self) -> None:
        """The simulation's state: the old one or the new one is there, whole."""
        simulation = self._simulation
        facts = {
            "counters": asdict(simulation.counters),
            "sent_bytes": self.sent_bytes,
            "loss_steps": self._loss_steps,
            "config": _deciding(self._config),
        }
        tensors = {name: value.detach().cpu().contiguous() for name, value in simulation.state().items()}
        draft = self.folder / f".{STATE}.{os.getpid()}"
        save_file(tensors | {"record.loss": self._loss}, draft, {"facts": json.dumps(facts)})
        os.replace(draft, self.folder / STATE)

    def result(self, evaluation: Evaluation, diverged_step: int | None) -> dict[str, Any]:
        """The figures of the end, also written to result.json."""
        simulation = self._simulation
        deviation = simulation.deviation()
        val_loss, mean = evaluation.replicas, evaluation.mean
        found = {
            "optimizer": self._config.noloco.optimizer,
            "step": simulation.step,
            "outer_steps": simulation.outer_step,
            "tokens_per_replica": simulation.step * self._config.replica_step_tokens,
            "parameters": simulation.theta.shape[1],
            "replicas": dict(enumerate(val_loss)),
            "mean_of_losses": mean,
            "std_of_losses": math.sqrt(sum((loss - mean) ** 2 for loss in val_loss) / max(len(val_loss) - 1, 1)),
            "mean_of_weights": evaluation.merged,
            "deviation": deviation.relative,
            "std": deviation.std,
            "sent_bytes_per_replica": sum(self.sent_bytes) / len(self.sent_bytes),
            "diverged_step": diverged_step,
        }
        write_json(self.folder / RESULT, found)
        return found

    def close(self) -> None:
        for file in (self._rows, self._deviations, *self._probes):
            file.close()

    def _open(self) -> None:
        self._folders = [self._config.replica_folder(replica) for replica in range(self._simulation.replicas)]
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._rows = JsonLines(self.folder / "metrics.jsonl")
        self._deviations = JsonLines(self.folder / "deviation.jsonl")
        self._probes = [JsonLines(folder / "probe.jsonl") for folder in self._folders]
        if self._config.run.resume == "auto":
            step, outer_step = self._simulation.step, self._simulation.outer_step
            for replica, probes in enumerate(self._probes):
                self._rows.log({"step": step, "replica": replica, "resumed": True})
                probes.log({"outer_step": outer_step, "resumed": True})
            self._deviations.log({"step": step, "resumed": True})

    def _load(self) -> None:
        with safe_open(self.folder / STATE, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        wanted, saved = _deciding(self._config), facts["config"]
        differing = sorted(name for name in wanted.keys() | saved.keys() if wanted.get(name) != saved.get(name))
        if differing:
            raise ValueError(f"{self.folder / STATE} is of a simulation with other settings: {', '.join(differing)}")
        self._loss = tensors.pop("record.loss")
        self._loss_steps, self.sent_bytes = facts["loss_steps"], facts["sent_bytes"]
        self._simulation.load_state(tensors, Counters(**facts["counters"]))
        self._logged_step = self._simulation.step

    def _add_bytes(self, sent: list[int]) -> None:
        self.sent_bytes = [total + more for total, more in zip(self.sent_bytes, sent, strict=True)]


def _deciding(config: Config) -> dict[str, Any]:
    """The settings that decide what is computed, by their dotted names."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}{key}.", inner)
        else:
            flat[prefix.removesuffix(".")] = value

    whole = json.loads(json.dumps(config.to_json()))
    whole["run"] = {"seed": whole["run"]["seed"]}
    walk("", whole)
    return flat
