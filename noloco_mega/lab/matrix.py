"""Which runs does a reproduction of the paper's comparison consist of?

Every run is a cell, declared as data: what it changes, its seed, and whether the simulator or real processes compute
it. All cells of a scale take the same number of samples per inner step over all replicas, so that all of them see
equally many tokens, and with the same seed the same ones: N replicas take 1/N of them each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPTIMIZERS = ("allreduce", "diloco", "noloco", "gossip", "local")
PAPER: dict[str, dict[str, Any]] = {
    "noloco": {"inner_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.5, "gamma": 0.7},
    "diloco": {"inner_steps": 100, "outer_lr": 0.7, "outer_momentum": 0.3},
    "gossip": {"inner_steps": 50},
    "allreduce": {"inner_steps": 50},
    "local": {"inner_steps": 50},
}
"""The paper's settings of the outer step, and γ as the public code has it; gossip exchanges as often as NoLoCo."""
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "noloco_gamma0": ("noloco", {"gamma": 0.0, "allow_unstable": True}),
    "noloco_momentum0": ("noloco", {"outer_momentum": 0.0}),
    "noloco_n3": ("noloco", {"group_size": 3}),
    "noloco_n4": ("noloco", {"group_size": 4}),
    "noloco_h25": ("noloco", {"inner_steps": 25}),
    "noloco_h100": ("noloco", {"inner_steps": 100}),
    "noloco_h200": ("noloco", {"inner_steps": 200}),
    "diloco_h50": ("diloco", {"inner_steps": 50}),
}
"""Setting by name: the optimizer and what is changed. n = 2, H = 50 and pairing alone (gossip) are cells of the matrix.
Without γ nothing holds the replicas together for ever, which the check at the start refuses unless it is asked for."""
TOGETHER: dict[str, Any] = {
    "combine": "after",
    "gamma": 1.0,
    "pairing": "hypercube",
    "outer_momentum": 0.3,
    "outer_lr": 1.0,
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "look-ahead": ("noloco", {"nesterov": True}),
    "combine after": ("noloco", {"combine": "after", "gamma": 1.0}),
    "hypercube": ("noloco", {"pairing": "hypercube"}),
    "tournament": ("noloco", {"pairing": "tournament"}),
    "gamma rises": ("noloco", {"gamma_at_zero_lr": 1.0}),
    "gamma falls": ("noloco", {"gamma_at_zero_lr": 0.0}),
    "a0.3 b1": ("noloco", {"outer_momentum": 0.3, "outer_lr": 1.0}),
    "together": ("noloco", TOGETHER),
    "together look-ahead": ("noloco", {**TOGETHER, "nesterov": True}),
    "diloco b1": ("diloco", {"outer_lr": 1.0}),
    "diloco b1.4": ("diloco", {"outer_lr": 1.4}),
    "diloco b1 look-ahead": ("diloco", {"outer_lr": 1.0, "nesterov": True}),
}
"""The options of NoLoCo's outer step one by one, what was put together of them, and the rival: DiLoCo with other β."""
DISTRIBUTED = (
    ("noloco", "fixed", 1),
    ("noloco", "fixed", 2),
    ("noloco", "random", 2),
    ("local", "fixed", 2),
    ("local", "random", 2),
    ("diloco", "fixed", 2),
)
"""Optimizer, routing and stages."""
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "seq_length": 64,
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of the comparison is run, and how long each run of it is."""

    steps: int
    """Inner steps of a simulated cell."""
    tuning_steps: int | None = None
    """Of one that chooses a learning rate; absent: as many."""
    inner_steps: Mapping[str, int] = field(default_factory=dict)
    """H by optimizer, where it is not the paper's."""
    rates: tuple[float, ...]
    """Inner learning rates that are tried for each optimizer, ascending."""
    optimizers: tuple[str, ...] = OPTIMIZERS
    replicas: tuple[int, ...] = (4, 8, 16)
    seeds: tuple[int, ...] = (1, 2, 3)
    tuning_seed: int = 101
    """Of the runs that choose the learning rate; none of `seeds`."""
    tuning_replicas: int = 8
    """N of those runs, and of the ablations."""
    ablations: tuple[str, ...] = tuple(ABLATIONS)
    """Names in ABLATIONS or OPTIONS."""
    distributed: tuple[tuple[str, str, int], ...] = DISTRIBUTED
    distributed_steps: int = 200
    distributed_replicas: int = 4
    distributed_inner_steps: int = 25
    """H of NoLoCo in the distributed cells, which are short; DiLoCo's is twice as long, as in the paper."""
    batch_size: int = 16
    """Samples of an inner step, over all replicas."""
    valid_samples: int = 256
    """Samples of an evaluation."""
    save_every: int = 100
    model: Mapping[str, Any] = field(default_factory=lambda: dict(MODEL))


FULL = Scale(steps=800, rates=(1e-3, 2e-3, 4e-3, 8e-3, 16e-3))
QUICK = Scale(
    steps=400,
    rates=(2e-3, 4e-3, 8e-3),
    optimizers=("allreduce", "noloco", "local"),
    replicas=(8,),
    ablations=(),
    distributed=(),
)


BETTER = Scale(
    steps=2400,
    tuning_steps=600,
    inner_steps={"noloco": 12, "allreduce": 12, "diloco": 20},
    rates=(1e-3, 2e-3, 4e-3),
    optimizers=("allreduce", "diloco", "noloco"),
    replicas=(8,),
    ablations=tuple(OPTIONS),
    distributed=(),
    batch_size=8,
    save_every=300,
    model={**MODEL, "hidden_size": 160, "num_layers": 3, "ffn_hidden_size": 448},
)
"""1.04 million parameters, 200 outer steps of NoLoCo and 120 of DiLoCo, whose ring sends 1.75 times as much in each."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    name: str
    part: str
    """"tuning", "matrix", "ablation" or "distributed"."""
    setting: str
    """The optimizer's name, or what an ablation is called."""
    optimizer: str
    replicas: int
    seed: int
    """Of weights, samples, pairs and routes."""
    steps: int
    noloco: Mapping[str, Any]
    """The outer step's settings, beside optimizer, routing and seed."""
    rate: float | None = None
    """The inner learning rate; None: the one that tuning chose for the optimizer."""
    stages: int = 1
    routing: str = "fixed"


def cells(scale: Scale) -> list[Cell]:
    """All cells, in the order in which they are run: what tunes a rate comes before what needs it, and one seed is
    whole before the next begins."""
    of_seeds = [cell for seed in scale.seeds for cell in (*_matrix(scale, seed), *_ablations(scale, seed))]
    return [*_tuning(scale), *of_seeds, *_distributed(scale)]


def _tuning(scale: Scale) -> list[Cell]:
    return [
        Cell(
            name=f"tuning_{optimizer}_{scale.tuning_replicas}x1_lr{rate:g}",
            part="tuning",
            setting=optimizer,
            optimizer=optimizer,
            replicas=scale.tuning_replicas,
            seed=scale.tuning_seed,
            steps=scale.tuning_steps or scale.steps,
            noloco=_noloco(scale, optimizer, {}),
            rate=rate,
        )
        for optimizer in scale.optimizers
        for rate in scale.rates
    ]


def _matrix(scale: Scale, seed: int) -> list[Cell]:
    return [
        _simulated(scale, "matrix", optimizer, optimizer, replicas, seed, {})
        for replicas in scale.replicas
        for optimizer in scale.optimizers
    ]


def _ablations(scale: Scale, seed: int) -> list[Cell]:
    known = ABLATIONS | OPTIONS
    return [
        _simulated(scale, "ablation", setting, known[setting][0], scale.tuning_replicas, seed, known[setting][1])
        for setting in scale.ablations
    ]


def _noloco(scale: Scale, optimizer: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    own = {"inner_steps": scale.inner_steps[optimizer]} if optimizer in scale.inner_steps else {}
    return {**PAPER[optimizer], **own, **changes}


def _simulated(
    scale: Scale, part: str, setting: str, optimizer: str, replicas: int, seed: int, changes: Mapping[str, Any]
) -> Cell:
    return Cell(
        name=f"{setting.replace(' ', '_')}_{replicas}x1_seed{seed}",
        part=part,
        setting=setting,
        optimizer=optimizer,
        replicas=replicas,
        seed=seed,
        steps=scale.steps,
        noloco=_noloco(scale, optimizer, changes),
    )


def _distributed(scale: Scale) -> list[Cell]:
    inner_steps = {"diloco": 2 * scale.distributed_inner_steps}
    return [
        Cell(
            name=f"distributed_{optimizer}_{routing}_{scale.distributed_replicas}x{stages}_seed{seed}",
            part="distributed",
            setting=f"{optimizer}_{routing}",
            optimizer=optimizer,
            replicas=scale.distributed_replicas,
            seed=seed,
            steps=scale.distributed_steps,
            noloco={
                **PAPER[optimizer],
                "inner_steps": inner_steps.get(optimizer, scale.distributed_inner_steps),
            },
            stages=stages,
            routing=routing,
        )
        for seed in scale.seeds
        for optimizer, routing, stages in scale.distributed
    ]


def config_of(cell: Cell, scale: Scale, data: Mapping[str, str], rate: float, directory: str) -> dict[str, Any]:
    """The cell as a config's JSON, for a run in DIRECTORY/NAME. `data` is the config's block of that name.

    Raises ValueError where a batch cannot be shared equally.
    """
    microbatches = 2 if cell.stages > 1 else 1
    micro_batch, rest = divmod(scale.batch_size, cell.replicas * microbatches)
    evaluations, left = divmod(scale.valid_samples, max(micro_batch, 1))
    if rest or left or not micro_batch:
        raise ValueError(
            f"{cell.name}: {scale.batch_size} samples per step and {scale.valid_samples} per evaluation cannot be cut "
            f"into microbatches for {cell.replicas} replicas; choose powers of two"
        )
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": cell.steps,
                "warmup_num_steps": max(cell.steps // 20, 2),
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": 0.1,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {"stage": 1},
        "topology": {"replicas": cell.replicas, "stages": cell.stages},
        "model": dict(scale.model),
        "data": dict(data),
        "noloco": {**cell.noloco, "optimizer": cell.optimizer, "routing": cell.routing, "seed": cell.seed},
        "run": {
            "name": cell.name,
            "directory": directory,
            "steps": cell.steps,
            "seed": cell.seed,
            "log_every": 25,
            "eval_microbatches": evaluations,
            "save_every": scale.save_every,
            "tensorboard": False,
        },
    }


def chosen_rate(cell_rates: Mapping[float, float], optimizer: str) -> float:
    """The rule of tuning: of the rates tried, the one with the lowest mean validation loss over the replicas.

    `cell_rates` gives that loss (infinite for a run that diverged) by rate. Of equal losses the lower rate wins. Raises
    ValueError where every run diverged.
    """
    best = min(sorted(cell_rates), key=lambda rate: cell_rates[rate])
    if cell_rates[best] == float("inf"):
        raise ValueError(f"every learning rate that was tried for {optimizer} diverged; add lower ones to the scale")
    return best


def gigaflop(cell: Cell, scale: Scale, parameters: int) -> float:
    """Work of the cell's matrix products: 6 per weight and trained token, 2 per weight and evaluated one; the
    replicas and their mean are evaluated once at the start and once at the end."""
    model = scale.model
    weights = parameters - model["vocab_size"] * model["hidden_size"]
    trained = cell.steps * scale.batch_size * model["seq_length"]
    evaluated = 2 * (cell.replicas + 1) * scale.valid_samples * model["seq_length"]
    return weights * (6 * trained + 2 * evaluated) / 1e9


def tuned_rates(losses: Mapping[str, Mapping[float, float]], wanted: Sequence[float]) -> dict[str, float]:
    """The chosen rate of every optimizer for which all `wanted` rates have been tried; see `chosen_rate`."""
    return {
        optimizer: chosen_rate(found, optimizer)
        for optimizer, found in losses.items()
        if all(rate in found for rate in wanted)
    }
