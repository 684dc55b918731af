"""The whole model in plain torch, one process, float64: what any cut and any route of it must compute.

Written from the formulas (RMSNorm, RoPE, grouped-query attention, SwiGLU) on unsharded weights with megatron-core's
names and row order; shares no code with the package but the plan's routes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def assemble(parts: list[tuple]) -> Weights:
    """Unsharded tensors from (ParameterSlices, local array) pairs of all ranks; every element must be written."""
    whole: Weights = {}
    for where, local in parts:
        target = whole.setdefault(where.name, torch.full(where.shape, math.nan))
        for piece in where.pieces:
            target[piece.whole_index()] = torch.from_numpy(local[piece.local_index()])
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return whole


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotate(x: Tensor, base: float, factor: float) -> Tensor:
    """RoPE on [B, heads, S, D]: the pair (x_i, x_{i + D/2}) at position p turns by p·base^(−2i/D) / factor."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=x.dtype) / half) / factor
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def attention(x: Tensor, of, model) -> Tensor:
    """x [B, S, H]. Rows of linear_qkv come query group by query group: its query heads, its key, its value."""
    batch, length, _ = x.shape
    heads, groups = model.num_attention_heads, model.num_query_groups
    width = of("self_attention.linear_proj.weight").shape[1] // heads
    factor = model.rope_scaling.factor if model.rope_scaling else 1.0
    mixed = linear(x, of, "self_attention.linear_qkv").view(batch, length, groups, heads // groups + 2, width)
    mixed = mixed.permute(0, 2, 3, 1, 4)
    query, key = mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2]
    if model.qk_norm:
        query = norm(query, of("self_attention.q_layernorm.weight"), model.norm_epsilon)
        key = norm(key, of("self_attention.k_layernorm.weight"), model.norm_epsilon)
    query = rotate(query, model.rotary_base, factor)
    key = rotate(key, model.rotary_base, factor).repeat_interleave(heads // groups, 1)
    value = mixed[:, :, -1].repeat_interleave(heads // groups, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return linear((probabilities @ value).transpose(1, 2).reshape(batch, length, -1), of, "self_attention.linear_proj")


def linear(x: Tensor, of, name: str) -> Tensor:
    y = x @ of(f"{name}.weight").T
    bias = of(f"{name}.bias")
    return y if bias is None else y + bias


def layer(x: Tensor, weights: Weights, number: int, model) -> Tensor:
    def of(name: str) -> Tensor | None:
        return weights.get(f"decoder.layers.{number}.{name}")

    x = x + attention(norm(x, of("input_layernorm.weight"), model.norm_epsilon), of, model)
    normed = norm(x, of("pre_mlp_layernorm.weight"), model.norm_epsilon)
    gate, up = linear(normed, of, "mlp.linear_fc1").chunk(2, -1)
    return x + linear(gate * gate.sigmoid() * up, of, "mlp.linear_fc2")


def loss_of(x: Tensor, weights: Weights, batch, model) -> Tensor:
    head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    logits = norm(x, weights["decoder.final_layernorm.weight"], model.norm_epsilon) @ head.T
    loss = logits.logsumexp(-1) - logits.gather(-1, batch.labels[..., None])[..., 0]
    return (loss * batch.loss_mask).sum() / batch.loss_mask.sum()


@dataclass
class Result:
    """`losses[replica]`: of the microbatches that ended on its last stage, in order; `gradients[replica][name]`."""

    losses: list[list[float]]
    gradients: list[Weights]


def run(replicas: list[Weights], model, stages: int, routes, step: int, numbers: list[int], read) -> Result:
    """One inner step of one data coordinate: `numbers` are its replica-wide microbatches, read(step, number, replica)
    a sample. The weights of all replicas are used where the routes lead to them; the loss is the mean over `numbers`.
    """
    leaves = [{name: w.double().requires_grad_() for name, w in weights.items()} for weights in replicas]
    per_stage = model.num_layers // stages
    losses: list[list[float]] = [[] for _ in replicas]
    for number in numbers:
        for origin in range(len(replicas)):
            replica, batch = origin, read(step, number, origin)
            x = leaves[replica]["embedding.word_embeddings.weight"][batch.tokens]
            for stage in range(stages):
                for i in range(stage * per_stage, (stage + 1) * per_stage):
                    x = layer(x, leaves[replica], i, model)
                if stage < stages - 1:
                    replica = routes.forward(step, number, stage, replica)
            loss = loss_of(x, leaves[replica], batch, model)
            (loss / len(numbers)).backward()
            losses[replica].append(loss.item())
    return Result(losses, [{name: leaf.grad for name, leaf in weights.items()} for weights in leaves])
