"""Which of DeepSpeed's settings may a config hold, and why not the others?

DeepSpeed ignores many misspelt keys, and the schedule calls the engine's module directly, so that settings which act in
the engine's own forward or backward pass would have no effect. Every key that DeepSpeed reads is therefore in one of
two kinds of entries: what its value must be, or why it is refused. A test compares them with the installed DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

LARGEST_COUNT = 2**31 - 1


class Kind(NamedTuple):
    """What a value must be."""

    words: str
    """Completes "must be ..."."""
    fits: Callable[[Any], bool]


class Refused(NamedTuple):
    """A key that DeepSpeed has and that is not supported here."""

    reason: str
    may_be_off: bool = True
    """Whether the key may stand in the file while its value turns the feature off; it is then not handed on."""


class Block(NamedTuple):
    """An object with these keys."""

    example: str
    keys: Mapping[str, Entry]


Entry = Kind | Refused | Block


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: Any, low: int, high: int = LARGEST_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def choice(*names: str) -> Kind:
    listed = ", ".join(f'"{name}"' for name in names)
    return Kind(
        f"one of {listed}" if len(names) > 1 else listed, lambda value: isinstance(value, str) and value in names
    )


def _refuse(reason: str, *names: str, may_be_off: bool = True) -> dict[str, Entry]:
    return dict.fromkeys(names, Refused(reason, may_be_off))


ANY = Kind("anything", lambda value: True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TRUE = Kind("true: the hand-off from the schedule needs it", lambda value: value is True)
COUNT = Kind("a positive integer", lambda value: is_whole(value, 1))
COUNT_FROM_0 = Kind("an integer of at least 0", lambda value: is_whole(value, 0))
COUNT_OR_NULL = Kind("a positive integer or null", lambda value: value is None or is_whole(value, 1))
# Bucket sizes are written as 5e8, which JSON reads as a float.
SIZE = Kind("a whole number above 0", lambda value: is_number(value) and 1 <= value < 2**53 and value == int(value))
NOT_NEGATIVE = Kind("a finite number of at least 0", lambda value: is_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: is_number(value) and value > 0)
FRACTION = Kind("a number in [0, 1]", lambda value: is_number(value) and 0 <= value <= 1)
BETA = Kind("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)
BETAS = Kind(
    "two numbers in [0, 1), e.g. [0.9, 0.95]",
    lambda value: isinstance(value, list) and len(value) == 2 and all(BETA.fits(beta) for beta in value),
)
STAGE = Kind("an integer from 0 to 3", lambda value: is_whole(value, 0, 3))
WARMUP_TYPE = choice("log", "linear")
# Batch sizes depend on each other: checks.batch_sizes looks at them.
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

FP32_MASTERS = "the outer step works on fp32 masters and the inner optimizer's fp32 state"
OFFLOAD = "the outer step works on the masters in place, which must not be offloaded"
NO_CHECKPOINT = "DeepSpeed's own checkpoints are neither written nor read"
DIRECT = "the schedule calls the module directly, so that this would have no effect"
OTHER_STAGE = "it belongs to another ZeRO stage than 1"

BF16: dict[str, Entry] = {
    "enabled": FLAG,
    "immediate_grad_update": FLAG,
    **_refuse("DeepSpeed does not look at it where gradients accumulate in fp32", "check_grad_overflow"),
    **_refuse(FP32_MASTERS, "bf16_master_weights_and_grads", "bf16_optimizer_states"),
}

ZERO: dict[str, Entry] = {
    "stage": STAGE,
    **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"), FLAG),
    **dict.fromkeys(("allgather_partitions", "round_robin_gradients"), FLAG),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), SIZE),
    "compute_grad_norm": TRUE,
    **_refuse(
        "it reduces gradients inside the backward pass, before all ranks have agreed to keep them; remove it or set "
        "it to false",
        "overlap_comm",
    ),
    **_refuse(OFFLOAD, "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"),
    **_refuse(OFFLOAD, "cpu_offload_use_pin_memory", "zenflow", "sub_group_size"),
    **_refuse("the masters' layout is read without gaps between parameters", "parameter_alignment"),
    **_refuse("DeepSpeed itself no longer has it", "legacy_stage1"),
    **_refuse(NO_CHECKPOINT, "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"),
    **_refuse(OTHER_STAGE, "ignore_unused_parameters", "zero_hpz_partition_size", "zero_quantized_weights"),
    **_refuse(
        OTHER_STAGE, "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear"
    ),
    **_refuse(OTHER_STAGE, "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module"),
    **_refuse(OTHER_STAGE, "save_muon_momentum_buffer_in_memory", "stage3_gather_fp16_weights_on_model_save"),
    **{
        prefix + name: Refused(OTHER_STAGE)
        for prefix in ("", "stage3_")
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    **_refuse("DeepSpeed removed it", "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
}

ADAM: dict[str, Entry] = {
    "lr": NOT_NEGATIVE,
    "betas": BETAS,
    "eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "adam_w_mode": FLAG,
    "torch_adam": FLAG,
    **_refuse('DeepSpeed clips by the top-level "gradient_clipping"', "max_grad_norm", may_be_off=False),
    **_refuse(FP32_MASTERS, "fp32_optimizer_states", may_be_off=False),
    **_refuse(
        "only one of torch's and DeepSpeed's Adam takes it, and which of them runs depends on the device",
        *(
            "amsgrad",
            "bias_correction",
            "set_grad_none",
            "maximize",
            "foreach",
            "capturable",
            "differentiable",
            "fused",
        ),
        may_be_off=False,
    ),
}

# The run sets it, step by step.
_LAST = _refuse("the run's own step is the schedule's position", "last_batch_iteration", may_be_off=False)
_WARMUP: dict[str, Entry] = {"warmup_num_steps": COUNT, "warmup_type": WARMUP_TYPE, **_LAST}
_WARMUP_LR: dict[str, Entry] = {"warmup_min_lr": NOT_NEGATIVE, "warmup_max_lr": NOT_NEGATIVE, **_WARMUP}

SCHEDULERS: dict[str, dict[str, Entry]] = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": {"total_num_steps": COUNT, **_WARMUP_LR},
    "WarmupCosineLR": {
        "total_num_steps": COUNT,
        "warmup_min_ratio": FRACTION,
        "cos_min_ratio": FRACTION,
        **_WARMUP,
    },
    "OneCycle": {
        **dict.fromkeys(("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "decay_mom_rate"), NOT_NEGATIVE),
        **dict.fromkeys(("cycle_first_step_size", "cycle_second_step_size"), COUNT),
        **dict.fromkeys(("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"), COUNT_FROM_0),
        **dict.fromkeys(("cycle_min_mom", "cycle_max_mom"), BETA),
        "cycle_momentum": FLAG,
        **_LAST,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": NOT_NEGATIVE,
        "lr_range_test_step_size": COUNT,
        "lr_range_test_step_rate": NOT_NEGATIVE,
        "lr_range_test_staircase": FLAG,
        **_LAST,
    },
}
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
DEFAULT_WARMUP_STEPS = 1000

TOP: dict[str, Entry] = {
    **dict.fromkeys(BATCH_SIZES, ANY),
    "gradient_clipping": NOT_NEGATIVE,
    "optimizer": Block(
        '{"type": "AdamW", "params": {"lr": 6e-4}}',
        {
            "type": Kind("a name", lambda value: isinstance(value, str)),
            "params": Block('{"lr": 6e-4}', ADAM),
            **_refuse("it is for other optimizers than Adam", "legacy_fusion"),
        },
    ),
    "scheduler": Block(
        '{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
        {"type": choice(*SCHEDULERS), "params": ANY},
    ),
    "bf16": Block('{"enabled": true}', BF16),
    "zero_optimization": Block('{"stage": 1}', ZERO),
    "data_types": Block(
        '{"grad_accum_dtype": "fp32"}',
        {
            "grad_accum_dtype": choice("fp32"),
            **_refuse("bf16.enabled alone decides the weights' type", "param_dtype", "buffer_dtype"),
            **_refuse("bf16.enabled alone decides the weights' type", "keep_in_fp32_modules"),
        },
    ),
    "communication_data_type": choice("fp32", "bf16", "fp16"),
    "prescale_gradients": FLAG,
    "gradient_predivide_factor": POSITIVE,
    "managed_gradient_accumulation": TRUE,
    "gradient_allreduce_op": choice("mean"),
    "steps_per_print": COUNT_OR_NULL,
    **dict.fromkeys(("zero_allow_untested_optimizer", "memory_breakdown", "dump_state", "disable_python_gc"), FLAG),
    "log_level": choice("debug", "info", "warning", "error", "critical"),
    **_refuse("it needs loss scaling across routed stages; use bf16 or fp32", "fp16"),
    **_refuse('write "bf16"', "bfloat16", may_be_off=False),
    **_refuse(DIRECT, "torch_autocast", "compile", "flops_profiler", "hybrid_engine", "weight_quantization"),
    **_refuse(DIRECT + "; the model of a stage has no recomputation", "activation_checkpointing"),
    **_refuse("the schedule bypasses the passes that its timers time", "wall_clock_breakdown", "timers"),
    **_refuse(
        "the loss never passes through DeepSpeed's monitor; metrics.jsonl has it, and run.tensorboard draws it",
        *("tensorboard", "wandb", "csv_monitor", "comet"),
    ),
    **_refuse("it would see DeepSpeed's own collectives only, and nothing prints its summary", "comms_logger"),
    **_refuse(NO_CHECKPOINT, "checkpoint", "datastates_ckpt"),
    **_refuse("it is for offloading, and " + OFFLOAD, "aio", "zero_force_ds_cpu_optimizer"),
    **_refuse("it restarts the training script with other settings than the file's", "autotuning"),
    **_refuse("samples are planned by number, for all replicas alike", "dataloader_drop_last", "data_efficiency"),
    **_refuse('the "topology" block lays out the model', "tensor_parallel", "sequence_parallel_size", "pipeline"),
    **_refuse("models are dense", "expert_parallel", "use_data_before_expert_parallelism"),
    **_refuse("sequences are not split between engines", "seq_parallel_communication_data_type"),
    **_refuse("it has no effect at ZeRO stage 1", "disable_allgather"),
    **_refuse('write "model": {"vocab_size": ...}', "vocabulary_size"),
    **_refuse("DeepSpeed removed it", "nebula", "compression_training", "amp", "quantize_training"),
    **_refuse("DeepSpeed removed it", "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity"),
    **_refuse("DeepSpeed removed it", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
}


def problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with DeepSpeed's part of a file, key by key; top-level keys outside TOP are left to the caller."""
    yield from _block({key: value for key, value in settings.items() if key in TOP}, TOP, "")
    if isinstance(settings.get("scheduler"), dict):
        yield from _scheduler(settings["scheduler"])


def object_at(settings: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The object at a path; empty where there is none, or where something else stands in its place."""
    value: Any = settings
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, dict) else {}


def without_refused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of checked settings without the features that they turn off and that are not supported anyway."""
    return _without_refused(settings, TOP)


def unknown_key(key: str, known: Collection[str], where: str, listed: Collection[str] | None = None) -> str:
    """The sentence for a key that is not known under `where` ("" or "block."): the nearest one that is, or else all of
    them (of `listed`, where that is shorter)."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(sorted(listed or known))}"
    return f'unknown key "{where}{key}"{hint}'


def supported(keys: Mapping[str, Entry]) -> list[str]:
    return [key for key, entry in keys.items() if not isinstance(entry, Refused)]


def _block(block: Mapping[str, Any], keys: Mapping[str, Entry], where: str) -> Iterator[str]:
    for key, value in block.items():
        match keys.get(key):
            case None:
                yield unknown_key(key, keys, where, supported(keys))
            case Refused(reason, may_be_off):
                if not (may_be_off and _is_off(value)):
                    yield f'DeepSpeed\'s "{where}{key}" is not supported here: {reason}'
            case Block(example, inner):
                if isinstance(value, dict):
                    yield from _block(value, inner, f"{where}{key}.")
                else:
                    yield f'"{where}{key}" must be an object like {example} (given: {json.dumps(value)})'
            case Kind(words, fits):
                if not fits(value):
                    auto = '; "auto" is not resolved here' if value == "auto" else ""
                    yield f'"{where}{key}" must be {words} (given: {json.dumps(value)}){auto}'


def _scheduler(scheduler: Mapping[str, Any]) -> Iterator[str]:
    """Parameters of the scheduler, which depend on its type."""
    name, params = scheduler.get("type"), scheduler.get("params")
    if "type" not in scheduler:
        yield f'"scheduler.type" is missing; known: {", ".join(SCHEDULERS)}'
    if not isinstance(params, dict):
        yield '"scheduler.params" must be an object like {"warmup_num_steps": 100}'
        return
    if not isinstance(name, str) or name not in SCHEDULERS:
        return
    yield from _block(params, SCHEDULERS[name], "scheduler.params.")
    for key in REQUIRED.get(name, ()):
        if key not in params:
            yield f'"scheduler.params.{key}" is missing'
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", DEFAULT_WARMUP_STEPS)
    if COUNT.fits(total) and COUNT.fits(warmup) and total <= warmup:
        yield (
            f"scheduler.params.total_num_steps = {total} leaves no steps after scheduler.params.warmup_num_steps = "
            f"{warmup} (DeepSpeed's default: {DEFAULT_WARMUP_STEPS}); warm up for fewer"
        )


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_off(inner) for inner in value.values())
    return value is None or value is False


def _without_refused(block: Mapping[str, Any], keys: Mapping[str, Entry]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in block.items():
        entry = keys.get(key)
        if isinstance(entry, Block):
            kept[key] = _without_refused(value, entry.keys)
        elif not isinstance(entry, Refused):
            kept[key] = value
    return kept
