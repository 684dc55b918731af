"""Can this run work? Every cross-check between settings, made before any process group exists.

Each check yields sentences that say what is wrong and what to change. `deepspeed_settings` is the JSON that
deepspeed.initialize gets: the user's keys verbatim, plus the ones that the hand-off from the schedule needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noloco_mega.plan.stability import spectral_radius, stable_gamma_range

if TYPE_CHECKING:
    from noloco_mega.config import Config

DEEPSPEED_KEYS = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "data_types",
        "torch_autocast",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "disable_python_gc",
        "activation_checkpointing",
        "comms_logger",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "checkpoint",
        "timers",
        "log_level",
        "compile",
        "aio",
        "autotuning",
    ]
)

OUTER_OPTIMIZERS = ("local", "noloco")

# What the gradient hand-off from the schedule to ZeRO-1 needs in bf16: fp32 accumulation and reduction, and the
# gradient moved out of p.grad after every microbatch.
BF16_SETTINGS = {
    ("bf16", "immediate_grad_update"): True,
    ("data_types", "grad_accum_dtype"): "fp32",
    ("communication_data_type",): "fp32",
}


def problems(config: Config) -> list[str]:
    """Every reason why this config cannot run; empty when it can."""
    checks = (_batch, _model, _topology, _deepspeed, _outer, _deadlines, _name)
    return [problem for check in checks for problem in check(config)]


def batch_sizes(deepspeed: dict[str, Any], data: int) -> tuple[int, int]:
    """(B, M): samples per microbatch and microbatches per inner step, of one replica's data coordinate.

    As in DeepSpeed, any two of train_batch_size = B·M·D and the others determine the third; M defaults to 1.
    Raises ValueError if they do not fit.
    """
    total = deepspeed.get("train_batch_size")
    micro = deepspeed.get("train_micro_batch_size_per_gpu")
    steps = deepspeed.get("gradient_accumulation_steps")
    for key, value in {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f'"{key}" must be a positive integer (given: {value!r}); "auto" is not resolved here')
    if micro is None:
        if total is None:
            raise ValueError('give "train_micro_batch_size_per_gpu" (samples per microbatch), counted per replica')
        micro = total // ((steps or 1) * data)
    if steps is None:
        steps = total // (micro * data) if total is not None and micro else 1
    if total is not None and micro * steps * data != total:
        raise ValueError(
            f'"train_batch_size" is {total}, but counts per replica: microbatch {micro} · accumulation {steps} '
            f"· topology.data {data} = {micro * steps * data}; change one of them"
        )
    return micro, steps


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """The JSON for deepspeed.initialize: the file's own keys, and where they are silent what the hand-off needs."""
    settings: dict[str, Any] = copy.deepcopy(config.deepspeed)
    settings.setdefault("steps_per_print", None)
    micro, steps = batch_sizes(config.deepspeed, config.topology.data)
    settings |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    settings.setdefault("zero_optimization", {}).setdefault("stage", 1)
    if config.bf16:
        for path, value in BF16_SETTINGS.items():
            block = settings
            for part in path[:-1]:
                block = block.setdefault(part, {})
            block.setdefault(path[-1], value)
    return settings


def _batch(config: Config) -> Iterator[str]:
    try:
        batch_sizes(config.deepspeed, config.topology.data)
    except ValueError as error:
        yield str(error)


def _model(config: Config) -> Iterator[str]:
    model, topology = config.model, config.topology
    if model.num_layers % topology.stages:
        yield (
            f"model.num_layers = {model.num_layers} cannot be cut into topology.stages = {topology.stages} equal "
            f"stages; choose stages from {_divisors(model.num_layers)}"
        )
    groups = model.num_query_groups or model.num_attention_heads
    for name, size in {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": groups,
        "ffn_hidden_size": model.ffn_hidden_size,
    }.items():
        if size % topology.tensor:
            yield f"model.{name} = {size} is not a multiple of topology.tensor = {topology.tensor}"
    if model.vocab_size % topology.tensor:
        step = 128 * topology.tensor
        yield (
            f"model.vocab_size = {model.vocab_size} is not a multiple of topology.tensor = {topology.tensor}, and "
            f"padding rows would enter the loss; train the tokenizer to {_round_up(model.vocab_size, step)} "
            f"(a multiple of 128·tensor)"
        )
    if model.num_attention_heads % groups:
        yield (
            f"model.num_attention_heads = {model.num_attention_heads} is not a multiple of "
            f"model.num_query_groups = {groups}"
        )
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size = {model.hidden_size} is not a multiple of model.num_attention_heads = "
            f"{model.num_attention_heads}; change one, or give model.kv_channels"
        )
    elif (model.kv_channels or model.hidden_size // model.num_attention_heads) % 2:
        yield "rotary embeddings need an even head width; change model.kv_channels or the number of heads"
    if model.tied_embeddings and topology.stages > 1:
        yield "model.tied_embeddings needs topology.stages = 1: the two uses would live on different stages"


def _topology(config: Config) -> Iterator[str]:
    topology = config.topology
    if topology.sequence_parallel and topology.tensor == 1:
        yield "topology.sequence_parallel splits the sequence over the tensor axis; it needs topology.tensor > 1"
    if topology.sequence_parallel and config.model.seq_length % topology.tensor:
        yield f"model.seq_length = {config.model.seq_length} is not a multiple of topology.tensor = {topology.tensor}"
    if topology.sites is not None:
        listed = sorted(replica for site in topology.sites for replica in site)
        if listed != list(range(topology.replicas)):
            yield (f"topology.sites must name each replica 0..{topology.replicas - 1} exactly once; it names {listed}")


def _deepspeed(config: Config) -> Iterator[str]:
    settings = config.deepspeed
    if settings.get("fp16", {}).get("enabled"):
        yield "fp16 needs loss scaling across routed stages and is not supported; use bf16 or fp32"
    stage = settings.get("zero_optimization", {}).get("stage", 1)
    if stage != 1:
        yield (
            f"zero_optimization.stage = {stage}: the outer step lives on ZeRO stage 1's fp32 masters; "
            'set "zero_optimization": {"stage": 1}'
        )
    for key in ("offload_optimizer", "offload_param", "cpu_offload"):
        if settings.get("zero_optimization", {}).get(key):
            yield f"zero_optimization.{key} is not supported: the outer step works on the masters in place"
    if settings.get("zero_optimization", {}).get("overlap_comm"):
        yield (
            "zero_optimization.overlap_comm reduces gradients inside the backward pass, before all ranks have agreed "
            "to keep them; remove it or set it to false"
        )
    if "gradient_clipping" not in settings:
        yield (
            'say "gradient_clipping": DeepSpeed clips to 1.0 where the key is absent (1.0 is also the paper\'s value; '
            "0 turns it off)"
        )
    yield from _inner_optimizer(settings.get("optimizer"))
    if config.bf16:
        for path, value in BF16_SETTINGS.items():
            given: Any = settings
            for part in path:
                given = given.get(part) if isinstance(given, dict) else None
            if given is not None and given != value:
                yield f"{'.'.join(path)} must be {value!r} under bf16 (given: {given!r}); leave it out to have it set"


def _inner_optimizer(optimizer: dict[str, Any] | None) -> Iterator[str]:
    if not optimizer or "type" not in optimizer:
        yield 'give the inner optimizer, e.g. "optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}'
        return
    name, params = str(optimizer["type"]), optimizer.get("params", {})
    if name.lower() == "adam" and params.get("adam_w_mode", True):
        yield (
            'DeepSpeed runs AdamW under the name "Adam"; write "AdamW", or set optimizer.params.adam_w_mode to false '
            "for Adam with L2 regularisation"
        )
    elif name.lower() not in ("adam", "adamw"):
        yield f'optimizer.type "{name}" is not supported; use "AdamW" or "Adam"'
    if "lr" not in params:
        yield "optimizer.params.lr is missing"


def _outer(config: Config) -> Iterator[str]:
    noloco, replicas = config.noloco, config.topology.replicas
    if noloco.optimizer not in OUTER_OPTIMIZERS:
        yield f'noloco.optimizer "{noloco.optimizer}" is unknown; known: {", ".join(OUTER_OPTIMIZERS)}'
    if noloco.optimizer != "noloco" or replicas == 1:
        return
    if noloco.group_size > replicas:
        yield (
            f"noloco.group_size = {noloco.group_size} is larger than topology.replicas = {replicas}; "
            f"choose at most {replicas}"
        )
        return
    alpha, gamma, n = noloco.outer_momentum, noloco.gamma, noloco.group_size
    radius = spectral_radius(alpha, gamma, n, replicas)
    if radius >= 1 and not noloco.allow_unstable:
        _, high = stable_gamma_range(alpha, n, replicas)
        growth = "never shrink" if gamma == 0 else f"grow {math.sqrt(radius):.3f}-fold per outer step"
        yield (
            f"outer_momentum α = {alpha}, gamma γ = {gamma} is unstable for groups of {n} among {replicas} replicas: "
            f"the replicas' spread would {growth}. With this α, γ must lie in "
            f"(0, {math.floor(high * 1000) / 1000:.3f}); lower α or γ, or set noloco.allow_unstable to study it"
        )


def _deadlines(config: Config) -> Iterator[str]:
    noloco = config.noloco
    if not noloco.heartbeat_seconds < noloco.exchange_deadline_seconds < noloco.link_timeout_seconds:
        yield (
            "noloco needs heartbeat_seconds < exchange_deadline_seconds < link_timeout_seconds, so that a late "
            "partner is missed before it is declared dead and a stage outlasts its neighbour's exchange; given "
            f"{noloco.heartbeat_seconds:g}, {noloco.exchange_deadline_seconds:g}, {noloco.link_timeout_seconds:g}"
        )


def _name(config: Config) -> Iterator[str]:
    name = config.run.name
    if not name or name != name.strip() or "/" in name or name in (".", ".."):
        yield f'run.name "{name}" must be one folder name; put parents into run.directory'


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
