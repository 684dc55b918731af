"""Links: what arrives, and what a failure looks like from every side."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from noloco_mega.comm.links import GlooLinks, LinkBroken, NcclLinks, NoLinks, connect, open_links
from noloco_mega.device import Device
from tests.harness import Ranks

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


def group(size, timeout=LONG, present=None):
    """The links of a group in one process, each opened by a thread; the exception where opening failed."""
    store = dist.HashStore()

    def opened(rank):
        try:
            return GlooLinks(store, rank, size, timeout)
        except LinkBroken as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(opened, present if present is not None else range(size)))


def together(*calls):
    """Run calls at once; their values, or the LinkBroken that they raised."""

    def guarded(call):
        try:
            return call()
        except LinkBroken as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(guarded, calls))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_everyone_to_everyone_at_once_in_order(dtype):
    size, rounds = 3, 4
    links = group(size)

    def talk(rank):
        peers = [peer for peer in range(size) if peer != rank]
        seen = []
        for i in range(rounds):
            # Two messages to each peer in one exchange, of different sizes; one of them empty in the first round.
            sends = [(torch.full((n,), 9 * i + 3 * rank + n, dtype=dtype), p) for p in peers for n in (i, 2)]
            recvs = [(torch.empty(n, dtype=dtype), p) for p in peers for n in (i, 2)]
            links[rank].exchange(sends, recvs)
            seen += [(tensor.tolist(), p) for tensor, p in recvs]
        return seen

    for rank, seen in enumerate(together(*(lambda r=r: talk(r) for r in range(size)))):
        peers = [peer for peer in range(size) if peer != rank]
        assert seen == [([9 * i + 3 * p + n] * n, p) for i in range(rounds) for p in peers for n in (i, 2)]
    for link in links:
        link.close()


def test_tensors_that_require_gradients_travel_without_history():
    first, second = group(2)
    sent = torch.ones(3, requires_grad=True) * 2
    received = torch.zeros(3, requires_grad=True)
    together(lambda: first.exchange([(sent, 1)], []), lambda: second.exchange([], [(received, 0)]))
    assert received.tolist() == [2, 2, 2] and received.requires_grad and received.is_leaf
    first.close()
    second.close()


def test_no_tensor_is_kept_after_an_exchange():
    def holders(tensor):
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    first, second = group(2)
    sent, received = torch.ones(3), torch.zeros(3)
    before = holders(sent), holders(received)
    together(lambda: first.exchange([(sent, 1)], []), lambda: second.exchange([], [(received, 0)]))
    assert (holders(sent), holders(received)) == before
    first.close()
    second.close()


def test_a_silent_peer_breaks_the_links_at_the_timeout_and_for_ever():
    first, second = group(2, SHORT)
    with pytest.raises(LinkBroken, match="Timed out"):
        first.exchange([], [(torch.empty(2), 1)])
    with pytest.raises(LinkBroken, match="Timed out"):
        first.exchange([(torch.empty(2), 1)], [])
    # The other side finds out as soon as it needs the link.
    with pytest.raises(LinkBroken):
        second.exchange([], [(torch.empty(2), 0)])
    with pytest.raises(LinkBroken):
        second.exchange([(torch.empty(2), 0)], [])


def test_closing_ends_an_exchange_that_waits():
    first, _second = group(2)
    timer = threading.Timer(0.2, first.close)
    timer.start()
    with pytest.raises(LinkBroken, match="closed"):
        first.exchange([], [(torch.empty(2), 1)])
    timer.join()
    first.close()
    with pytest.raises(LinkBroken, match="closed"):
        first.exchange([], [])


def test_an_idle_group_that_is_closed_breaks_its_peers():
    first, second, third = group(3)
    first.close()
    outcomes = together(
        lambda: second.exchange([], [(torch.empty(2), 0)]), lambda: third.exchange([(torch.empty(2), 0)], [])
    )
    assert all(isinstance(outcome, LinkBroken) for outcome in outcomes)


def test_a_rank_that_does_not_come_is_reported():
    (outcome,) = group(2, SHORT, present=[0])
    assert isinstance(outcome, LinkBroken) and "rank 0 of 2 could not connect" in str(outcome)


@pytest.mark.parametrize("present", [[0], [0, 1]])
def test_the_store_of_the_links_keeps_its_timeout(present, tmp_path):
    below = {rank: dist.FileStore(str(tmp_path / "store"), 2) for rank in present}  # one object each, as processes have
    for store in below.values():
        store.set_timeout(timedelta(seconds=321))

    def opened(rank):
        return GlooLinks(dist.PrefixStore("links", below[rank]), rank, 2, SHORT)

    links = together(*(lambda r=r: opened(r) for r in present))
    assert all(isinstance(link, LinkBroken) for link in links) == (len(present) == 1)
    assert [store.timeout for store in below.values()] == [timedelta(seconds=321)] * len(present)


def test_peers_that_connect_know_each_other():
    cpu, links = torch.device("cpu"), group(4)
    peers = {0: [1, 2], 1: [0], 2: [0, 3], 3: [2]}  # not everybody is everybody's
    assert together(*(lambda r=r: connect(links[r], r, peers[r], cpu) for r in peers)) == [None] * 4
    first, second = group(2)
    outcomes = together(lambda: connect(first, 0, [1], cpu), lambda: connect(second, 3, [0], cpu))
    assert isinstance(outcomes[0], LinkBroken) and "linked to ranks [3] where [1] belong" in str(outcomes[0])
    with pytest.raises(LinkBroken):
        first.exchange([], [])


def test_nccl_links_connect_to_their_peers_when_they_are_made(monkeypatch):
    """That the constructor makes one exchange with its peers; nothing about NCCL, which is not here."""
    exchanged, nccl = [], MagicMock()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", MagicMock())

    def exchange(links, sends, recvs):
        exchanged.append(([peer for _, peer in sends], [peer for _, peer in recvs]))
        for tensor, peer in recvs:
            tensor.fill_(peer)

    monkeypatch.setattr(NcclLinks, "exchange", exchange)
    device = Device(torch.device("cpu"), "nccl")
    NcclLinks(dist.HashStore(), 1, 4, SHORT, device, [0, 3])
    assert exchanged == [([0, 3], [0, 3])]
    assert nccl.Options.return_value.config.blocking == 0 and nccl.Options.return_value._timeout == SHORT


def test_one_rank_needs_no_links():
    links = open_links(Device(torch.device("cpu"), "gloo"), dist.HashStore(), 0, 1, SHORT)
    assert isinstance(links, NoLinks)
    links.exchange([], [])
    links.close()


def _ring(rank, directory):
    """Exchange for ever around a ring of three; the number of exchanges before the links broke."""
    links = GlooLinks(dist.FileStore(str(directory / "store"), 3), rank, 3, LONG)
    sent, received, done = torch.ones(1000), torch.empty(1000), 0
    while True:
        try:
            links.exchange([(sent, (rank + 1) % 3)], [(received, (rank - 1) % 3)])
        except LinkBroken:
            return done
        done += 1
        if done == 50:
            (directory / f"going_{rank}").touch()


def test_a_killed_process_breaks_the_links_of_all_that_wait_for_it(tmp_path):
    ranks = Ranks(_ring, [0, 1, 2], tmp_path, ())
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("going_*"))) < 3:
        assert time.monotonic() < deadline, "the ring never went round"
        time.sleep(0.01)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    done = ranks.wait(30, expect_missing=frozenset({1}))
    assert done.keys() == {0, 2} and min(done.values()) >= 50
