"""How do the members of a group tell each other their tensors, and how exact is what they take for them?

"none": as fp32. "modulo": by the code of comm/codec.py, whose side information is the receiver's own tensor.

**What is averaged.** With x̂_j what the code of member j means, replica i takes for j's tensor

    x̂_j + (x_i − x̂_i),   so that its mean over the n members of the group is   x_i + (1/n)·Σ_j x̂_j − x̂_i

Summed over the members that is Σ x_i: as without a code, the mean over the replicas stays what it was, up to what has
wrapped, and takes DiLoCo's trajectory. The rounding errors, of variance s²/12 each, stay in the replicas' deviations,
(1 − 1/n)·s²/12 per step, and the next exchanges take them away again: x is a state and not an increment, so that it
needs no error feedback. Averaging x_i and x̂_j would leave half as much in a pair, but add s²/12·(n − 1)²/n³ to the
group's mean, where nothing but the loss takes it away; averaging x̂_i and x̂_j adds s²/12/n to it.

**The range** is `codec_range` times the rms of the pair's difference, of which the sender has to know before the
exchange what it will be, block by block (`Estimate`): what the last exchange has shown, and no less than the block has
moved since. Before the first one, as after a join, only the movement is known. A range that is too narrow makes no
rubbish: a weight that has wrapped is mended if it is the only one of its block, else the block is taken for the
receiver's own and moves nothing; how much has wrapped is measured; and the next range is wider, of both partners.

Shapes: all tensors are flat, [P] with P the elements of one master; B blocks of a master. A message has two tensors per
master, heads and codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from noloco_mega.comm import codec
from noloco_mega.outer.base import parts
from noloco_mega.outer.slow import load_flat
from noloco_mega.plan import keys

if TYPE_CHECKING:
    from noloco_mega.config import Noloco

FIRST_RATIO = 2.0
"""Of a pair's difference to each one's movement, where nothing else is known: two moves of one length differ by no
more."""
SHAPE_FLOOR = 1 / 8
"""Of the rms of all blocks: what each block is at least expected to differ by, as it may have moved at the partner's
alone, like the embedding of a rare token. Where it has not, that costs 1/64 of the rounding errors' energy."""
MARGIN = 1.25
"""Times the largest difference that a block has shown: what its next range covers at least. One weight that differs
much from a partner's would else be lost among the others of its block, and wrap again and again."""
PIECE_ELEMENTS = 1 << 17
"""Elements that one pass works on, a multiple of a block: its temporaries stay in the processor's cache. Part of the
code, as each piece has a dither of its own."""

Message = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a replica takes for a partner's masters."""

    tensors: list[Tensor]
    """fp32 [P] each, on the CPU."""
    noise: float = 0.0
    """Expected Σ (error)² in the difference to the replica's own masters."""
    wrapped_blocks: int = 0
    """Blocks in which weights had wrapped."""
    blocks: int = 0
    """Blocks read; 0 where nothing can wrap."""


class Coding(Protocol):
    """How one rank's masters travel. `write`, then `read` for those whose message arrived, then `learn`."""

    length: int
    """Tensors of a message."""

    def write(self, outer_step: int, rank: int) -> Message:
        """The message that tells the masters, on the CPU, for all partners. `rank` is the rank inside the replica."""
        ...

    def buffers(self, count: int) -> list[Message]:
        """Where messages of `count` partners can go, made on first use and kept."""
        ...

    def read(self, outer_step: int, rank: int, arrived: Mapping[int, Message]) -> dict[int, Read]:
        """The partners' masters from their messages; the own ones are still as `write` has found them."""
        ...

    def learn(self, partners: Sequence[int]) -> None:
        """After an outer step, of which partners that were read count."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What to go on from exactly: numbers, and per master a tensor of its blocks; {} for nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; from one without such tensors, as another topology's, as if nothing were known."""
        return


def build(settings: Noloco, masters: Sequence[Tensor], replica: int, rest: Sequence[Tensor], gamma: float) -> Coding:
    """The coding that `settings.codec` names. A replica that had not moved since the last outer step would send
    `gamma` · `rest`, which are as long as the masters. Raises ValueError for an unknown name."""
    if settings.codec == "none":
        return Exact(masters)
    if settings.codec == "modulo":
        return Modulo(settings, masters, replica, rest, gamma)
    raise ValueError(f'noloco.codec "{settings.codec}" is none of a small group: use "none" or "modulo"')


class Exact(Coding):
    """fp32, out of the masters' own memory and into buffers; on CUDA by way of a pinned copy."""

    def __init__(self, masters: Sequence[Tensor]) -> None:
        self._masters, self.length = masters, len(masters)
        self._pinned: list[Tensor] = []
        self._buffers: list[Message] = []

    def write(self, outer_step: int, rank: int) -> Message:
        if not self._masters[0].is_cuda:
            return [theta.detach() for theta in self._masters]
        self._pinned = self._pinned or _host_like(self._masters)
        for pinned, theta in zip(self._pinned, self._masters, strict=True):
            pinned.copy_(theta)
        return self._pinned

    def buffers(self, count: int) -> list[Message]:
        while len(self._buffers) < count:
            self._buffers.append(_host_like(self._masters))
        return self._buffers[:count]

    def read(self, outer_step: int, rank: int, arrived: Mapping[int, Message]) -> dict[int, Read]:
        return {partner: Read(tensors=message) for partner, message in arrived.items()}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What messages have shown of the differences in the blocks of one master: fp32 [B] each."""

    square: Tensor
    """Mean square."""
    least: Tensor
    """What the mean square has to be taken for at least, if the range is to cover every weight (MARGIN)."""


class Estimate:
    """What the masters of one rank will differ from a partner's by, in mean square and block by block.

    What earlier exchanges have shown, each of them counting half as much as the next one; more by as much as the square
    of the movement since the last outer step has grown, as both follow the learning rate; and (1 + k)² times that after
    k outer steps without a partner, since replicas that are left alone drift apart steadily. No less than the block's
    own movement, nor than SHAPE_FLOOR.
    """

    def __init__(self, masters: Sequence[Tensor]) -> None:
        self.squares = [theta.new_zeros(codec.blocks_of(theta.numel())) for theta in masters]
        """As known from the last exchange: fp32 [B] per master."""
        self.numbers = torch.zeros(2, dtype=torch.float64)
        """Mean square of the movement before that exchange, 0 before the first one; and k."""

    def expected(self, moved: Sequence[Tensor], movement: float) -> list[Tensor]:
        """Of the coming exchange, where the movement is `moved` in each block and `movement` in all."""
        before, alone = self.numbers.tolist()
        growth = (max(1.0, movement / before) if before else 1.0) * (1 + alone) ** 2
        least = 1.0 if before else FIRST_RATIO**2
        found = [torch.maximum(square * growth, move * least) for square, move in zip(self.squares, moved, strict=True)]
        total = sum(float(square.sum(dtype=torch.float64)) for square in found)
        floor = SHAPE_FLOOR**2 * total / sum(len(square) for square in found)
        return [square.clamp_(min=floor) for square in found]

    def alone(self) -> None:
        """An outer step had no partner."""
        self.numbers[1] += 1

    def learn(self, expected: Sequence[Tensor], shown: Sequence[Shown], movement: float) -> None:
        """An exchange has shown `shown` where `expected` was."""
        first = not self.numbers[0]
        for square, old, new in zip(self.squares, expected, shown, strict=True):
            square.copy_(torch.maximum(new.square if first else (old + new.square) / 2, new.least))
        self.numbers.copy_(torch.tensor([movement, 0.0], dtype=torch.float64))

    def forget(self) -> None:
        """Nothing is known."""
        self.numbers.zero_()
        for square in self.squares:
            square.zero_()


class Modulo(Coding):
    """The modulo code of `settings.codec_bits`."""

    def __init__(
        self, settings: Noloco, masters: Sequence[Tensor], replica: int, rest: Sequence[Tensor], gamma: float
    ) -> None:
        self._seed, self._bits, self._range = settings.seed, settings.codec_bits, settings.codec_range
        self._masters, self._replica, self._rest, self._gamma = masters, replica, rest, gamma
        self.length = 2 * len(masters)
        self._blocks = sum(codec.blocks_of(theta.numel()) for theta in masters)
        self.estimate = Estimate(masters)
        self._movement = 0.0
        """Mean square of what the masters had moved by at the last `write`."""
        self._expected: list[Tensor] = []
        """And what was expected there."""
        self._shown: dict[int, list[Shown]] = {}
        """Partner -> what its message has shown, per master."""
        self._message: Message = []
        self._buffers: list[Message] = []
        self._read: list[list[Tensor]] = []

    @torch.no_grad()
    def write(self, outer_step: int, rank: int) -> Message:
        self._message = self._message or self._empty_message()
        wanted = self._wanted_steps()
        for index, piece in parts(self._masters, PIECE_ELEMENTS):
            x, (heads, codes) = self._masters[index][piece], self._in_message(self._message, index, piece)
            u = self._dither(outer_step, rank, self._replica, index, piece)
            numbers, packed = codec.encode(x, wanted[index][_blocks_in(piece)], u, self._bits)
            heads.copy_(numbers)
            codes.copy_(packed)
        return self._message

    def buffers(self, count: int) -> list[Message]:
        while len(self._buffers) < count:
            self._buffers.append(self._empty_message())
        return self._buffers[:count]

    @torch.no_grad()
    def read(self, outer_step: int, rank: int, arrived: Mapping[int, Message]) -> dict[int, Read]:
        while len(self._read) < len(arrived):
            self._read.append(_host_like(self._masters))
        tensors = dict(zip(arrived, self._read, strict=False))
        noise, wrapped = dict.fromkeys(arrived, 0.0), dict.fromkeys(arrived, 0)
        self._shown = {
            partner: [
                Shown(square=torch.empty_like(square), least=torch.empty_like(square))
                for square in self.estimate.squares
            ]
            for partner in arrived
        }
        for index, piece in parts(self._masters, PIECE_ELEMENTS):
            x, (heads, _) = self._masters[index][piece], self._in_message(self._message, index, piece)
            u = self._dither(outer_step, rank, self._replica, index, piece)
            residual, steps = codec.rounding(heads.to(x.device), x, u)
            own_noise = codec.noise(steps, len(x))
            for partner, message in arrived.items():
                heads, codes = self._in_message(message, index, piece)
                u = self._dither(outer_step, rank, partner, index, piece)
                found = codec.decode(heads.to(x.device), codes.to(x.device), x, u, self._bits)
                unreadable = self._note(self._shown[partner][index], piece, x - found.x, found)
                found.x.add_(residual)
                if bool(unreadable.any()):  # is taken for the own, so that it moves nothing
                    torch.where(_of_weights(unreadable, x), x, found.x, out=found.x)
                tensors[partner][index][piece].copy_(found.x)
                noise[partner] += own_noise + codec.noise(found.steps, len(x))
                wrapped[partner] += int(found.wrapped.sum())
        return {
            partner: Read(
                tensors=tensors[partner],
                noise=noise[partner],
                wrapped_blocks=wrapped[partner],
                blocks=self._blocks,
            )
            for partner in arrived
        }

    def learn(self, partners: Sequence[int]) -> None:
        if not math.isfinite(self._movement):
            return  # this replica will take over another one's state
        if not partners:
            self.estimate.alone()
            return
        by_master = zip(*(self._shown[partner] for partner in partners), strict=True)
        shown = [
            Shown(
                square=torch.stack([each.square for each in found]).mean(0),
                least=torch.stack([each.least for each in found]).amax(0),
            )
            for found in by_master
        ]
        self.estimate.learn(self._expected, shown, self._movement)

    def state_dict(self) -> dict[str, Any]:
        return {"pair_squares": self.estimate.squares, "pair_numbers": self.estimate.numbers.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "pair_squares" not in state:
            self.estimate.forget()
            return
        load_flat("pair_squares", self.estimate.squares, state["pair_squares"])
        self.estimate.numbers.copy_(torch.tensor(state["pair_numbers"], dtype=torch.float64))

    def _wanted_steps(self) -> list[Tensor]:
        """By how much the codes of each block should count: fp32 [B] per master. Notes the movement."""
        squares = [torch.empty_like(square) for square in self.estimate.squares]
        for index, piece in parts(self._masters, PIECE_ELEMENTS):
            moved = self._masters[index][piece].sub(self._rest[index][piece], alpha=self._gamma)
            squares[index][_blocks_in(piece)] = codec.mean_squares(moved)
        self._movement = sum(float(square.sum(dtype=torch.float64)) for square in squares) / self._blocks
        step_per_rms = 2 * self._range / (1 << self._bits)
        self._expected = self.estimate.expected(squares, self._movement)
        return [square.sqrt().mul_(step_per_rms) for square in self._expected]

    def _note(self, shown: Shown, piece: slice, difference: Tensor, found: codec.Decoded) -> Tensor:
        """Note what a piece of a partner's message shows; which of its blocks can't be read, bool [B].

        One that differs by more than its code can tell seems to lie anywhere in the range, with a third of its square
        as its mean square. It is taken for such a one where a quarter is reached, and calls for four times the range;
        any other unreadable one for twice the range.
        """
        blocks = _blocks_in(piece)
        square = codec.mean_squares(difference)
        partners_range = found.steps * (1 << self._bits) / 2
        beyond = square > partners_range.square() / 4
        unreadable = found.unreadable.logical_or(beyond)
        largest = codec.blocks(difference).abs().amax(1).mul_(MARGIN)
        covered = torch.maximum(largest, partners_range * (2 * unreadable + 2 * beyond))
        shown.square[blocks] = (square - found.steps.square() / 12).clamp_(min=0)
        shown.least[blocks] = (covered / self._range).square_()
        return unreadable

    def _dither(self, outer_step: int, rank: int, sender: int, index: int, piece: slice) -> Tensor:
        master = self._masters[index]
        key = keys.key(self._seed, "dither", outer_step, sender, rank, index, piece.start)
        return codec.dither(key, len(master[piece]), master.device)

    def _in_message(self, message: Message, index: int, piece: slice) -> tuple[Tensor, Tensor]:
        """Heads and codes of a piece of a master."""
        block = _blocks_in(piece)
        code = slice(block.start * codec.BLOCK * self._bits // 8, block.stop * codec.BLOCK * self._bits // 8)
        return message[2 * index][block], message[2 * index + 1][code]

    def _empty_message(self) -> Message:
        return [
            torch.empty(size, dtype=dtype, pin_memory=theta.is_cuda)
            for theta in self._masters
            for size, dtype in (
                (codec.blocks_of(theta.numel()), torch.int16),
                (codec.code_bytes(theta.numel(), self._bits), torch.uint8),
            )
        ]


def _blocks_in(piece: slice) -> slice:
    """The blocks of a piece, which begins with one; what lies behind a tensor's end does no harm."""
    return slice(piece.start // codec.BLOCK, codec.blocks_of(piece.stop))


def _of_weights(blocks: Tensor, x: Tensor) -> Tensor:
    """[B] of blocks as [E] of the weights of x."""
    return blocks.repeat_interleave(codec.BLOCK)[: len(x)]


def _host_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
