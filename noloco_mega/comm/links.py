"""How does a tensor reach a rank of another replica? Point-to-point links among a few ranks, outside any world.

A link group holds the ranks that one rank may send activations to or take them from, numbered 0..size-1. All its
operations go through one method, `exchange`, which posts everything before it waits for anything: a send is a
rendezvous, and two neighbours that both sent first would wait for each other for ever. There are no tags; messages
between two ranks match in the order in which they were posted.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from noloco_mega.device import Device


class LinkBroken(Exception):  # noqa: N818 (it names what happened)
    """A transfer failed, timed out or was called off; its link group carries nothing any more."""


class Links(Protocol):
    """Point-to-point transfers between the ranks of one link group."""

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive (tensor, peer rank) pairs, all at once; returns when every tensor has been handed over.

        Tensors are contiguous. Raises LinkBroken on any failure, and on every later call; the received tensors may
        then be half filled.
        """

    def close(self) -> None:
        """Give the links up. Any thread may call it: an exchange that is under way then raises LinkBroken."""


class NoLinks:
    """The links of a pipeline of one stage, which has nothing to send."""

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> None:
        assert not sends and not recvs, "a pipeline of one stage exchanged something"

    def close(self) -> None:
        """Nothing to give up."""


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    """A gloo process group that is part of no torch.distributed world; its operations end after `timeout`.

    Collective over the group. `host` is this rank's address towards the others. Raises LinkBroken if not everybody
    connects within `timeout`. The store is not needed afterwards.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    # Gloo waits for the others as long as the store does. A PrefixStore shares its timeout with all who use the store
    # below it, so it gets its own back.
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    try:
        # torch's type stubs leave out its operations.
        return dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise LinkBroken(f"rank {rank} of {size} could not connect to its link group: {error}") from error
    finally:
        store.set_timeout(before)


def nccl_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> tuple[dist.ProcessGroup, Any]:
    """The same over NCCL, and its backend, which can abort it. `store` serves this group alone.

    Built without PyTorch's watchdog, which would end the process on a failure: with blocking waits a failure or timeout
    surfaces in `wait` instead. Raises LinkBroken if not everybody connects within the limit of device.bound_nccl.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    try:
        with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend.eager_connect_single_device(device)
    except RuntimeError as error:
        raise LinkBroken(f"rank {rank} of {size} could not connect to its link group: {error}") from error
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    return group, backend


class GlooLinks:
    """Links over TCP, by a gloo process group that is part of no torch.distributed world.

    A failed operation closes a gloo process's connections to all peers, so the first failure is final here too. A peer
    that dies in the middle of a transfer often is not noticed before `timeout`; `close`, called by whoever notices the
    death otherwise, ends the wait at once. For that a thread of its own waits for gloo (its waits cannot be called off:
    the thread outlives a closed group by at most `timeout`), at about 40 microseconds per exchange.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, host: str = "127.0.0.1") -> None:
        """Connect to every rank of the group; collective over it. `host` is this rank's address towards the others.

        Raises LinkBroken if not everybody connects within `timeout`. The store is not needed afterwards.
        """
        self._group = gloo_group(store, rank, size, timeout, host)
        self._broken: str | None = None
        self._posted: queue.SimpleQueue[list[dist.Work] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=_wait_for_gloo, args=(self._posted, self._outcomes), daemon=True).start()

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> None:
        with self._lock:
            if self._broken is not None:
                raise LinkBroken(self._broken)
            try:
                works = [self._group.recv([tensor.detach()], peer, 0) for tensor, peer in recvs]
                works += [self._group.send([tensor.detach()], peer, 0) for tensor, peer in sends]
            except RuntimeError as error:
                self._break(str(error))
                raise LinkBroken(self._broken) from error
            self._posted.put(works)
        reason = self._outcomes.get()
        if reason is not None:
            with self._lock:
                self._break(reason)
            raise LinkBroken(reason)

    def close(self) -> None:
        with self._lock:
            self._break("the links were closed")

    def _break(self, reason: str) -> None:
        """The first call ends the group: peers that share an operation with this rank then fail as well."""
        if self._broken is not None:
            return
        self._broken = reason
        self._posted.put(None)
        self._outcomes.put(reason)
        del self._group


def _wait_for_gloo(posted: queue.SimpleQueue[list[dist.Work] | None], outcomes: queue.SimpleQueue[str | None]) -> None:
    """The waiting thread of GlooLinks: for each list of operations, the reason why one failed, or None."""
    while (works := posted.get()) is not None:
        reason = None
        # Popped one by one, so that no tensor is kept once it has been handed over.
        while works:
            try:
                works.pop(0).wait()
            except RuntimeError as error:
                # The others fail too, without delay; each must be waited for before its tensor may be freed.
                reason = reason or str(error)
        outcomes.put(reason)


class NcclLinks:
    """Links over NCCL, by a communicator of its own. Written from PyTorch's source; not yet run on GPUs.

    The communicator is non-blocking, so that no call of NCCL's holds the process for ever: PyTorch waits for what is in
    progress on the host (making the communicator, connecting to a peer at the first transfer with it, launching), not
    for `timeout` but for as long as device.bound_nccl has said. Every exchange is one NCCL group call: a rank's calls
    run in the order issued, and separate sends and receives along random routes deadlock
    (tests/unit/test_nccl_model.py).
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, device: Device, peers: Sequence[int]
    ) -> None:
        """Make the communicator, and connect to `peers`; collective over the group. `store` serves this group alone.

        A later exchange with another rank works too, and connects first. Raises LinkBroken on any failure, and if not
        everybody is here within the limit of device.bound_nccl (making and connecting) or `timeout` (the first
        transfer).
        """
        self._device = device.device
        self._timeout = timeout
        self._broken: str | None = None
        self._group, self._backend = nccl_group(store, rank, size, timeout, self._device)
        connect(self, rank, peers, self._device)

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> None:
        if self._broken is not None:
            raise LinkBroken(self._broken)
        try:
            self._group._start_coalescing(self._device)
            for tensor, peer in recvs:
                self._group.recv([tensor.detach()], peer, 0)
            for tensor, peer in sends:
                self._group.send([tensor.detach()], peer, 0)
            self._group._end_coalescing(self._device).wait(self._timeout)
        except RuntimeError as error:
            self._abort(str(error))
        # After an abort, also one from another thread, `wait` returns as if the transfer had worked.
        if self._broken is not None:
            raise LinkBroken(self._broken)

    def close(self) -> None:
        self._abort("the links were closed")

    def _abort(self, reason: str) -> None:
        """End the communicator. Its objects are kept: freeing an aborted one may wait for the peers."""
        if self._broken is None:
            self._broken = reason
            self._backend.abort()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def connect(links: Links, rank: int, peers: Sequence[int], device: torch.device) -> None:
    """Swap rank numbers with all `peers` in one exchange, for links that connect at their first transfer.

    Each of the peers must do the same with `rank` among its own. Raises LinkBroken as `exchange` does, and if another
    rank than the one expected answers.
    """
    mine = torch.tensor([rank], device=device)
    theirs = [torch.full((1,), -1, device=device) for _ in peers]
    links.exchange([(mine, peer) for peer in peers], list(zip(theirs, peers, strict=True)))
    answered = [int(tensor) for tensor in theirs]
    if answered != list(peers):
        links.close()
        raise LinkBroken(f"rank {rank} is linked to ranks {answered} where {list(peers)} belong")


def open_links(
    device: Device,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    host: str = "127.0.0.1",
    peers: Sequence[int] | None = None,
) -> Links:
    """The links that fit a device: NCCL's on CUDA, else gloo's bound to `host`. Collective over the link group.

    `peers` are the ranks that this one will exchange with, by default all others; a is one of b's where b is one of
    a's. NCCL connects to these here; gloo always connects to everybody. A group of one rank needs no links. Raises
    LinkBroken if not everybody connects: within `timeout` by gloo, by NCCL see NcclLinks.
    """
    if peers is None:
        peers = [other for other in range(size) if other != rank]
    assert rank not in peers and all(0 <= peer < size for peer in peers), f"peers {peers} of rank {rank} of {size}"
    if size == 1:
        return NoLinks()
    if device.is_cuda:
        return NcclLinks(store, rank, size, timeout, device, peers)
    return GlooLinks(store, rank, size, timeout, host)
