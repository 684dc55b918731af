"""What do N replicas' models compute, all at once? The stage's layers as plain torch, replicas as a batch dimension.

The same layers as model/stage.py builds from megatron-core: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases
and no dropout. Every product is one batched matrix product over the replicas.

Letters: N replicas, B samples of a microbatch, S tokens of a sample, H hidden size, Q query heads, G key/value heads,
D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from noloco_mega import config
from noloco_mega.data.loader import Batch
from noloco_mega.lab import stacked
from noloco_mega.model import rotary

Weights = Mapping[str, Tensor]
"""Global name to [N, *shape], as `stacked.views` gives them."""


class StackedModel:
    """The forward pass of N replicas; N is that of the weights it is given."""

    def __init__(self, model: config.Model, stages: int, device: torch.device) -> None:
        """Raises ValueError for model settings that are not simulated."""
        stacked.shapes(model)
        self._model, self._per_stage = model, model.num_layers // stages
        positions = torch.arange(model.seq_length, dtype=torch.float32)
        angle = torch.outer(positions, rotary.inverse_frequencies(model)).to(device)
        self._cos, self._sin = angle.cos(), angle.sin()

    def losses(
        self, weights: Weights, tokens: Tensor, labels: Tensor, mask: Tensor, sources: Sequence[Tensor] = ()
    ) -> Tensor:
        """Mean loss per token of one microbatch on each replica's last stage: nats, [N].

        tokens [N, B, S] are what each replica's first stage reads, labels and mask [N, B, S] what its last stage
        compares with. `sources[s]` (int64 [N]) says from which replica's stage s each replica's stage s + 1 takes its
        input; without it every microbatch stays where it is.
        """
        replicas, batch, length = tokens.shape
        embedding = weights["embedding.word_embeddings.weight"]
        offsets = torch.arange(replicas, device=tokens.device)[:, None, None] * self._model.vocab_size
        x = F.embedding(tokens + offsets, embedding.reshape(-1, self._model.hidden_size))
        x = x.reshape(replicas, batch * length, self._model.hidden_size)
        for number in range(self._model.num_layers):
            stage, rest = divmod(number, self._per_stage)
            if sources and stage > 0 and rest == 0:
                x = x.index_select(0, sources[stage - 1])
            x = self._layer(x, weights, f"decoder.layers.{number}.", batch)
        x = self._norm(x, weights["decoder.final_layernorm.weight"])
        logits = _linear(x, weights["output_layer.weight"])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
        return (loss * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)

    def _layer(self, x: Tensor, weights: Weights, layer: str, batch: int) -> Tensor:
        """x [N, B·S, H]"""
        x = x + self._attention(self._norm(x, weights[layer + "input_layernorm.weight"]), weights, layer, batch)
        normed = self._norm(x, weights[layer + "pre_mlp_layernorm.weight"])
        gate, up = _linear(normed, weights[layer + "mlp.linear_fc1.weight"]).chunk(2, -1)
        return x + _linear(F.silu(gate) * up, weights[layer + "mlp.linear_fc2.weight"])

    def _attention(self, x: Tensor, weights: Weights, layer: str, batch: int) -> Tensor:
        """Rows of linear_qkv come key/value head by key/value head: its query heads, its key, its value."""
        model, (replicas, positions, _) = self._model, x.shape
        heads = model.num_attention_heads
        groups = model.num_query_groups or heads
        width = model.kv_channels or model.hidden_size // heads
        mixed = _linear(x, weights[layer + "self_attention.linear_qkv.weight"])
        mixed = mixed.view(replicas * batch, positions // batch, groups, heads // groups + 2, width)
        query, key, value = mixed.split((heads // groups, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))  # [N·B, Q or G, S, D]
        context = F.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=heads != groups
        )
        context = context.transpose(1, 2).reshape(replicas, positions, heads * width)
        return _linear(context, weights[layer + "self_attention.linear_proj.weight"])

    def _rotated(self, x: Tensor) -> Tensor:
        """RoPE on [..., S, D]: the pair (x_i, x_{i + D/2}) turns by its position's angle."""
        low, high = x.chunk(2, -1)
        cos, sin = self._cos[: x.shape[-2]], self._sin[: x.shape[-2]]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, B·S, H], weight [N, H]"""
        return F.rms_norm(x, (x.shape[-1],), None, self._model.norm_epsilon) * weight[:, None]


def joined(batches: Sequence[Batch], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, labels and loss mask of one microbatch per replica, [N, B, S] each."""
    tokens, labels, mask = (torch.stack(parts).to(device) for parts in zip(*batches, strict=True))
    return tokens, labels, mask


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, positions, in], weight [N, out, in] -> [N, positions, out]"""
    return torch.bmm(x, weight.transpose(1, 2))
