"""Can this run work? Every cross-check between settings, made before any process group exists.

Each check yields sentences that say what is wrong and what to change. `deepspeed_settings` is the JSON that
deepspeed.initialize gets: the user's settings as written, plus the ones that the hand-off from the schedule needs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from noloco_mega import deepspeed_keys
from noloco_mega.deepspeed_keys import object_at
from noloco_mega.plan.stability import rounding_noise, spectral_radius, stable_gamma_range

if TYPE_CHECKING:
    from noloco_mega.config import Config, Data, Model, Noloco, Run, Topology

OUTER_OPTIMIZERS: Mapping[str, frozenset[str]] = {
    "allreduce": frozenset(),
    "diloco": frozenset({"outer_lr", "outer_momentum", "nesterov", "weight_decay"}),
    "gossip": frozenset({"group_size", "pairing", "inner_phase"}),
    "local": frozenset(),
    "noloco": frozenset(
        {
            *("outer_lr", "outer_momentum", "nesterov", "gamma", "gamma_at_zero_lr", "combine", "weight_decay"),
            *("group_size", "pairing", "allow_unstable", "inner_phase"),
        }
    ),
}
"""Which settings of the outer step each outer optimizer uses; CODECS has the codec's."""
CODECS = {"noloco": ("none", "modulo"), "gossip": ("none", "modulo"), "diloco": ("none", "absmax")}
"""What the settings `codec` of the outer optimizers that have one may be."""
WAITS_FOR_EVERYBODY = frozenset({"allreduce", "diloco"})
"""The outer optimizers that average over all replicas."""

# What the gradient hand-off from the schedule to ZeRO-1 needs in bf16: fp32 accumulation and reduction, and the
# gradient moved out of p.grad after every microbatch.
BF16_SETTINGS = {
    ("bf16", "immediate_grad_update"): True,
    ("data_types", "grad_accum_dtype"): "fp32",
    ("communication_data_type",): "fp32",
}


def problems(parts: Mapping[str, Any]) -> list[str]:
    """Every reason why this config cannot run; empty when it can.

    `parts` holds the blocks by name, those that could be parsed, and as "deepspeed" the file's other keys, of any JSON
    value. A check whose blocks are not all there is left out.
    """
    return [
        problem
        for names, check in CHECKS
        if all(name in parts for name in names)
        for problem in check(*(parts[name] for name in names))
    ]


def batch_sizes(deepspeed: dict[str, Any], data: int) -> tuple[int, int]:
    """(B, M): samples per microbatch and microbatches per inner step, of one replica's data coordinate.

    As in DeepSpeed, any two of train_batch_size = B·M·D and the others determine the third; M defaults to 1.
    Raises ValueError if they do not fit.
    """
    total = deepspeed.get("train_batch_size")
    micro = deepspeed.get("train_micro_batch_size_per_gpu")
    steps = deepspeed.get("gradient_accumulation_steps")
    wrong = [
        f'"{key}" must be a positive integer (given: {value!r}); "auto" is not resolved here'
        for key, value in zip(deepspeed_keys.BATCH_SIZES, (total, micro, steps), strict=True)
        if not deepspeed_keys.COUNT_OR_NULL.fits(value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
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
    """The JSON for deepspeed.initialize: the file's own keys, and where they are silent what the hand-off needs.

    Features that are not supported, and that the file can therefore only turn off, are left out.
    """
    settings: dict[str, Any] = copy.deepcopy(deepspeed_keys.without_refused(config.deepspeed))
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


def _batch(deepspeed: dict[str, Any], topology: Topology) -> Iterator[str]:
    try:
        batch_sizes(deepspeed, topology.data)
    except ValueError as error:
        yield str(error)


def _model(model: Model, topology: Topology) -> Iterator[str]:
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
    yield from _rope_scaling(model)
    if model.tied_embeddings and topology.stages > 1:
        yield "model.tied_embeddings needs topology.stages = 1: the two uses would live on different stages"


def _rope_scaling(model: Model) -> Iterator[str]:
    scaling = model.rope_scaling
    if scaling is None:
        return
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    extra = {"low_freq_factor": low, "high_freq_factor": high}
    extra["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    wrong = [key for key, value in extra.items() if (value is None) == (scaling.type == "llama3")]
    if wrong:
        verb = "needs" if scaling.type == "llama3" else "has no"
        yield f'model.rope_scaling of type "{scaling.type}" {verb} {", ".join(wrong)}'
    elif low is not None and high is not None and high <= low:
        yield f"model.rope_scaling needs low_freq_factor < high_freq_factor; given {low:g}, {high:g}"


def _sequence(model: Model, topology: Topology) -> Iterator[str]:
    if topology.sequence_parallel and topology.tensor == 1:
        yield "topology.sequence_parallel splits the sequence over the tensor axis; it needs topology.tensor > 1"
    if topology.sequence_parallel and model.seq_length % topology.tensor:
        yield f"model.seq_length = {model.seq_length} is not a multiple of topology.tensor = {topology.tensor}"


def _start(topology: Topology) -> Iterator[str]:
    if topology.start_replicas is not None and topology.start_replicas > topology.replicas:
        yield (
            f"topology.start_replicas = {topology.start_replicas} is more than topology.replicas = {topology.replicas}"
        )


def _inner_phase(noloco: Noloco, topology: Topology) -> Iterator[str]:
    if (noloco.inner_phase == "seconds") != (noloco.inner_phase_seconds is not None):
        yield (
            f'noloco.inner_phase = "{noloco.inner_phase}" and noloco.inner_phase_seconds = '
            f'{noloco.inner_phase_seconds} do not fit: give the seconds with "seconds", and only then'
        )
    coupled = noloco.routing == "random" and topology.stages > 1 and topology.replicas > 1
    if noloco.inner_phase == "seconds" and coupled:
        yield (
            'noloco.inner_phase = "seconds" lets replicas take different numbers of inner steps, but random routes '
            'couple them step by step: set noloco.routing to "fixed", or noloco.inner_phase to "steps"'
        )


def _sites(topology: Topology) -> Iterator[str]:
    if topology.sites is not None:
        listed = sorted(replica for site in topology.sites for replica in site)
        if len(listed) != topology.replicas or listed != list(range(topology.replicas)):
            yield (f"topology.sites must name each replica 0..{topology.replicas - 1} exactly once; it names {listed}")


def _data(data: Data) -> Iterator[str]:
    taken = sum(data.blend.values())
    if taken >= 1:
        yield f"the shares in data.blend add up to {taken:g}, which leaves nothing for data.train; lower them"
    if data.train in data.blend:
        yield f'data.blend names "{data.train}", which is data.train itself'


def _deepspeed(settings: dict[str, Any]) -> Iterator[str]:
    yield from deepspeed_keys.problems(settings)
    stage = object_at(settings, "zero_optimization").get("stage", 1)
    if deepspeed_keys.STAGE.fits(stage) and stage != 1:
        yield (
            f"zero_optimization.stage = {stage}: the outer step lives on ZeRO stage 1's fp32 masters; "
            'set "zero_optimization": {"stage": 1}'
        )
    if "gradient_clipping" not in settings:
        yield (
            'say "gradient_clipping": DeepSpeed clips to 1.0 where the key is absent (1.0 is also the paper\'s value; '
            "0 turns it off)"
        )
    yield from _inner_optimizer(settings)
    if object_at(settings, "bf16").get("enabled") is True:
        for path, value in BF16_SETTINGS.items():
            given = object_at(settings, *path[:-1]).get(path[-1], value)
            if given != value:
                yield f"{'.'.join(path)} must be {value!r} under bf16 (given: {given!r}); leave it out to have it set"


def _inner_optimizer(settings: dict[str, Any]) -> Iterator[str]:
    optimizer, params = object_at(settings, "optimizer"), object_at(settings, "optimizer", "params")
    if "optimizer" not in settings:
        yield 'give the inner optimizer, e.g. "optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}'
        return
    if "type" not in optimizer:
        yield '"optimizer.type" is missing; use "AdamW" or "Adam"'
    name = optimizer.get("type")
    if isinstance(name, str):
        if name.lower() == "adam" and params.get("adam_w_mode", True) is True:
            yield (
                'DeepSpeed runs AdamW under the name "Adam"; write "AdamW", or set optimizer.params.adam_w_mode to '
                "false for Adam with L2 regularisation"
            )
        elif name.lower() == "adamw" and params.get("adam_w_mode", True) is False:
            yield 'optimizer.params.adam_w_mode = false has no effect on "AdamW"; remove it, or write "Adam"'
        elif name.lower() not in ("adam", "adamw"):
            yield f'optimizer.type "{name}" is not supported; use "AdamW" or "Adam"'
    if "lr" not in params:
        yield "optimizer.params.lr is missing"


def _outer(noloco: Noloco, topology: Topology) -> Iterator[str]:
    replicas = topology.replicas
    if noloco.optimizer not in OUTER_OPTIMIZERS:
        yield f'noloco.optimizer "{noloco.optimizer}" is unknown; known: {", ".join(OUTER_OPTIMIZERS)}'
        return
    if noloco.optimizer in WAITS_FOR_EVERYBODY and (topology.start_replicas or replicas) < replicas:
        yield (
            f'noloco.optimizer "{noloco.optimizer}" needs all replicas from the start: leave topology.start_replicas '
            "out"
        )
    used = OUTER_OPTIMIZERS[noloco.optimizer]
    yield from _unused(noloco, used)
    yield from _codec(noloco)
    if "group_size" not in used or replicas == 1:
        return
    if noloco.group_size > replicas:
        yield (
            f"noloco.group_size = {noloco.group_size} is larger than topology.replicas = {replicas}; "
            f"choose at most {replicas}"
        )
        return
    pairing = list(_pairing(noloco, replicas))
    yield from pairing
    if pairing or noloco.allow_unstable:
        return
    if "gamma" in used:
        yield from _stability(noloco, replicas)
    elif noloco.codec == "modulo":
        noise, n = codec_noise(noloco), noloco.group_size
        if spectral_radius(0, 1, n, replicas, pairing=noloco.pairing, noise=noise) >= 1:
            yield (
                f"noloco.codec_range = {noloco.codec_range:g} with {noloco.codec_bits} bits: rounding would drive the "
                "replicas further apart than averaging brings them together; take more bits or a smaller range"
            )


def _pairing(noloco: Noloco, replicas: int) -> Iterator[str]:
    if noloco.pairing != "random" and noloco.group_size != 2:
        yield (
            f'noloco.pairing = "{noloco.pairing}" makes pairs; set noloco.group_size to 2 (given: '
            f'{noloco.group_size}), or noloco.pairing to "random"'
        )
    if noloco.pairing == "tournament" and noloco.codec == "modulo" and not noloco.allow_unstable:
        yield (
            'whether rounding errors grow with noloco.pairing = "tournament" and codec = "modulo" is not known; take '
            '"random" or "hypercube", or set noloco.allow_unstable to study it'
        )
    if noloco.pairing == "hypercube" and replicas.bit_count() != 1:
        yield (
            f'noloco.pairing = "hypercube" needs a power of two as topology.replicas (given: {replicas}); '
            '"tournament" pairs any number'
        )


def outer_step_form(noloco: Noloco) -> dict[str, Any]:
    """What `plan.stability` asks about an outer step beside α, γ, n and N."""
    return {
        "nesterov": noloco.nesterov,
        "combine": noloco.combine,
        "pairing": noloco.pairing,
        "noise": codec_noise(noloco),
    }


def _stability(noloco: Noloco, replicas: int) -> Iterator[str]:
    """γ, and the other end of its way where it follows the learning rate; there 0 is a limit that is hardly reached."""
    alpha, n, form = noloco.outer_momentum, noloco.group_size, outer_step_form(noloco)
    ends = {"gamma": noloco.gamma} | ({"gamma_at_zero_lr": end} if (end := noloco.gamma_at_zero_lr) else {})
    for name, gamma in ends.items():
        radius = spectral_radius(alpha, gamma, n, replicas, **form)
        if radius >= 1:
            _, high = stable_gamma_range(alpha, n, replicas, **form)
            growth = "never shrink" if gamma == 0 else f"grow {math.sqrt(radius):.3f}-fold per outer step"
            yield (
                f"outer_momentum α = {alpha}, {name} γ = {gamma} is unstable for groups of {n} among {replicas} "
                f"replicas{outer_step_words(noloco)}: the replicas' spread would {growth}. With this α, γ must lie in "
                f"(0, {math.floor(high * 1000) / 1000:.3f}); lower α or γ, or set noloco.allow_unstable to study it"
            )


def outer_step_words(noloco: Noloco) -> str:
    """The form of an outer step where it is not the paper's, for a sentence: "" or "(...)"."""
    words = [
        *([f'pairing "{noloco.pairing}"'] if noloco.pairing != "random" else []),
        *(["look-ahead"] if noloco.nesterov else []),
        *([f'combine "{noloco.combine}"'] if noloco.combine != "step" else []),
        *([f"{noloco.codec_bits} bits for a range of {noloco.codec_range:g}"] if noloco.codec == "modulo" else []),
    ]
    return f" ({', '.join(words)})" if words else ""


def _gamma_schedule(noloco: Noloco, deepspeed: dict[str, Any]) -> Iterator[str]:
    if noloco.gamma_at_zero_lr is not None and not object_at(deepspeed, "scheduler"):
        yield "noloco.gamma_at_zero_lr follows the inner learning rate, which is constant: give a scheduler"


def codec_noise(noloco: Noloco) -> float:
    """ν: what the codec's rounding errors add to the replicas' deviations, 0 without one (plan/stability.py)."""
    return rounding_noise(noloco.codec_bits, noloco.codec_range) if noloco.codec == "modulo" else 0.0


def run_problems(noloco: Noloco) -> Iterator[str]:
    """Why a run can't do what a simulation can."""
    if noloco.codec == "absmax":
        yield (
            'noloco.codec "absmax" is only simulated (tools/simulate_convergence.py): the all-reduce of a run adds up '
            'no codes; set it to "none"'
        )


def _codec(noloco: Noloco) -> Iterator[str]:
    codecs = CODECS.get(noloco.optimizer, ("none",))
    if noloco.codec not in codecs:
        known = " or ".join(f'"{name}"' for name in codecs)
        yield f'noloco.codec "{noloco.codec}" is not for noloco.optimizer "{noloco.optimizer}"; set it to {known}'
    used = {"none": (), "modulo": ("codec_bits", "codec_range"), "absmax": ("codec_bits",)}[noloco.codec]
    defaults = {field.name: field.default for field in dataclasses.fields(noloco)}
    for name in ("codec_bits", "codec_range"):
        if name not in used and getattr(noloco, name) != defaults[name]:
            value = getattr(noloco, name)
            yield f'noloco.{name} = {value:g} has no effect on noloco.codec "{noloco.codec}"; leave it out'


def _unused(noloco: Noloco, used: Collection[str]) -> Iterator[str]:
    """Settings of the outer step that were changed for an optimizer that would ignore them."""
    defaults = {field.name: field.default for field in dataclasses.fields(noloco)}
    for name in sorted(frozenset[str]().union(*OUTER_OPTIMIZERS.values()) - frozenset(used)):
        value, default = getattr(noloco, name), defaults[name]
        if value != default:
            yield (
                f'noloco.{name} = {json.dumps(value)} has no effect on noloco.optimizer "{noloco.optimizer}"; leave it '
                f"out, or set it to its default, {json.dumps(default)}"
            )


def _deadlines(noloco: Noloco) -> Iterator[str]:
    if not noloco.heartbeat_seconds < noloco.exchange_deadline_seconds:
        yield (
            "noloco needs heartbeat_seconds < exchange_deadline_seconds, so that a partner is known dead before it is "
            f"waited for in vain; given {noloco.heartbeat_seconds:g}, {noloco.exchange_deadline_seconds:g}"
        )
    if noloco.link_timeout_seconds < 2.5 * noloco.exchange_deadline_seconds:
        yield (
            "noloco needs link_timeout_seconds >= 2.5 · exchange_deadline_seconds, so that a stage outlasts its "
            "neighbour's exchange: one deadline to meet the partner, one for the data, and a rest for evaluations and "
            f"checkpoints; given {noloco.link_timeout_seconds:g}, {noloco.exchange_deadline_seconds:g}"
        )


def _output(run: Run) -> Iterator[str]:
    name = run.name
    if not name or name != name.strip() or "/" in name or "\0" in name or name in (".", "..") or len(name) > 200:
        yield f'run.name "{name}" must be one folder name; put parents into run.directory'
    yield from _path("run.directory", run.directory)
    yield from _path("run.init_from", run.init_from)


def _paths(data: Data) -> Iterator[str]:
    for name in ("train", "valid", "tokenizer", "cache"):
        yield from _path(f"data.{name}", getattr(data, name))
    for prefix in data.blend:
        yield from _path("data.blend", prefix)
    for domain, prefix in data.valid_domains.items():
        yield from _path(f"data.valid_domains.{domain}", prefix)
        if not domain or domain != domain.strip() or "\0" in domain:
            yield f"data.valid_domains names a domain {domain!r}; give it a name without spaces at its ends"


def _path(name: str, path: str | None) -> Iterator[str]:
    if path is not None and (not path.strip() or "\0" in path):
        yield f'"{name}" must be a path (given: {path!r})'


def _consensus(run: Run, noloco: Noloco) -> Iterator[str]:
    if run.final_consensus and noloco.optimizer == "local":
        yield (
            'run.final_consensus averages the replicas, which noloco.optimizer "local" keeps apart; set one of the two '
            "otherwise (tools/merge_replicas.py averages finished weights)"
        )


def _resume(run: Run) -> Iterator[str]:
    request = run.resume
    known = request in ("no", "auto", "newest") or re.fullmatch(r"(step_)?\d+", str(request)) is not None
    if not known:
        yield f'run.resume = {request!r}; give "no", "auto", "newest", a step, or its folder\'s name (step_00000200)'


CHECKS: tuple[tuple[tuple[str, ...], Callable[..., Iterator[str]]], ...] = (
    (("deepspeed", "topology"), _batch),
    (("model", "topology"), _model),
    (("model", "topology"), _sequence),
    (("topology",), _sites),
    (("topology",), _start),
    (("noloco", "topology"), _inner_phase),
    (("deepspeed",), _deepspeed),
    (("noloco", "topology"), _outer),
    (("noloco", "deepspeed"), _gamma_schedule),
    (("noloco",), _deadlines),
    (("run",), _output),
    (("run",), _resume),
    (("run", "noloco"), _consensus),
    (("data",), _paths),
    (("data",), _data),
)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
