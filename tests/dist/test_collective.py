"""The group of all twins: what it adds up, and what a lost or late replica looks like."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from noloco_mega.comm import collective
from noloco_mega.comm.collective import Alone, CollectiveBroken, Everybody, open_collective
from noloco_mega.comm.links import gloo_group
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousServer
from noloco_mega.device import Device
from tests.harness import Ranks

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)
CPU = Device(torch.device("cpu"), "gloo")
SECRET = b"a test's own secret"


def together(*calls):
    """The results of calls made at once, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def group(size, timeout=LONG):
    store = dist.HashStore()
    return together(
        *(lambda r=r: Everybody(gloo_group(store, r, size, timeout, "127.0.0.1"), r, size, timeout) for r in range(size))
    )


@pytest.mark.parametrize("chunk", [collective.CHUNK_ELEMENTS, 7, 1])
def test_the_mean_of_all_twins_in_place(chunk, monkeypatch):
    """Tensors of many shapes, one of them in bf16, that lie across the chunks' borders; some are views of others."""
    monkeypatch.setattr(collective, "CHUNK_ELEMENTS", chunk)
    storages = [torch.randn(30, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    twins = [[s[:7], s[7:8], s[8:8], s[10:22].view(3, 4), s[22:30].bfloat16()] for s in storages]
    before = [[tensor.clone() for tensor in own] for own in twins]
    untouched = [storage[8:10].clone() for storage in storages]
    members = group(3)
    payloads = together(*(lambda r=r: members[r].mean_(twins[r]) for r in range(3)))
    assert payloads == [4 * 28] * 3
    for position in range(5):
        mean = torch.stack([own[position].double() for own in before]).mean(0)
        for own in twins:
            tolerance = 1e-6 if own[position].dtype == torch.float32 else 1e-2
            torch.testing.assert_close(own[position].double(), mean, atol=tolerance, rtol=tolerance)
            assert torch.equal(own[position], twins[0][position]), "everybody must get the bitwise same mean"
    assert all(torch.equal(storage[8:10], rest) for storage, rest in zip(storages, untouched, strict=True))
    for member in members:
        member.close()


def test_the_twins_meet_at_the_rendezvous():
    server = RendezvousServer(SECRET)

    def opened(replica, rank):
        client = RendezvousClient(server.address, SECRET, 60.0, run="test", place=(replica, rank))
        member = open_collective(
            client, replica=replica, replicas=2, rank=rank, device=CPU, host="127.0.0.1", timeout=LONG
        )
        tensor = torch.tensor([float(10 * rank + replica)])
        member.mean_([tensor])
        client.close()
        return float(tensor)

    try:
        means = together(*(lambda p=p: opened(*p) for p in [(0, 0), (1, 0), (0, 1), (1, 1)]))
    finally:
        server.close()
    assert means == [0.5, 0.5, 10.5, 10.5], "a rank was added up with others than its twins"


def test_one_replica_is_alone():
    tensor = torch.ones(3)
    member = open_collective(None, replica=0, replicas=1, rank=0, device=CPU, host="127.0.0.1", timeout=LONG)
    assert isinstance(member, Alone) and member.mean_([tensor]) == 0 and torch.equal(tensor, torch.ones(3))
    member.close()


def test_a_replica_that_comes_too_late_breaks_the_group_for_ever():
    first, _second = group(2, SHORT)
    for _ in range(2):
        with pytest.raises(CollectiveBroken, match=r"waits for everybody.*link_timeout_seconds = 1\..*--resume auto"):
            first.mean_([torch.ones(2)])


def _average(rank, directory):
    """Average for ever; the number of averages, and how it ended."""
    own = gloo_group(dist.FileStore(str(directory / "store"), 3), rank, 3, LONG, "127.0.0.1")
    member, done = Everybody(own, rank, 3, LONG), 0
    while True:
        try:
            member.mean_([torch.ones(1000)])
        except CollectiveBroken as broken:
            return done, str(broken)
        done += 1
        if done == 50:
            (directory / f"going_{rank}").touch()


def test_a_killed_replica_ends_the_others_with_the_reason(tmp_path):
    ranks = Ranks(_average, [0, 1, 2], tmp_path, ())
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("going_*"))) < 3:
        assert time.monotonic() < deadline, "no average was taken"
        time.sleep(0.01)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    answers = ranks.wait(90, expect_missing=frozenset({1}))
    assert answers.keys() == {0, 2}
    for rank, (done, message) in answers.items():
        assert done >= 50
        assert f"replica {rank} cannot average with all 3 replicas" in message and "waits for everybody" in message
