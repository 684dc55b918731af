"""The reproduction's plan, the arithmetic of its tables, and its check of the order; nothing is trained here."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from noloco_mega import config as configs
from noloco_mega.lab import matrix, tables
from tools import reproduce

DATA = {"train": "t", "valid": "v", "tokenizer": "m"}


def config_of(cell, rate=1e-3):
    return configs.parse(matrix.config_of(cell, matrix.FULL, DATA, rate, "runs"))


def result(losses, merged=1.0, **changes):
    found = {
        "replicas": losses, "mean_of_weights": merged, "deviation": 0.1, "sent_bytes_per_replica": 2e6,
        "diverged_step": None, "rate": 0.004, "seconds": 10.0,
    }  # fmt: skip
    return found | changes


def made_up(scale, loss_of):
    """A result for every cell; replica i's loss is loss_of(cell) + i/100."""
    return {
        cell.name: result([loss_of(cell) + i / 100 for i in range(cell.replicas)], loss_of(cell))
        for cell in matrix.cells(scale)
    }


def test_the_plan_has_what_a_reproduction_must_compare():
    cells = matrix.cells(matrix.FULL)
    assert len({cell.name for cell in cells}) == len(cells)
    compared = {(c.optimizer, c.replicas, c.seed) for c in cells if c.part == "matrix"}
    optimizers = {"allreduce", "diloco", "noloco", "local", "gossip"}
    assert compared == {(o, n, s) for o in optimizers for n in (4, 8, 16) for s in matrix.FULL.seeds}
    assert len(matrix.FULL.seeds) == 3 and matrix.FULL.tuning_seed not in matrix.FULL.seeds
    noloco = {
        seed: {tuple(dict(c.noloco).items()) for c in cells
               if c.part in ("matrix", "ablation") and (c.optimizer, c.replicas, c.seed) == ("noloco", 8, seed)}
        for seed in matrix.FULL.seeds
    }  # fmt: skip
    for settings in map(lambda found: [dict(s) for s in found], noloco.values()):
        assert {s["inner_steps"] for s in settings} == {25, 50, 100, 200}
        assert {s.get("group_size", 2) for s in settings} == {2, 3, 4}
        assert 0.0 in {s["gamma"] for s in settings} and 0.0 in {s["outer_momentum"] for s in settings}
    routed = [c for c in cells if c.part == "distributed"]
    assert len(routed) == 6 * 3
    assert {c.stages for c in routed} == {1, 2} and {c.routing for c in routed} == {"random", "fixed"}


def test_every_cell_is_a_config_that_runs_on_equally_many_tokens():
    for part in ("tuning", "matrix", "ablation", "distributed"):
        cells = [cell for cell in matrix.cells(matrix.FULL) if cell.part == part]
        found = [config_of(cell) for cell in cells]
        assert len({config.replica_step_tokens * config.topology.replicas * config.run.steps for config in found}) == 1
        assert len({config.run.eval_microbatches * config.micro_batch_size for config in found}) == 1
        assert all(config.run.steps % config.noloco.inner_steps == 0 for config in found)
        assert all(
            config.run.seed == config.noloco.seed == cell.seed for config, cell in zip(found, cells, strict=True)
        )


def test_a_batch_that_cannot_be_shared_is_refused():
    scale = dataclasses.replace(matrix.FULL, replicas=(3,))
    cell = next(cell for cell in matrix.cells(scale) if cell.part == "matrix")
    with pytest.raises(ValueError, match="powers of two"):
        matrix.config_of(cell, scale, DATA, 1e-3, "runs")


def test_the_whole_fits_into_its_time_as_measured(tmp_path):
    folder = reproduce.Folder(tmp_path, matrix.FULL, DATA)
    assert folder.left_seconds() < 85 * 60
    assert reproduce.Folder(tmp_path, matrix.QUICK, DATA).left_seconds() < 8 * 60
    # Twice as fast as guessed, by one finished cell of its kind: half the time, but for starting.
    cells = matrix.cells(matrix.FULL)
    first, distributed = folder.seconds(cells[0]), folder.seconds(cells[-1])
    start = reproduce.START_SECONDS[False]
    folder.results[cells[0].name] = result([1.0], seconds=(first - start) / 2)
    assert math.isclose(folder.seconds(cells[0]), start + (first - start) / 2)
    assert folder.seconds(cells[-1]) == distributed


def test_the_rate_is_the_one_with_the_lowest_loss_and_waits_for_all():
    best = {"allreduce": 8e-3, "noloco": 4e-3, "local": 2e-3}
    results = made_up(matrix.QUICK, lambda cell: 2 + abs(math.log((cell.rate or 1) / best[cell.optimizer])))
    assert tables.rates(matrix.QUICK, results) == best
    lowest = next(c for c in matrix.cells(matrix.QUICK) if c.optimizer == "noloco" and c.rate == 4e-3)
    results[lowest.name]["diverged_step"] = 7
    assert tables.rates(matrix.QUICK, results)["noloco"] in (2e-3, 8e-3)
    del results[lowest.name]
    assert "noloco" not in tables.rates(matrix.QUICK, results)
    with pytest.raises(ValueError, match="diverged"):
        matrix.chosen_rate({1e-3: math.inf}, "noloco")


def test_means_deviations_and_paired_errors_are_numpys():
    rng = np.random.default_rng(3)
    losses = {cell.name: rng.normal(2, 0.2, cell.replicas) for cell in matrix.cells(matrix.QUICK)}
    results = {name: result(values.tolist(), float(values.min())) for name, values in losses.items()}
    rows = tables.report(matrix.QUICK, results, {"files": 3, "text_bytes": 31_500_000}).splitlines()
    assert rows[0] == "All 18 runs are done. Text: 31.5 MB in 3 files."
    row = next(line for line in rows if line.startswith("| 8 | local |")).split(" | ")
    ours, theirs = (
        np.array([np.exp(losses[f"{name}_8x1_seed{seed}"]).mean() for seed in (1, 2, 3)])
        for name in ("local", "noloco")
    )
    assert row[3] == f"{ours.mean():.2f} ± {statistics.stdev(ours):.2f}"
    merged = [math.exp(min(losses[f"local_8x1_seed{seed}"])) for seed in (1, 2, 3)]
    assert row[4] == f"{np.mean(merged):.2f} ± {np.std(merged, ddof=1):.2f}"
    error = statistics.stdev(ours - theirs) / 3**0.5
    assert row[7] == f"{(ours - theirs).mean():+.2f} ± {error:.2f} |"
    assert row[5] == "0.1000 ± 0.0000" and row[6] == "2.0"


def test_what_has_not_run_or_diverged_is_said():
    text = tables.report(matrix.FULL, {}, None)
    assert "0 of 112 runs are done" in text and "not been run to its end" in text
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line and "rate" not in line]
    assert rows and all("not run" in line for line in rows if "chosen" not in line)
    results = made_up(matrix.FULL, lambda cell: 2.0)
    del results["local_4x1_seed2"]
    results["gossip_4x1_seed1"]["diverged_step"] = 30
    rows = tables.report(matrix.FULL, results, None).splitlines()
    assert "(2 of 3 seeds)" in next(line for line in rows if line.startswith("| 4 | local |"))
    diverged = next(line for line in rows if line.startswith("| 4 | gossip |"))
    assert diverged.count("diverged") == 3


def test_the_order_is_asserted_with_its_margins():
    level = {"allreduce": 2.0, "noloco": 2.1, "local": 2.3}
    noise = {1: 0.01, 2: -0.01, 3: 0.02}
    results = made_up(
        matrix.QUICK, lambda cell: level[cell.optimizer] + noise.get(cell.seed, 0) * level[cell.optimizer]
    )
    assert len(tables.check_order(matrix.QUICK, results, 8)) == 2
    reversed_ = made_up(matrix.QUICK, lambda cell: 4 - level[cell.optimizer] + noise.get(cell.seed, 0))
    with pytest.raises(ValueError, match=r"noloco − allreduce.*local − noloco"):
        tables.check_order(matrix.QUICK, reversed_, 8)
    # The right order on average, but as uncertain as it is large.
    uncertain = made_up(
        matrix.QUICK, lambda cell: 2 + (cell.optimizer == "local") * {1: 0.3, 2: -0.1, 3: 0.1}.get(cell.seed, 0)
    )
    with pytest.raises(ValueError, match="two standard errors"):
        tables.check_order(matrix.QUICK, uncertain, 8)


def test_the_page_keeps_its_text_around_the_tables(tmp_path):
    page, begin, end = tmp_path / "results.md", *(mark.format("tables") for mark in (reproduce.BEGIN, reproduce.END))
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    reproduce.write_page(page, "new\n")
    reproduce.write_page(page, "newer\n")
    assert page.read_text() == f"before\n{begin}\n\nnewer\n\n{end}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="lacks"):
        reproduce.write_page(page, "new\n")


def test_the_repositorys_page_has_the_marks():
    text = reproduce.PAGE.read_text()
    for name in reproduce.PAGE_MARKS.values():
        assert text.index(reproduce.BEGIN.format(name)) < text.index(reproduce.END.format(name))
