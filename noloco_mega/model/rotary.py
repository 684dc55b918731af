"""At which frequencies do heads rotate? RoPE's inverse frequencies with the scalings for longer contexts.

Letters: D width of a head, θ rotary base. Frequencies are in radians per token.
"""

from __future__ import annotations

import math

import torch

from noloco_mega import config


def inverse_frequencies(model: config.Model) -> torch.Tensor:
    """fp32 [D/2]: θ^(−2i/D), as `model.rope_scaling` changes them.

    "linear" divides all of them by the factor f (positions interpolated, Chen et al., arXiv 2306.15595, eq. 4).
    "llama3" (the Llama 3.1 release) looks at how often a wave turns in the original context, r = L·frequency / 2π:
    r below low_freq_factor divides it by f, r above high_freq_factor keeps it, and in between the weight
    s = (r − low) / (high − low) passes from one to the other: (s + (1 − s) / f)·frequency.
    """
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    frequency = 1.0 / (model.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    scaling = model.rope_scaling
    if scaling is None:
        return frequency
    if scaling.type == "linear":
        return frequency / scaling.factor
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    turns = length * frequency / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (keep + (1 - keep) / scaling.factor) * frequency
