"""Which Hugging Face name and field is which of ours? One table of tensors and one of fields, read in both directions.

Letters: H hidden size, n query heads, g key/value heads, d width of a head, F width of the SwiGLU block, V vocabulary.

megatron-core keeps the rows of queries, keys and values in one matrix, query group by query group: the n/g query heads
of a group, its key, its value. Hugging Face keeps three matrices. Both rotate the pair (i, i + d/2), so that no row
moves inside a head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from noloco_mega import config


class ConversionError(ValueError):
    """Something that can't be converted without changing what the model computes; the message names it."""


class Layout(Enum):
    """How one of our tensors is put together from theirs."""

    SAME = "the same tensor"
    GROUPS = "rows of query, key and value, query group by query group"
    STACKED = "one above the other"


class Row(NamedTuple):
    """One line of the table: one tensor of ours, and those of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = Layout.SAME


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

# Behind decoder.layers.N. and model.layers.N.; the names that a model has depend on its biases and norms.
LAYER_TABLE = (
    Row("input_layernorm.weight", ("input_layernorm.weight",)),
    Row("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in QKV), Layout.GROUPS),
    Row("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in QKV), Layout.GROUPS),
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Row("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    Row("mlp.linear_fc1.weight", tuple(f"{name}.weight" for name in GATE_UP), Layout.STACKED),
    Row("mlp.linear_fc1.bias", tuple(f"{name}.bias" for name in GATE_UP), Layout.STACKED),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    Row("mlp.linear_fc2.bias", ("mlp.down_proj.bias",)),
)
EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
FINAL_NORM = Row("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Row("output_layer.weight", ("lm_head.weight",))

# config.Model's field -> config.json's.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "seq_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
}


@dataclass(frozen=True)
class Architecture:
    """What a model type of transformers fixes, and what its config.json leaves open."""

    model_type: str
    class_name: str
    qk_norm: bool = False
    attention_bias: Mapping[bool, str] | str = "none"
    """Our attention_bias by the value of their field `attention_bias`, or the one value of a model without it."""
    mlp_bias_field: bool = False


EITHER = {False: "none", True: "all"}
ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("llama", "LlamaForCausalLM", attention_bias=EITHER, mlp_bias_field=True),
        Architecture("mistral", "MistralForCausalLM"),
        Architecture("qwen2", "Qwen2ForCausalLM", attention_bias="qkv"),
        Architecture("qwen3", "Qwen3ForCausalLM", qk_norm=True, attention_bias=EITHER),
    )
}

# Fields of config.json that are read below or checked to change nothing.
READ = {
    *FIELDS.values(), "model_type", "architectures", "tie_word_embeddings", "hidden_act", "attention_dropout",
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types",
}  # fmt: skip
# Fields that have no part in what the weights compute.
WITHOUT_EFFECT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "use_cache", "transformers_version",
    "_name_or_path", "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """What a config.json says."""

    model: config.Model
    """With tied_embeddings false: an imported model is untied."""
    architecture: Architecture
    tied: bool


def head_width(model: config.Model) -> int:
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def groups(model: config.Model) -> int:
    return model.num_query_groups or model.num_attention_heads


def table(model: config.Model) -> Iterator[Row]:
    """Every tensor of a model, ours and theirs, in the order of the layers."""
    yield EMBEDDING
    for layer in range(model.num_layers):
        for row in LAYER_TABLE:
            if _has(model, row.ours):
                theirs = tuple(f"model.layers.{layer}.{name}" for name in row.theirs)
                yield Row(f"decoder.layers.{layer}.{row.ours}", theirs, row.layout)
    yield FINAL_NORM
    if not model.tied_embeddings:
        yield OUTPUT


def _has(model: config.Model, name: str) -> bool:
    if name.endswith("linear_qkv.bias"):
        return model.attention_bias != "none"
    if name.endswith("linear_proj.bias"):
        return model.attention_bias == "all"
    if name.startswith("mlp.") and name.endswith(".bias"):
        return model.mlp_bias
    return model.qk_norm or not name.endswith(("q_layernorm.weight", "k_layernorm.weight"))


def shapes(row: Row, model: config.Model) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The shape of our tensor of a row, and those of theirs."""
    hidden, width, ffn = model.hidden_size, head_width(model), model.ffn_hidden_size
    queries, keys = model.num_attention_heads * width, groups(model) * width
    suffix = row.ours.rsplit(".", 2)[-2]
    if row.layout is Layout.SAME:
        columns = {"linear_proj": queries, "linear_fc2": ffn}
        vectors = {"q_layernorm": width, "k_layernorm": width}
        if suffix in columns and row.ours.endswith(".weight"):
            shape: tuple[int, ...] = (hidden, columns[suffix])
        elif suffix in ("word_embeddings", "output_layer"):
            shape = (model.vocab_size, hidden)
        else:
            shape = (vectors.get(suffix, hidden),)
        return shape, [shape]
    rows = [queries, keys, keys] if row.layout is Layout.GROUPS else [ffn, ffn]
    rest = (hidden,) if row.ours.endswith(".weight") else ()
    return (sum(rows), *rest), [(count, *rest) for count in rows]


def join(row: Row, parts: Sequence[torch.Tensor], model: config.Model) -> torch.Tensor:
    """Our tensor of a row from theirs."""
    if row.layout is Layout.SAME:
        return parts[0]
    if row.layout is Layout.STACKED:
        return torch.cat(list(parts))
    return torch.cat([part.unflatten(0, (groups(model), -1)) for part in parts], 1).flatten(0, 1)


def split(row: Row, whole: torch.Tensor, model: config.Model) -> list[torch.Tensor]:
    """Their tensors of a row from ours."""
    if row.layout is Layout.SAME:
        return [whole]
    if row.layout is Layout.STACKED:
        return list(whole.chunk(2))
    width = head_width(model)
    per_group = model.num_attention_heads // groups(model) * width
    by_group = whole.unflatten(0, (groups(model), -1))
    return [part.flatten(0, 1) for part in by_group.split([per_group, width, width], 1)]


def fitting(model: config.Model, wanted: str | None = None) -> Architecture:
    """The architecture that computes what this model does: `wanted`, or else the first of the list.

    Raises ConversionError naming what an architecture lacks.
    """
    if wanted is not None and wanted not in ARCHITECTURES:
        raise ConversionError(f'architecture "{wanted}" is not supported; known: {", ".join(ARCHITECTURES)}')
    reasons = {}
    for architecture in [ARCHITECTURES[wanted]] if wanted else ARCHITECTURES.values():
        lacking = _lacking(architecture, model)
        if not lacking:
            return architecture
        reasons[architecture.model_type] = lacking
    listed = "; ".join(f"{name}: {', '.join(lacking)}" for name, lacking in reasons.items())
    raise ConversionError(f"no architecture of transformers computes what this model does ({listed})")


def _lacking(architecture: Architecture, model: config.Model) -> list[str]:
    bias = architecture.attention_bias
    found = []
    if model.attention_bias not in ({bias} if isinstance(bias, str) else set(bias.values())):
        found.append(f'has no model.attention_bias = "{model.attention_bias}"')
    if model.mlp_bias and not architecture.mlp_bias_field:
        found.append("has no model.mlp_bias")
    if model.qk_norm != architecture.qk_norm:
        found.append(f"has {'always' if architecture.qk_norm else 'no'} model.qk_norm")
    return found


def config_json(model: config.Model, architecture: Architecture, *, tied: bool, dtype: str) -> dict[str, Any]:
    """The config.json of an exported model, which both transformers 4 and 5 read as the same model.

    rope_theta and rope_scaling are what version 4 reads, where it would take 10,000 in silence; 5 reads them too.
    """
    fields: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **{theirs: getattr(model, ours) for ours, theirs in FIELDS.items()},
        "num_key_value_heads": groups(model),
        "head_dim": head_width(model),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": model.rotary_base,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        fields["rope_scaling"] = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type == "llama3":
            fields["rope_scaling"] |= {key: getattr(scaling, key) for key in LLAMA3_KEYS}
    if not isinstance(architecture.attention_bias, str):
        fields["attention_bias"] = model.attention_bias == "all"
    if architecture.mlp_bias_field:
        fields["mlp_bias"] = model.mlp_bias
    if architecture.model_type != "llama":
        fields["sliding_window"] = None
    if architecture.model_type.startswith("qwen"):
        fields["use_sliding_window"] = False
    return fields


LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(folder: Path) -> Imported:
    """The model that FOLDER/config.json describes; fields that it leaves out are what transformers takes for them.

    Raises ConversionError naming an architecture, a field or a value that this package's models don't have.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ConversionError(f"cannot read {path}: {error.strerror}; give a folder of a Hugging Face model") from error
    except json.JSONDecodeError as error:
        raise ConversionError(f"{path} is not valid JSON: {error}") from error
    architecture = ARCHITECTURES.get(raw.get("model_type"))
    if architecture is None or raw.get("architectures", [architecture.class_name]) != [architecture.class_name]:
        named = ", ".join(raw.get("architectures") or []) or f"model_type {raw.get('model_type')}"
        supported = ", ".join(known.class_name for known in ARCHITECTURES.values())
        raise ConversionError(f"{path}: {named} is not supported; supported are {supported}")
    full = _with_defaults(folder)
    _refuse_fields(path, raw, full, architecture)
    values = {ours: full[theirs] for ours, theirs in FIELDS.items() if full.get(theirs) is not None}
    # Some model types have no field for it, and then it is said here what follows from the others.
    values.setdefault("kv_channels", full["hidden_size"] // full["num_attention_heads"])
    values["attention_bias"] = (
        architecture.attention_bias
        if isinstance(architecture.attention_bias, str)
        else architecture.attention_bias[bool(full["attention_bias"])]
    )
    values["mlp_bias"] = architecture.mlp_bias_field and full["mlp_bias"]
    values["qk_norm"] = architecture.qk_norm
    values |= _rotary(path, dict(full.get("rope_parameters") or {}))
    try:
        model = TypeAdapter(config.Model).validate_json(json.dumps(values))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConversionError(f"{path}: {problems}") from error
    return Imported(model, architecture, bool(full["tie_word_embeddings"]))


def _with_defaults(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig  # seconds to import, and only needed here

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConversionError(f"transformers can't read {folder / 'config.json'}: {error}") from error


def _refuse_fields(path: Path, raw: Mapping[str, Any], full: Mapping[str, Any], architecture: Architecture) -> None:
    known = READ | WITHOUT_EFFECT
    if not isinstance(architecture.attention_bias, str):
        known |= {"attention_bias"}
    if architecture.mlp_bias_field:
        known |= {"mlp_bias"}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConversionError(
            f"{path}: {', '.join(unknown)} may change what the model computes, and is not supported here; remove it "
            "from config.json if it does not"
        )
    if full["hidden_act"] != "silu":
        raise ConversionError(f"{path}: hidden_act = {full['hidden_act']} is not supported; only silu is")
    if full.get("attention_dropout"):
        raise ConversionError(f"{path}: attention_dropout = {full['attention_dropout']}; models here have no dropout")
    window = full.get("sliding_window")
    sliding = {kind for kind in full.get("layer_types") or [] if kind != "full_attention"}
    if sliding or (not full.get("layer_types") and window and window < full["max_position_embeddings"]):
        raise ConversionError(
            f"{path}: sliding_window = {window} is not supported: it hides tokens within max_position_embeddings = "
            f"{full['max_position_embeddings']}. Import it for shorter samples by setting both to the same length"
        )


def _rotary(path: Path, rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    values: dict[str, Any] = {"rotary_base": float(rope.pop("rope_theta", 10_000.0))}
    keys = {"default": (), "linear": ("factor",), "llama3": ("factor", *LLAMA3_KEYS)}.get(kind)
    if keys is None:
        raise ConversionError(f"{path}: rope type {kind} is not supported; default, linear and llama3 are")
    unknown, missing = sorted(set(rope) - set(keys)), [key for key in keys if rope.get(key) is None]
    if unknown or missing:
        trouble = f"has the unknown field {unknown[0]}" if unknown else f"lacks {missing[0]}"
        raise ConversionError(f"{path}: rope scaling of type {kind} {trouble}")
    if kind != "default":
        values["rope_scaling"] = {"type": kind, **rope}
    return values
