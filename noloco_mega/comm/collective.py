"""How do the twins of all replicas add up a buffer? One all-reduce over every replica, outside any world.

Outer optimizers that wait for everybody ("diloco", "allreduce") have such a group; a run with another one never forms
it. The ranks of a group hold the same part of the model, one in each replica: [P] elements of D·S·T groups are added
up side by side, and no group spans more than N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from noloco_mega.comm.links import LinkBroken, gloo_group, nccl_group
from noloco_mega.comm.rendezvous import RendezvousClient
from noloco_mega.comm.stores import shared_store
from noloco_mega.device import Device

CHUNK_ELEMENTS = 1 << 22
"""Elements of one all-reduce: bounds the buffer in which smaller tensors travel together."""
SUM_DTYPE = torch.float32


class CollectiveBroken(ConnectionError):  # noqa: N818 (it names what happened)
    """A replica is gone, or too late, and nobody can be averaged with any more; the message tells the user so."""


class Collective(Protocol):
    """The twins of one rank in all replicas, itself included."""

    others: tuple[int, ...]
    """The other replicas, ascending."""

    def mean_(self, tensors: Sequence[Tensor]) -> int:
        """Replace each tensor, in place, by its mean over all twins, the bitwise same one everywhere.

        All twins must call it alike, with contiguous tensors of the same shapes in the same order, on the group's
        device. Sums are fp32. Returns the payload in bytes, 4 per element: what each rank hands to the all-reduce once.
        (A ring then sends 2·(N − 1)/N times as much.) Raises CollectiveBroken, and on every later call; the tensors may
        then hold anything.
        """

    def close(self) -> None:
        """Give the group up."""


class Alone:
    """The twins of the only replica."""

    others: tuple[int, ...] = ()

    def mean_(self, tensors: Sequence[Tensor]) -> int:
        return 0

    def close(self) -> None:
        """Nothing to give up."""


class Everybody:
    """The twins of N replicas, over a gloo or NCCL group that is part of no torch.distributed world."""

    def __init__(self, group: Any, replica: int, replicas: int, timeout: timedelta) -> None:
        self._group: Any = group
        self._replica, self._replicas, self._timeout = replica, replicas, timeout
        self.others = tuple(other for other in range(replicas) if other != replica)
        self._broken: str | None = None

    @torch.no_grad()
    def mean_(self, tensors: Sequence[Tensor]) -> int:
        if self._broken is not None:
            raise CollectiveBroken(self._broken)
        payload_bytes = 0
        for pieces in _chunks(tensors):
            # One fp32 piece is added up where it lies; several, or others, in a buffer.
            travels_alone = len(pieces) == 1 and pieces[0].dtype == SUM_DTYPE
            buffer = pieces[0] if travels_alone else torch.cat([piece.to(SUM_DTYPE) for piece in pieces])
            self._add_up(buffer)
            buffer.div_(self._replicas)
            if not travels_alone:
                for piece, mean in zip(pieces, buffer.split([piece.numel() for piece in pieces]), strict=True):
                    piece.copy_(mean)
            payload_bytes += buffer.numel() * buffer.element_size()
        return payload_bytes

    def close(self) -> None:
        self._broken = "the group of all replicas was closed"
        self._group = None

    def _add_up(self, buffer: Tensor) -> None:
        try:
            self._group.allreduce([buffer]).wait()
        except RuntimeError as error:
            self._broken = (
                f"replica {self._replica} cannot average with all {self._replicas} replicas, as its outer optimizer "
                "does: this optimizer waits for everybody, and one of them is gone or came later than "
                f"noloco.link_timeout_seconds = {self._timeout.total_seconds():g}. Start all replicas again with "
                '--resume auto, or train with noloco.optimizer "noloco", which goes on without a lost replica. '
                f"This rank saw: {str(error).splitlines()[0]}"
            )
            raise CollectiveBroken(self._broken) from error


def open_collective(
    client: RendezvousClient,
    *,
    replica: int,
    replicas: int,
    rank: int,
    device: Device,
    host: str,
    timeout: timedelta,
) -> Collective:
    """Meet rank `rank` of all other replicas at the rendezvous and form a group with them; collective over it.

    `host` is this process's address towards the others. They meet within the client's timeout; the group forms, and
    each of its sums ends, within `timeout`. Raises RendezvousTimeout naming who did not come, CollectiveBroken if the
    group does not form.
    """
    if replicas == 1:
        return Alone()
    # Engines take long to build on some machines, and the group's own timeout need not cover that.
    client.announce("gathering", replica, rank, {})
    client.wait_for("gathering", [(other, rank) for other in range(replicas)])
    store = shared_store(client, f"everybody {rank}", 0, serves=replica == 0, host=host, timeout=timeout)
    try:
        if device.is_cuda:
            group, _ = nccl_group(store, replica, replicas, timeout, device.device)
        else:
            group = gloo_group(store, replica, replicas, timeout, host)
    except LinkBroken as error:
        raise CollectiveBroken(f"the group of all {replicas} replicas did not form: {error}") from error
    return Everybody(group, replica, replicas, timeout)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat views of all tensors, in order, cut and gathered into chunks of CHUNK_ELEMENTS and a last smaller one."""
    chunk: list[Tensor] = []
    room = CHUNK_ELEMENTS
    for tensor in tensors:
        rest = tensor.detach().view(-1)
        while rest.numel():
            piece, rest = rest[:room], rest[room:]
            chunk.append(piece)
            room -= piece.numel()
            if room == 0:
                yield chunk
                chunk, room = [], CHUNK_ELEMENTS
    if chunk:
        yield chunk
