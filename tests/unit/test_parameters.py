"""Slices of parameters and their initial values, without processes."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from noloco_mega.engine import weights
from noloco_mega.model import parameters
from noloco_mega.plan import keys

SHAPES = {
    "embedding.word_embeddings.weight": (48, 8),
    "decoder.layers.5.self_attention.linear_qkv.weight": (32, 8),
    "decoder.layers.5.self_attention.linear_qkv.bias": (32,),
    "decoder.layers.5.self_attention.linear_proj.weight": (8, 16),
    "decoder.layers.5.self_attention.linear_proj.bias": (8,),
    "decoder.layers.5.self_attention.q_layernorm.weight": (4,),
    "decoder.layers.5.self_attention.k_layernorm.weight": (4,),
    "decoder.layers.5.mlp.linear_fc1.weight": (48, 8),
    "decoder.layers.5.mlp.linear_fc1.bias": (48,),
    "decoder.layers.5.mlp.linear_fc2.weight": (8, 24),
    "decoder.layers.5.mlp.linear_fc2.bias": (8,),
    "decoder.layers.5.input_layernorm.weight": (8,),
    "decoder.layers.5.pre_mlp_layernorm.weight": (8,),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (48, 8),
}


def megatron_cut(name, whole, tensor, size):
    """The local tensor as megatron-core's layers define it."""
    if "layernorm" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return whole
    if "linear_proj" in name or "linear_fc2" in name:
        return whole.chunk(size, 1)[tensor]
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[tensor] for half in whole.chunk(2)])
    return whole.chunk(size)[tensor]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_slices_are_megatrons_cuts(name, size):
    whole = torch.arange(math.prod(SHAPES[name])).view(SHAPES[name])
    for tensor in range(size):
        cut = megatron_cut(name, whole, tensor, size)
        where = parameters.slices_of(name, tuple(cut.shape), tensor, size)
        assert (where.name, where.shape) == (name, SHAPES[name])
        local = torch.full(cut.shape, -1)
        for piece in where.pieces:
            assert (local[piece.local_index()] == -1).all(), "two pieces overlap"
            local[piece.local_index()] = whole[piece.whole_index()]
        assert torch.equal(local, cut)


@pytest.mark.parametrize("name", SHAPES)
def test_initial_values_do_not_depend_on_the_cut(name, monkeypatch):
    # Blocks of 3 rows of 8: a cut begins inside a block.
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", 30)

    def filled(shape, tensor, size):
        target = torch.full(shape, math.nan)
        parameters.fill(target, parameters.slices_of(name, shape, tensor, size), 3, 0.1, num_layers=8)
        return target

    whole = filled(SHAPES[name], 0, 1)
    assert not whole.isnan().any()
    for size in (2, 4):
        for tensor in range(size):
            cut = megatron_cut(name, whole, tensor, size)
            assert torch.equal(filled(tuple(cut.shape), tensor, size), cut)


def test_initial_values_differ_between_names_seeds_and_rows():
    def filled(name, seed):
        target = torch.empty(256, 512)
        where = parameters.slices_of(name, tuple(target.shape), 0, 1)
        parameters.fill(target, where, seed, 0.5, num_layers=8)
        return target

    first = filled("decoder.layers.5.mlp.linear_fc2.weight", 1)
    assert first.std().item() == pytest.approx(0.5 / math.sqrt(16), rel=0.01)
    assert filled("output_layer.weight", 1).std().item() == pytest.approx(0.5, rel=0.01)
    assert len(torch.unique(first.flatten())) > 0.99 * first.numel()
    for other in (
        filled("decoder.layers.6.mlp.linear_fc2.weight", 1),
        filled("decoder.layers.5.mlp.linear_fc2.weight", 2),
    ):
        correlation = (first * other).mean() / (first.std() * other.std())
        assert abs(correlation) < 4 / math.sqrt(first.numel())


def test_standard_normal_is_box_and_mullers_formula():
    count = 10_001
    words = [int(word) for word in keys.raw(99, count + 1)]
    half = len(words) // 2
    expected = []
    for radius_word, angle_word in zip(words[:half], words[half:], strict=True):
        radius = math.sqrt(-2 * math.log(((radius_word >> 11) + 1) / 2**53))
        angle = 2 * math.pi * (angle_word / 2**64)
        expected.append((radius * math.cos(angle), radius * math.sin(angle)))
    cosines, sines = zip(*expected, strict=True)
    np.testing.assert_allclose(parameters.standard_normal(99, count), (cosines + sines)[:count], atol=1e-13, rtol=0)


def test_standard_normal_is_normal():
    values = np.sort(parameters.standard_normal(5, 200_000))
    moments = [np.mean(values**power) for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.06)
    cumulative = 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in values]))
    distance = np.abs(cumulative - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert distance < 1.63 / math.sqrt(len(values))  # Kolmogorov-Smirnov at 1 %


def test_standard_normal_has_the_same_bits_for_ever():
    digest = hashlib.sha256(parameters.standard_normal(keys.key("golden"), 65_537).tobytes()).hexdigest()
    assert digest == "e6f0f90b6b0ae623c672641d6cec4d1ff1908a2ea3cbe296a5b1459153dd3893"


def test_names_count_layers_over_the_whole_model():
    assert (
        parameters.global_name("decoder.layers.1.mlp.linear_fc1.weight", 6) == "decoder.layers.7.mlp.linear_fc1.weight"
    )
    fused = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert parameters.global_name(fused, 6) == "decoder.layers.6.input_layernorm.weight"
    assert parameters.global_name("output_layer.weight", 6) == "output_layer.weight"
    with pytest.raises(AssertionError, match="no parameter of this model family"):
        parameters.partition_dim("decoder.layers.0.mlp.router.weight")


def test_fingerprint_sees_every_bit_name_and_dtype():
    module = torch.nn.Linear(3, 2)
    first = weights.fingerprint(module)
    assert weights.fingerprint(module) == first
    with torch.no_grad():
        module.weight[1, 2] = torch.nextafter(module.weight[1, 2], torch.tensor(9.0))
    assert weights.fingerprint(module) != first
    assert weights.fingerprint(module.bfloat16()) != weights.fingerprint(module.float())
