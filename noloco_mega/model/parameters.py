"""Which part of which weight is this tensor, and what is its value at step 0?

Every parameter has a *global name* (its local name with the layer counted over the whole model, e.g.
``decoder.layers.7.mlp.linear_fc1.weight``) and an unsharded shape: the tensor that a run with T = S = 1 would hold.
`parameter_slices` says where a rank's tensor sits in it; `initialise` draws it from (seed, global name) alone, so that
θ at step 0 is the same for every replica and any T, S and D.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.plan import keys

Ranges = tuple[tuple[int, int], ...]
"""A box in a tensor: (start, stop) per dim."""

# The dim that megatron-core cuts over the tensor axis, by the end of a parameter's name; None: every rank holds it all.
PARTITION_DIMS: dict[str, int | None] = {
    "embedding.word_embeddings.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "self_attention.linear_proj.bias": None,
    "self_attention.q_layernorm.weight": None,
    "self_attention.k_layernorm.weight": None,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc1.bias": 0,
    "mlp.linear_fc2.weight": 1,
    "mlp.linear_fc2.bias": None,
    "output_layer.weight": 0,
    "input_layernorm.weight": None,
    "pre_mlp_layernorm.weight": None,
    "decoder.final_layernorm.weight": None,
}

# Transformer Engine fuses a norm with the projection behind it; the global names are those of the unfused layers.
FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

# Elements drawn at once: 64 Ki float64 words and their intermediates stay in a core's cache. Part of θ0's definition.
BLOCK_ELEMENTS = 1 << 16


class Piece(NamedTuple):
    """One box of a local tensor and the box of the unsharded tensor that it equals (same extent)."""

    local: Ranges
    whole: Ranges

    def local_index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.local)

    def whole_index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.whole)


@dataclass(frozen=True)
class ParameterSlices:
    """Where one local parameter sits in the whole model."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    """Unsharded shape."""
    pieces: tuple[Piece, ...]
    """Disjoint boxes that cover the local tensor: one, or two for the halves of SwiGLU's first projection, which are
    sharded separately (locally [gate_t; up_t], whole [gate; up])."""


def global_name(local_name: str, first_layer: int) -> str:
    """The name over the whole model of a stage's parameter, given the stage's first layer (counted from 0)."""
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda match: str(int(match[0]) + first_layer), local_name)
    for fused, plain in FUSED_NAMES.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    return name


def partition_dim(name: str) -> int | None:
    """The dim of a parameter (by its global name) that is cut over the tensor axis, None for a replicated one."""
    for suffix, dim in PARTITION_DIMS.items():
        if name.endswith(suffix):
            return dim
    raise AssertionError(f"{name} is no parameter of this model family")


def parameter_slices(model: GPTModel, world: ReplicaWorld) -> dict[str, ParameterSlices]:
    """Where each parameter of a stage sits in the whole model, by its local name (as in `named_parameters`)."""
    first_layer = model.decoder.layers[0].layer_number - 1
    tensor, size = world.place.tensor, world.grid.tensor
    found = {}
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, first_layer)
        found[local_name] = slices_of(name, tuple(parameter.shape), tensor, size)
    return found


def slices_of(name: str, local_shape: tuple[int, ...], tensor: int, size: int) -> ParameterSlices:
    """The slices that tensor coordinate `tensor` of `size` holds of a parameter of this global name and local shape."""
    dim = partition_dim(name)
    if dim is None:
        box = tuple((0, extent) for extent in local_shape)
        return ParameterSlices(name, local_shape, (Piece(box, box),))
    shape = tuple(extent * size if d == dim else extent for d, extent in enumerate(local_shape))
    parts = 2 if ".mlp.linear_fc1." in name else 1
    local_extent, whole_extent = local_shape[dim] // parts, shape[dim] // parts

    def box_at(start: int) -> Ranges:
        return tuple((start, start + local_extent) if d == dim else (0, e) for d, e in enumerate(local_shape))

    pieces = tuple(
        Piece(box_at(part * local_extent), box_at(part * whole_extent + tensor * local_extent)) for part in range(parts)
    )
    return ParameterSlices(name, shape, pieces)


def initialise(model: GPTModel, world: ReplicaWorld, seed: int, std: float) -> None:
    """Write θ0 into a stage's parameters: a pure function of (seed, std, the model's shape).

    Norm weights are 1 and biases 0; all others normal with standard deviation `std`, the two output projections of
    each layer with std / sqrt(2·num_layers).
    """
    slices = parameter_slices(model, world)
    for local_name, parameter in model.named_parameters():
        fill(parameter, slices[local_name], seed, std, model.config.num_layers)


@torch.no_grad()
def fill(target: torch.Tensor, where: ParameterSlices, seed: int, std: float, num_layers: int) -> None:
    """Write a parameter's part of θ0 into `target`; never holds more than one block of the unsharded tensor."""
    if where.name.endswith((".bias", "layernorm.weight")):
        target.fill_(0.0 if where.name.endswith(".bias") else 1.0)
        return
    output = where.name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"))
    scale = std / math.sqrt(2 * num_layers) if output else std
    for piece in where.pieces:
        box = target[piece.local_index()]
        rows, columns = piece.whole
        for first, values in _row_blocks(seed, where.name, where.shape, rows):
            part = torch.from_numpy((values[:, slice(*columns)] * scale).astype(np.float32))
            box[first - rows[0] : first - rows[0] + len(part)].copy_(part)


def _row_blocks(
    seed: int, name: str, shape: tuple[int, ...], rows: tuple[int, int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Standard normal rows [start, stop) of an unsharded matrix [R, C]: (first row, float64 [r, C]) block by block."""
    height = max(1, BLOCK_ELEMENTS // shape[1])
    start, stop = rows
    for block in range(start // height, -(-stop // height)):
        first = block * height
        last = min(first + height, shape[0])
        values = standard_normal(keys.key(seed, "theta0", name, block), (last - first) * shape[1])
        low, high = max(first, start), min(last, stop)
        yield low, values.reshape(last - first, shape[1])[low - first : high - first]


def standard_normal(key: int, count: int) -> np.ndarray:
    """`count` standard normal numbers of a stream, float64, the same bits on every machine and NumPy release.

    Box and Muller (1958): sqrt(-2·ln u)·(cos 2πv, sin 2πv). ln, sin and cos are evaluated here with IEEE operations
    only (+ − · / and sqrt are exactly rounded everywhere, a math library's functions are not), because replicas on
    different machines must start from bitwise equal weights. |values| < 8.6.
    """
    pairs = -(-count // 2)
    words = keys.raw(key, 2 * pairs)
    u = ((words[:pairs] >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
    quadrant = words[pairs:] >> np.uint64(62)
    part = ((words[pairs:] << np.uint64(2)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * _log(u))
    sine, cosine = _sine_of_quarter(part), _sine_of_quarter(1.0 - part)
    swap = (quadrant & np.uint64(1)).astype(bool)
    first = np.where(swap, sine, cosine) * np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    second = np.where(swap, cosine, sine) * np.where(quadrant >= 2, -1.0, 1.0)
    return np.concatenate((radius * first, radius * second))[:count]


def _log(x: np.ndarray) -> np.ndarray:
    """ln x for x in (0, 1], as exponent·ln 2 + 2·artanh((m − 1)/(m + 1)) with m in [sqrt ½, sqrt 2); error < 1e-14."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(low, 2 * mantissa, mantissa), exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1 / 19)
    for odd in range(17, 0, -2):
        series = series * square + 1 / odd
    return exponent * 0.6931471805599453 + 2.0 * s * series


def _sine_of_quarter(part: np.ndarray) -> np.ndarray:
    """sin(part·π/2) for part in [0, 1] by its Taylor series up to the 23rd power; error < 1e-15."""
    x = part * 1.5707963267948966
    square = x * x
    series = np.ones_like(x)
    for power in range(22, 0, -2):
        series = 1.0 - series * square / (power * (power + 1))
    return x * series
