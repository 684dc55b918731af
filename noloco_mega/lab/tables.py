"""What do the results of a reproduction say? Means, deviations and paired differences over seeds, as tables.

A result is the JSON that tools/reproduce.py keeps of a finished cell; `results` maps names of cells to them. Losses are
in nats per token; a perplexity is the exponential of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from noloco_mega.lab.matrix import Cell, Scale, cells, tuned_rates

Result = Mapping[str, Any]
Results = Mapping[str, Result]
NOT_RUN = "not run"
CURVE_PARTS = 8
"""Parts of a run whose mean training losses are kept."""


def perplexity(result: Result) -> float:
    """Mean over the replicas of their validation perplexities; infinite for a run that diverged."""
    if result["diverged_step"] is not None:
        return math.inf
    return float(np.mean([math.exp(min(loss, 700)) for loss in result["replicas"]]))


def merged_perplexity(result: Result) -> float:
    """Of the mean of the replicas' weights."""
    return math.inf if result["diverged_step"] is not None else math.exp(min(result["mean_of_weights"], 700))


def deviation(values: Sequence[float]) -> float:
    """Standard deviation, unbiased in its square; NaN for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean of ours − theirs, pair by pair, and the standard error of that mean (NaN for a single pair)."""
    differences = np.subtract(ours, theirs)
    return float(differences.mean()), deviation(list(differences)) / math.sqrt(len(differences))


def rates(scale: Scale, results: Results) -> dict[str, float]:
    """The inner learning rate that tuning chose, by optimizer; absent where tuning is not finished."""
    return tuned_rates(tuning_losses(scale, results), scale.rates)


def tuning_losses(scale: Scale, results: Results) -> dict[str, dict[float, float]]:
    """Mean validation loss over the replicas by optimizer and rate, of the tuning runs that are there."""
    losses: dict[str, dict[float, float]] = {optimizer: {} for optimizer in scale.optimizers}
    for cell in cells(scale):
        if cell.part == "tuning" and cell.name in results:
            assert cell.rate is not None
            result = results[cell.name]
            diverged = result["diverged_step"] is not None
            losses[cell.optimizer][cell.rate] = math.inf if diverged else float(np.mean(result["replicas"]))
    return losses


def check_order(scale: Scale, results: Results, replicas: int) -> list[str]:
    """Lines that say by how much all-reduce is below NoLoCo and NoLoCo below local, in perplexity per replica.

    Raises ValueError unless both margins exceed two standard errors of the paired differences.
    """
    lines, wrong = [], []
    for better, worse in (("allreduce", "noloco"), ("noloco", "local")):
        ours, theirs = (
            [perplexity(results[cell.name]) for cell in _seeds(scale, "matrix", setting, replicas)]
            for setting in (worse, better)
        )
        difference, error = paired(ours, theirs)
        line = f"{worse} − {better}: perplexity {difference:.3f}, standard error {error:.3f}"
        lines.append(line)
        if not difference > 2 * error:
            wrong.append(line)
    if wrong:
        raise ValueError("not above two standard errors: " + "; ".join(wrong))
    return lines


def report(scale: Scale, results: Results, corpus: Mapping[str, Any] | None) -> str:
    """All tables as Markdown. `corpus` says how much text there is ("files", "text_bytes"); None: not made yet."""
    parts = [_state(scale, results, corpus), _tuning_table(scale, results), _matrix_table(scale, results)]
    parts.append(_ablation_table(scale, results))
    if scale.distributed:
        parts.append(_distributed_table(scale, results))
    return "\n\n".join(parts) + "\n"


def _state(scale: Scale, results: Results, corpus: Mapping[str, Any] | None) -> str:
    missing = sum(cell.name not in results for cell in cells(scale))
    total = len(cells(scale))
    if missing:
        state = f"The matrix has not been run to its end yet: {total - missing} of {total} runs are done."
    else:
        state = f"All {total} runs are done."
    if corpus is not None:
        state += f" Text: {corpus['text_bytes'] / 1e6:.1f} MB in {corpus['files']} files."
    return state


def report_of_options(scale: Scale, results: Results, corpus: Mapping[str, Any] | None) -> str:
    """The tables of the options of NoLoCo's outer step; see `report`."""
    parts = [_state(scale, results, corpus), _tuning_table(scale, results), _options_table(scale, results)]
    return "\n\n".join([*parts, _curves_table(scale, results)]) + "\n"


def _seeds(scale: Scale, part: str, setting: str, replicas: int, stages: int = 1) -> list[Cell]:
    """The cells of one setting, a seed each."""
    wanted = (part, setting, replicas, stages)
    return [cell for cell in cells(scale) if (cell.part, cell.setting, cell.replicas, cell.stages) == wanted]


def _pm(values: Sequence[float], digits: int) -> str:
    """Mean ± deviation."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean, spread = float(np.mean(values)), deviation(values)
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if math.isfinite(spread) else "")


def _row(first: Sequence[str], group: Sequence[Cell], reference: Sequence[Cell], results: Results) -> str:
    """Of the seeds that are there: perplexities, spread, bytes and the paired difference from `reference`."""
    done = [results[cell.name] for cell in group if cell.name in results]
    if not done:
        return _line([*first, *[NOT_RUN] * 6])
    rate = ", ".join(sorted({f"{result['rate']:g}" for result in done}))
    seeds = "" if len(done) == len(group) else f" ({len(done)} of {len(group)} seeds)"
    measures: list[tuple[Callable[[Result], float], int]] = [
        (perplexity, 2),
        (merged_perplexity, 2),
        (lambda result: result["deviation"], 4),
    ]
    cells_text = [_pm([measure(result) for result in done], digits) for measure, digits in measures]
    cells_text[0] += seeds
    sent = float(np.mean([result["sent_bytes_per_replica"] for result in done])) / 1e6
    return _line([*first, rate, *cells_text, f"{sent:.1f}", _difference(group, reference, results)])


def _difference(group: Sequence[Cell], reference: Sequence[Cell], results: Results) -> str:
    if list(group) == list(reference):
        return "–"
    pairs = [
        (perplexity(results[ours.name]), perplexity(results[theirs.name]))
        for ours, theirs in zip(group, reference, strict=True)
        if ours.name in results and theirs.name in results
    ]
    if not pairs:
        return NOT_RUN
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return "diverged"
    mean, error = paired([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    return f"{mean:+.2f}" + (f" ± {error:.2f}" if math.isfinite(error) else "")


def _line(columns: Sequence[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def _table(title: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([f"### {title}", "", _line(columns), "|" + "---|" * len(columns), *rows])


def _columns(reference: str) -> list[str]:
    measures = ["inner rate", "perplexity per replica", "of the merged weights", "spread", "MB sent per replica"]
    return [*measures, f"difference from {reference} ± standard error"]


def _tuning_table(scale: Scale, results: Results) -> str:
    losses, chosen = tuning_losses(scale, results), rates(scale, results)
    rows = []
    for optimizer in scale.optimizers:
        found = [losses[optimizer].get(rate) for rate in scale.rates]
        text = [NOT_RUN if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in found]
        rate = chosen.get(optimizer)
        edge = " (end of the range)" if rate in (scale.rates[0], scale.rates[-1]) else ""
        rows.append(_line([optimizer, *text, NOT_RUN if rate is None else f"{rate:g}{edge}"]))
    title = f"The inner learning rate: mean validation loss, N = {scale.tuning_replicas}, seed {scale.tuning_seed}"
    return _table(title, ["optimizer", *(f"{rate:g}" for rate in scale.rates), "chosen"], rows)


def _matrix_table(scale: Scale, results: Results) -> str:
    rows = []
    for replicas in scale.replicas:
        reference = _seeds(scale, "matrix", "noloco", replicas)
        for optimizer in scale.optimizers:
            group = _seeds(scale, "matrix", optimizer, replicas)
            rows.append(_row([str(replicas), optimizer], group, reference, results))
    return _table("Outer optimizers, in the simulator", ["N", "optimizer", *_columns("NoLoCo")], rows)


def _ablation_table(scale: Scale, results: Results) -> str:
    replicas = scale.tuning_replicas
    reference = _seeds(scale, "matrix", "noloco", replicas)
    rows = [_row(["noloco (n = 2, H = 50)"], reference, reference, results)]
    if "gossip" in scale.optimizers:
        group = _seeds(scale, "matrix", "gossip", replicas)
        rows.append(_row(["pairing alone (gossip)"], group, reference, results))
    for setting in scale.ablations:
        group = _seeds(scale, "ablation", setting, replicas)
        rows.append(_row([setting], group, reference, results))
    return _table(f"Ablations, in the simulator, N = {replicas}", ["setting", *_columns("NoLoCo")], rows)


def _distributed_table(scale: Scale, results: Results) -> str:
    replicas = scale.distributed_replicas
    reference = _seeds(scale, "distributed", "noloco_fixed", replicas, stages=2)
    rows = []
    for optimizer, routing, stages in scale.distributed:
        group = _seeds(scale, "distributed", f"{optimizer}_{routing}", replicas, stages)
        rows.append(_row([optimizer, str(stages), routing], group, reference, results))
    title = f"Routing, in distributed runs of {replicas} replicas"
    return _table(title, ["optimizer", "stages", "routing", *_columns("NoLoCo with fixed routes, 2 stages")], rows)


def loss(result: Result) -> float:
    """Mean validation loss over the replicas; infinite for a run that diverged."""
    return math.inf if result["diverged_step"] is not None else float(np.mean(result["replicas"]))


def gap_closed(ours: Result, noloco: Result, allreduce: Result) -> float:
    """The share of the loss between NoLoCo and all-reduce that `ours` saves: 0 like the one, 1 like the other."""
    return (loss(noloco) - loss(ours)) / (loss(noloco) - loss(allreduce))


def _settings(scale: Scale) -> list[tuple[str, str]]:
    """Part and setting of the rows of the options' tables."""
    return [*(("matrix", name) for name in scale.optimizers), *(("ablation", name) for name in scale.ablations)]


def _options_table(scale: Scale, results: Results) -> str:
    replicas = scale.tuning_replicas
    noloco, allreduce = (_seeds(scale, "matrix", name, replicas) for name in ("noloco", "allreduce"))
    rows = []
    for part, setting in _settings(scale):
        group = _seeds(scale, part, setting, replicas)
        shares = [
            gap_closed(*(results[cell.name] for cell in cells_of_seed))
            for cells_of_seed in zip(group, noloco, allreduce, strict=True)
            if all(cell.name in results for cell in cells_of_seed)
        ]
        closed = _pm([100 * share for share in shares], 0) + " %" if shares else NOT_RUN
        rows.append(_row([setting], group, noloco, results) + f" {closed} |")
    columns = ["setting", *_columns("NoLoCo"), "share of the gap to all-reduce closed"]
    return _table(f"Options of the outer step, in the simulator, N = {replicas}", columns, rows)


def _curves_table(scale: Scale, results: Results) -> str:
    """Training losses on the way, of the seeds that are there."""
    rows = []
    for part, setting in _settings(scale):
        group = _seeds(scale, part, setting, scale.tuning_replicas)
        curves = [results[cell.name]["curve"] for cell in group if cell.name in results]
        text = [f"{value:.3f}" for value in np.mean(curves, axis=0)] if curves else [NOT_RUN] * CURVE_PARTS
        rows.append(_line([setting, *text]))
    title = "Curves: mean training loss in each eighth of the run, nats per token"
    return _table(title, ["setting", *(f"{part + 1}/{CURVE_PARTS}" for part in range(CURVE_PARTS))], rows)
