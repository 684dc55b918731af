"""Core attention against megatron-core's unfused one: outputs and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from noloco_mega import mcore_compat
from noloco_mega.model.attention import SdpaCoreAttention

LENGTH, BATCH, WIDTH = 21, 3, 8


def both(heads, groups, scale):
    mcore_compat.prepare()
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=heads * WIDTH,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    arguments = {
        "config": settings,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "softmax_scale": scale,
        "pg_collection": SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    }
    return SdpaCoreAttention(**arguments), DotProductAttention(**arguments)


@pytest.fixture
def memory_buffer():
    from megatron.core import parallel_state

    parallel_state._set_global_memory_buffer()
    yield
    parallel_state.destroy_global_memory_buffer()


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", ["causal", "given"])
def test_equals_unfused_attention(memory_buffer, heads, groups, scale, mask):
    torch.manual_seed(0)
    ours, theirs = both(heads, groups, scale)
    hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    if mask == "given":
        hidden = hidden | (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.3) & ~torch.eye(LENGTH, dtype=torch.bool)
    inputs = [torch.randn(LENGTH, BATCH, count, WIDTH) for count in (heads, groups, groups)]
    weight = torch.randn(LENGTH, BATCH, heads * WIDTH)
    results = []
    for module, given in ((ours, None if mask == "causal" else hidden), (theirs, hidden)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        context = module(*leaves, given)
        (context * weight).sum().backward()
        results.append([context, *(leaf.grad for leaf in leaves)])
    for mine, other in zip(*results, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
