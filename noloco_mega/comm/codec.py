"""How does a tensor go to someone who has nearly the same one, in a few bits per weight? A modulo code on a lattice.

The sender has x, the receiver its own y; both know the step s and a dither u, uniform in (−½, ½). With M = 2^bits

    q = round(x/s + u)                           only code = q mod M travels
    x̂ = (q − u)·s                                what the code means; x̂ − x is uniform in ±s/2 and independent of x
    q' = code + M·round((y/s + u − code)/M)      what the receiver takes for q: the point of this code nearest to y

x̂ is x without bias, with the variance s²/12 (Schuchman's theorem on subtractive dither; ours has 256 values, which
leaves a bias of s/512 at most). q' = q as long as |x̂ − y| < M·s/2, the *range*. Beyond it the code has *wrapped*: what
is read is M·s off, and yet no further from y than the range. This is the code of Moniqua (arXiv 2002.11787) with dither
that is subtracted again.

BLOCK weights share a head of 16 bits: the number of their step, and Σ n·(q div M) mod 257 over the block, n = 1 to 128.
One weight that has wrapped makes the receiver's own sum differ by +n or −n, which are all different: so it is found and
mended. When what is found can't be true (MENDED_FROM), more of them have wrapped and the block is unreadable. Of such
blocks 1 in 257 goes unnoticed. It must not be many: a weight that is read on the wrong side is pushed away from its
partner's, and soon further than any range.

Shapes: x, y, x̂ fp32 [E]; B = E/BLOCK blocks, rounded up; heads int16 [B]; dither fp32 [B·BLOCK]; packed codes uint8
[B·BLOCK·bits/8]. Zeros fill the last block. Everything is elementwise or per block, on any device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from noloco_mega.costs import CODE_BLOCK as BLOCK
from noloco_mega.plan import keys

STEPS_PER_OCTAVE = 4
LOWEST_OCTAVE = -26
NOT_FINITE = 127
"""Number of the step of a block that holds an infinity or a NaN; it is read as NaN."""
FINEST = 2.0**-16
"""No step is finer than this part of its block's largest |x|: x/s + u is then within 2^-8 of exact in fp32."""
STEPS = [2.0 ** (LOWEST_OCTAVE + number / STEPS_PER_OCTAVE) for number in range(NOT_FINITE)]
"""The steps by number, from 1.5e-8 to 45."""
MODULUS = 257
MENDED_FROM = 1 / 2
"""Of the range: a weight that is said to have wrapped must have seemed to lie beyond this, or it would differ by more
than one and a half ranges."""


class Decoded(NamedTuple):
    """What a receiver reads in a message."""

    x: Tensor
    """x̂, fp32 [E]; NaN in blocks whose values were not finite, and where y is not."""
    steps: Tensor
    """The step of each block, fp32 [B]; NaN where the block is."""
    wrapped: Tensor
    """Whether weights of the block had wrapped: bool [B]."""
    unreadable: Tensor
    """Whether they could not be mended, so that x̂ means nothing there: bool [B]."""


def blocks_of(elements: int) -> int:
    """B."""
    return -(-elements // BLOCK)


def code_bytes(elements: int, bits: int) -> int:
    """Length of the packed codes."""
    return blocks_of(elements) * BLOCK * bits // 8


def dither(key: int, elements: int, device: torch.device) -> Tensor:
    """u of the blocks of `elements` weights: fp32 [B·BLOCK], one of 256 equally likely values, symmetric around 0.

    The same for everybody who has the key.
    """
    count = blocks_of(elements) * BLOCK
    words = keys.raw(key, count // 8).astype("<u8", copy=False).view("i1")
    return torch.from_numpy(words).to(device).float().add_(0.5).mul_(2.0**-8)


def blocks(values: Tensor) -> Tensor:
    """[E] as [B, BLOCK], with zeros at the end; a view where it can be one."""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK) if missing else values.view(-1, BLOCK)


def mean_squares(values: Tensor) -> Tensor:
    """The mean of x² over each block: fp32 [B], the last one over as many weights as it has."""
    squares = torch.linalg.vector_norm(blocks(values), dim=1).square_().div_(BLOCK)
    if rest := values.numel() % BLOCK:
        squares[-1] *= BLOCK / rest
    return squares


def encode(x: Tensor, wanted: Tensor, u: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The message (heads, packed codes) that tells x, in steps as near to `wanted` [B] as there are."""
    rows, size = blocks(x), 1 << bits
    numbers = _numbers(torch.maximum(wanted, rows.abs().amax(1) * FINEST))
    q = (rows / _steps(numbers)[:, None]).add_(u.view_as(rows)).round_()
    high = (q / size).floor_()
    codes = q.sub_(high, alpha=size).nan_to_num_(0.0).to(torch.uint8)
    heads = (numbers - 64) * 512 + _sums(high).nan_to_num_(0.0).int()
    return heads.to(torch.int16), pack(codes.view(-1), bits)


def decode(heads: Tensor, packed: Tensor, y: Tensor, u: Tensor, bits: int) -> Decoded:
    """What a message says to someone whose own tensor is y."""
    rows, size = blocks(y), 1 << bits
    u, steps = u.view_as(rows), steps_of(heads)
    codes = unpack(packed, bits).view_as(rows).float()
    ahead = (rows / steps[:, None]).add_(u).sub_(codes)  # of the point that q = code is, in steps
    high = (ahead / size).round_()
    difference = (_sums(high) - (heads.int() & 511)).remainder_(MODULUS)
    wrapped = (difference != 0).logical_and_(difference.isfinite())
    unreadable = wrapped.clone()
    if bool(wrapped.any()):
        where = wrapped.nonzero().squeeze(1)
        found = difference[where].long()
        place = torch.minimum(found, MODULUS - found) - 1  # n is place + 1
        too_high = torch.where(found == place + 1, 1.0, -1.0)
        inside = ahead[where, place] - size * high[where, place]
        mended = inside * too_high < -MENDED_FROM * size / 2
        unreadable[where] = ~mended
        high[where, place] -= too_high * mended
    x = codes.add_(high, alpha=size).sub_(u).mul_(steps[:, None])
    return Decoded(x.view(-1)[: y.numel()], steps, wrapped, unreadable)


def rounding(heads: Tensor, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """x − x̂, which the sender of a message with these heads has left out, fp32 [E]; and the step of each block [B]."""
    rows, steps = blocks(x), steps_of(heads)
    exact = (rows / steps[:, None]).add_(u.view_as(rows))
    left = exact.sub_(exact.round()).mul_(steps[:, None])
    return left.view(-1)[: x.numel()], steps


def noise(steps: Tensor, elements: int) -> float:
    """The sum over all weights of the variance of x̂: s²/12 each."""
    squares = steps.double().square_()
    missing = float(squares[-1]) * (-elements % BLOCK)
    return (BLOCK * float(squares.sum()) - missing) / 12


def wrap_rate(wrapped_blocks: int, all_blocks: int) -> float:
    """The share of weights that wrapped, from the share p of blocks in which any did.

    With λ of them per block on average, Poisson distributed, p = 1 − exp(−λ). Where p is 1, as if half a block were
    without.
    """
    share = min(wrapped_blocks, all_blocks - 0.5) / all_blocks
    return -math.log1p(-share) / BLOCK


def steps_of(heads: Tensor) -> Tensor:
    """The step of each block, NaN for NOT_FINITE: fp32 [B]."""
    return _steps((heads.int() >> 9) + 64)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [K], each below 2^bits, as K·bits/8 bytes. K is a multiple of 8.

    The codes are cut into as many equal parts as fill whole bytes together; word i has number i of each part, that of
    the first one in its lowest bits. Neighbours in one word would take several times as long.
    """
    per_group, group_bytes = _groups(bits)
    planes = codes.view(per_group, -1)
    word = planes[0].to(torch.uint8 if group_bytes == 1 else torch.int64)
    for place in range(1, per_group):
        word = word | planes[place].to(word.dtype) << bits * place
    return word if group_bytes == 1 else word[:, None].view(torch.uint8)[:, :group_bytes].reshape(-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """What was packed: uint8 [K]."""
    per_group, group_bytes = _groups(bits)
    word = packed
    if group_bytes > 1:
        whole = packed.new_zeros(len(packed) // group_bytes, 8)
        whole[:, :group_bytes] = packed.view(-1, group_bytes)
        word = whole.view(torch.int64).squeeze(1)
    mask = (1 << bits) - 1
    return torch.cat([(word >> bits * place & mask).to(torch.uint8) for place in range(per_group)])


def _groups(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the smallest group of codes that fills bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _numbers(wanted: Tensor) -> Tensor:
    """The number of the step nearest in ratio to each wanted one: int32 [B]."""
    exact = (wanted.log2() - LOWEST_OCTAVE) * STEPS_PER_OCTAVE
    numbers = exact.round_().clamp_(0, NOT_FINITE - 1)
    return numbers.masked_fill_(wanted.isfinite().logical_not_(), NOT_FINITE).int()


def _steps(numbers: Tensor) -> Tensor:
    """The step of each number, NaN for NOT_FINITE: fp32 [B]."""
    return torch.tensor([*STEPS, math.nan], device=numbers.device)[numbers.long()]


def _sums(high: Tensor) -> Tensor:
    """Σ n·h mod 257 over each block, from [B, BLOCK] whole numbers: fp32 [B], exact, as no sum exceeds 2^24."""
    small = high - (high / MODULUS).round_().mul_(MODULUS)
    weights = torch.arange(1, BLOCK + 1, dtype=high.dtype, device=high.device)
    return torch.mv(small, weights).remainder_(MODULUS)
