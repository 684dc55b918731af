"""How do the weights of N replicas lie in one process? One row per replica, each row a whole model's parameters.

Letters: N replicas, P parameters of the model, V vocabulary, H hidden size, F FFN width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noloco_mega import config
from noloco_mega.model import parameters


def shapes(model: config.Model) -> dict[str, tuple[int, ...]]:
    """Global name and unsharded shape of every parameter, in the order of the model: what a run with T = S = 1 holds.

    Raises ValueError for what the simulator's model does not have.
    """
    unsupported = {
        "attention_bias": model.attention_bias != "none",
        "mlp_bias": model.mlp_bias,
        "qk_norm": model.qk_norm,
        "tied_embeddings": model.tied_embeddings,
    }
    if any(unsupported.values()):
        named = ", ".join(f"model.{name}" for name, is_set in unsupported.items() if is_set)
        raise ValueError(f"the simulator's model does not have {named}; leave it out to simulate")
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or model.num_attention_heads
    hidden, queries = model.hidden_size, model.num_attention_heads * width
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (model.vocab_size, hidden)}
    for number in range(model.num_layers):
        layer = f"decoder.layers.{number}."
        found |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attention.linear_proj.weight": (hidden, queries),
            layer + "self_attention.linear_qkv.weight": (queries + 2 * groups * width, hidden),
            layer + "pre_mlp_layernorm.weight": (hidden,),
            layer + "mlp.linear_fc1.weight": (2 * model.ffn_hidden_size, hidden),
            layer + "mlp.linear_fc2.weight": (hidden, model.ffn_hidden_size),
        }
    return found | {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": (model.vocab_size, hidden)}


def parameter_count(model: config.Model) -> int:
    """P."""
    return sum(math.prod(shape) for shape in shapes(model).values())


def views(flat: Tensor, model: config.Model) -> dict[str, Tensor]:
    """The parameters in `flat` [N, P] by global name: [N, *shape] each, in the same memory."""
    found, first = {}, 0
    for name, shape in shapes(model).items():
        size = math.prod(shape)
        found[name] = flat[:, first : first + size].view(len(flat), *shape)
        first += size
    assert first == flat.shape[1], f"{flat.shape[1]} values for a model of {first} parameters"
    return found


def initial(settings: config.Config) -> Tensor:
    """θ0 of one replica, fp32 [1, P]: the values that `model.parameters.initialise` gives every run with this seed."""
    model = settings.model
    flat = torch.empty(1, parameter_count(model))
    for name, weight in views(flat, model).items():
        where = parameters.slices_of(name, tuple(weight.shape[1:]), 0, 1)
        parameters.fill(weight[0], where, settings.run.seed, model.init_method_std, model.num_layers)
    return flat
