"""How does a simulation get from its first step to its last?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from noloco_mega.lab.inner_steps import Fixed, Rule
from noloco_mega.lab.record import Record
from noloco_mega.lab.simulation import Evaluation, Simulation


def simulate(simulation: Simulation, tell: Callable[[str], None], rule: Rule | None = None) -> dict[str, Any]:
    """Go on to config.run.steps, or to the first gradient that is not finite, and write the record.

    `tell` gets a line per evaluation. `rule` sets the length of each inner phase from the spread; without it, it stays
    what the config says. Returns the figures of the end (Record.result). Raises ValueError, before
    anything is written, where the run's folder cannot be used.
    """
    run, record = simulation.config.run, Record(simulation)
    diverged_step: int | None = None
    evaluation: Evaluation | None = None
    while simulation.step < run.steps and diverged_step is None:
        columns = _advance(simulation, record, rule or Fixed())
        step = simulation.step
        if not all(map(math.isfinite, columns["grad_norm"])):
            diverged_step = step
        last = step == run.steps or diverged_step is not None
        evaluation = None
        if last or (run.eval_every and step % run.eval_every == 0):
            evaluation = simulation.evaluate()
            tell(f"step {step}/{run.steps}  val_loss {evaluation.mean:.4f}  of the mean {evaluation.merged:.4f}")
        if evaluation or step % run.log_every == 0 or "outer_step" in columns:
            record.row(columns, evaluation)
        if diverged_step is None and (last or (run.save_every and step % run.save_every == 0)):
            record.save()
    result = record.result(evaluation or simulation.evaluate(), diverged_step)
    record.close()
    return result


def _advance(simulation: Simulation, record: Record, rule: Rule) -> dict[str, list[Any]]:
    """One inner step and the outer step that may follow; its columns, a value per replica."""
    inner = simulation.inner_step()
    record.stepped(inner)
    columns: dict[str, list[Any]] = {"lr": [inner.lr] * simulation.replicas, "grad_norm": inner.gradient_norms}
    if simulation.due():
        before = simulation.probe()
        record.deviation("before", inner.lr)
        columns |= record.exchanged(simulation.take_outer_step(rule), before)
        record.deviation("after", inner.lr)
    elif simulation.step % simulation.config.run.log_every == 0:
        record.deviation("logged", inner.lr)
    return columns
