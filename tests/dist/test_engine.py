"""DeepSpeed's step behind megatron-core's schedule, against plain PyTorch AdamW on the same stages.

Letters: M microbatches of an inner step, B samples of one, S tokens of a sample.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from noloco_mega import config
from noloco_mega.grid import Grid
from tests.harness import replica_world, run_ranks

MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "seq_length": 16,
}
M, B, STEPS = 3, 2, 20
ADAM = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
# A world needs its groups once, and its engines can follow each other: all settings of a layout share one start.
SETTINGS = [
    {"bf16": False, "clip": 0.0},
    {"bf16": False, "clip": 0.5},
    {"bf16": True, "clip": 0.5},
]


def make_config(grid: Grid, *, bf16: bool = False, clip: float = 0.0, **deepspeed: Any) -> config.Config:
    return config.parse(
        {
            "train_micro_batch_size_per_gpu": B,
            "gradient_accumulation_steps": M,
            "gradient_clipping": clip,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
            **({"bf16": {"enabled": True}} if bf16 else {}),
            **deepspeed,
            "topology": {
                "replicas": grid.replicas,
                "stages": grid.stages,
                "tensor": grid.tensor,
                "data": grid.data,
                "sequence_parallel": grid.tensor > 1,
            },
            "model": MODEL,
            "data": {"train": "-", "valid": "-", "tokenizer": "-"},
            "noloco": {},
            "run": {"name": "test", "steps": STEPS},
        }
    )


def make_stage(settings: config.Config, world: Any) -> torch.nn.Module:
    from noloco_mega.model import parameters, stage

    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    model = stage.build_stage(settings.model, settings.topology, world, dtype)
    parameters.initialise(model, world, seed=5, std=0.05)
    return model


def run_schedule(model: torch.nn.Module, step: int, data: int, world: Any) -> float | None:
    """One inner step's M forward and backward passes; the mean loss on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(1000 * step + data)
    start = torch.randint(64, (M, B, 1), generator=generator)
    tokens = (start + 3 * torch.arange(17) + torch.randint(2, (M, B, 17), generator=generator)) % 64

    def forward(batches, module):
        batch = next(batches)
        out = module(batch[:, :-1], None, None, labels=batch[:, 1:])
        return out, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(tokens),
        model=[model],
        num_microbatches=M,
        seq_length=16,
        micro_batch_size=B,
        forward_only=False,
    )
    return sum(float(entry["loss"]) for entry in losses) / M if losses else None


class PlainAdamW:
    """The reference: torch.optim.AdamW on fp32 copies, gradients accumulated in fp32, one norm over the replica."""

    def __init__(self, model: torch.nn.Module, world: Any, clip: float) -> None:
        self.model, self.world, self.clip = model, world, clip
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.sums = [torch.zeros_like(w) for w in self.masters]
        for p, total in zip(self.parameters, self.sums, strict=True):
            p.register_post_accumulate_grad_hook(partial(self._accumulate, total))
        self.adam = torch.optim.AdamW(self.masters, foreach=False, **{**ADAM, "betas": tuple(ADAM["betas"])})

    @staticmethod
    def _accumulate(total: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        total.add_(parameter.grad.float())
        parameter.grad = None

    @torch.no_grad()
    def step(self) -> float:
        world, squares = self.world, torch.zeros(())
        for p, w, total in zip(self.parameters, self.masters, self.sums, strict=True):
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(total, group=world.tensor)
            dist.all_reduce(total, group=world.data)
            w.grad = total / world.grid.data
            if p.tensor_model_parallel or world.place.tensor == 0:
                squares += w.grad.square().sum()
            total.zero_()
        dist.all_reduce(squares, group=world.model)
        norm = squares.sqrt()
        if self.clip:
            for w in self.masters:
                w.grad.mul_(min(1.0, self.clip / float(norm + 1e-6)))
        self.adam.step()
        for p, w in zip(self.parameters, self.masters, strict=True):
            p.copy_(w)
        return float(norm)


def _train_both(place, directory, grid, settings_list):
    from noloco_mega.engine import deepspeed as engines

    world = replica_world(grid, place, directory)
    differences = []
    for settings in settings_list:
        run = make_config(grid, **settings)
        reference_model = make_stage(run, world)
        reference = PlainAdamW(reference_model, world, settings["clip"])
        engine = engines.build_engine(make_stage(run, world), run, world)
        worst = {"loss": 0.0, "norm": 0.0}
        for step in range(STEPS):
            expected = run_schedule(reference_model, step, place.data, world)
            expected_norm = reference.step()
            engines.begin(engine)
            loss = run_schedule(engine.module, step, place.data, world)
            norm = engines.apply(engine, world)
            if expected is not None:
                worst["loss"] = max(worst["loss"], abs(loss - expected))
            worst["norm"] = max(worst["norm"], abs(norm - expected_norm) / expected_norm)
        pairs = [
            (p.detach(), q.detach())
            for p, q in zip(engine.module.parameters(), reference_model.parameters(), strict=True)
        ]
        worst["weight"] = max(float((p - q).abs().max()) for p, q in pairs)
        # The last bit of a bf16 weight follows from a master next to the border between two.
        beyond_last_bit = [((p - q).abs() - 2**-7 * q.abs()).max() for p, q in pairs]
        worst["beyond the last bit"] = max(map(float, beyond_last_bit))
        worst["clipped"] = norm > settings["clip"]
        differences.append(worst)
    return differences


@pytest.mark.parametrize(
    "grid", [Grid(replicas=1, stages=2, tensor=2), Grid(replicas=1, stages=2, data=2)], ids=["S2T2", "S2D2"]
)
def test_twenty_steps_equal_plain_adamw(tmp_path, grid):
    for plain, clipped, bf16 in run_ranks(_train_both, grid, tmp_path, grid, SETTINGS):
        # Same kernels in the same order, and a mean over two data ranks is exact: not one bit may differ.
        assert plain["weight"] == 0 and plain["loss"] == 0
        assert clipped["weight"] < 1e-5 and clipped["loss"] < 1e-5
        assert bf16["loss"] < 1e-3 and bf16["beyond the last bit"] < 1e-3
        assert clipped["clipped"] and bf16["clipped"], "the clip never acted: the test shows nothing about it"
        assert max(plain["norm"], clipped["norm"]) < 1e-5 and bf16["norm"] < 1e-3


def _redo(place, directory, grid):
    """Train twice from the same start; the second time every step's first try is dropped. What differs at the end?"""
    from noloco_mega.engine import deepspeed as engines
    from noloco_mega.engine.weights import Masters

    world = replica_world(grid, place, directory)
    answer = {}
    for bf16 in (False, True):
        run = make_config(grid, bf16=bf16, clip=0.5)
        ends = []
        for failing in (False, True):
            engine = engines.build_engine(make_stage(run, world), run, world)
            for step in range(4):
                engines.begin(engine)
                if failing:
                    run_schedule(engine.module, step + 100, place.data, world)
                    engines.drop_gradients(engine)
                    engines.begin(engine)
                run_schedule(engine.module, step, place.data, world)
                engines.apply(engine, world)
            masters = Masters(engine)
            state = [engine.basic_optimizer.state[w][key] for w in masters.tensors for key in ("exp_avg", "exp_avg_sq")]
            ends.append([*masters.tensors, *engine.module.parameters(), *state])
        answer["bf16" if bf16 else "fp32"] = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        answer["segments", bf16] = [
            (segment, masters.tensors[segment.master][segment.master_offset :][: segment.numel].tolist())
            for segment in masters.segments()
        ]
        answer["parameters", bf16] = {
            name: p.detach().float().flatten().tolist() for name, p in engine.module.named_parameters()
        }
        answer["rest", bf16] = sum(w.numel() for w in masters.tensors) - sum(s.numel for s in masters.segments())
    return answer


def test_a_dropped_and_redone_step_leaves_no_trace_and_segments_hold_the_parameters(tmp_path):
    grid = Grid(replicas=1, data=2)
    answers = run_ranks(_redo, grid, tmp_path, grid)
    for answer in answers:
        assert answer["fp32"] and answer["bf16"]
    for bf16 in (False, True):
        parameters = answers[0]["parameters", bf16]
        rebuilt = {name: [None] * len(values) for name, values in parameters.items()}
        names = []
        for answer in answers:
            for segment, values in answer["segments", bf16]:
                part = rebuilt[segment.parameter]
                assert len(values) == segment.numel and set(part[segment.parameter_offset :][: segment.numel]) == {None}
                part[segment.parameter_offset : segment.parameter_offset + segment.numel] = values
                names.append(segment.parameter)
            assert 0 <= answer["rest", bf16] < 4, "more than padding is left over"
        assert len(names) == len(parameters) + 1, "no parameter lay across the border: the test shows less than it says"
        for name, values in rebuilt.items():
            as_model = torch.tensor(values).to(torch.bfloat16).float() if bf16 else torch.tensor(values)
            assert torch.equal(as_model, torch.tensor(parameters[name])), name


SCHEDULERS = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 10, "warmup_max_lr": 0.1, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 4},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_step_size": 2},
    None: None,
}


def _rates(place, directory, grid):
    """The learning rate at each of 8 steps: by DeepSpeed alone, and by ours in a run whose steps 2 and 3 overflow."""
    from noloco_mega.engine import deepspeed as engines

    world = replica_world(grid, place, directory)
    answer = {}
    for name, params in SCHEDULERS.items():
        scheduler = {"scheduler": {"type": name, "params": params}} if name else {}
        run = make_config(grid, **scheduler)
        rates = {}
        for ours in (False, True):
            model = torch.nn.Linear(3, 2)
            engine = engines.build_engine(model, run, world)
            rates[ours] = []
            for step in range(8):
                rates[ours].append(engines.set_learning_rate(engine, step) if ours else engine.get_lr()[0])
                engines.begin(engine)
                engine.module(torch.ones(1, 3)).sum().backward()
                if ours and step in (2, 3):
                    model.weight.grad[0, 0] = float("nan")
                norm = engines.apply(engine, world)
                assert (norm == float("inf")) == (ours and step in (2, 3))
            assert engine.skipped_steps == (2 if ours else 0)
            assert model.weight.isfinite().all()
        answer[name] = rates
    return answer


def test_the_learning_rate_follows_the_runs_step_past_skipped_steps(tmp_path):
    (answer,) = run_ranks(_rates, Grid(replicas=1), tmp_path, Grid(replicas=1))
    for name, rates in answer.items():
        assert rates[True] == rates[False], name
        assert (len(set(rates[False])) > 2) == (name is not None), f"{name} does not move: {rates}"


def test_the_inner_optimizer_is_torchs_without_cuda_unless_named():
    from noloco_mega import device
    from noloco_mega.engine.deepspeed import engine_settings

    cpu = device.Device(torch.device("cpu"), "gloo")
    cuda = device.Device(torch.device("cuda", 0), "nccl")
    run = make_config(Grid(replicas=1))
    explicit = make_config(Grid(replicas=1), optimizer={"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": False}})
    assert engine_settings(run, cpu)["optimizer"]["params"] == {**ADAM, "torch_adam": True}
    assert engine_settings(run, cuda)["optimizer"]["params"] == ADAM
    assert engine_settings(explicit, cpu)["optimizer"]["params"]["torch_adam"] is False
    assert run.deepspeed["optimizer"]["params"] == ADAM, "the config itself was changed"


def _refusals(place, directory, grid):
    from noloco_mega.engine import deepspeed as engines

    world = replica_world(grid, place, directory)
    run = make_config(grid)
    messages = {}
    for name, block in {
        "stage 0": {"stage": 0},
        "stage 2": {"stage": 2},
    }.items():
        run.deepspeed["zero_optimization"] = block
        with pytest.raises(ValueError) as raised:
            engines.build_engine(torch.nn.Linear(3, 2), run, world)
        messages[name] = str(raised.value)
    return messages


def test_other_engines_are_refused_with_what_to_change(tmp_path):
    (messages,) = run_ranks(_refusals, Grid(replicas=1), tmp_path, Grid(replicas=1))
    assert '"zero_optimization": {"stage": 1}' in messages["stage 0"]
    assert '"zero_optimization": {"stage": 1}' in messages["stage 2"]
