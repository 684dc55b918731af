"""A replica's ranks: the leader knows at once when one has ended, in time when one hangs, and all follow its orders."""

import os
import signal
import time

import torch
import torch.distributed as dist

from noloco_mega.comm.channel import Listener
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.siblings import Siblings
from tests.harness import Ranks, run_ranks

SECRET = b"a secret for this test only"
BEAT_SECONDS = 0.4


def line(rank, listener, heard, lost):
    siblings = Siblings(
        rank=rank, size=3, listener=listener, secret=SECRET, run_id="run", replica=0, heartbeat_seconds=BEAT_SECONDS,
        lost=lost,
    )  # fmt: skip
    if heard is not None:
        siblings.hear(heard)
    return siblings


def sibling(rank, directory, leader, leaves):
    """A rank that answers "ping", and ends with "stop": by itself or with a farewell."""
    heard = []
    own = line(rank + 1, Listener(SECRET), lambda sender, message: heard.append(message), lambda sender: None)
    own.connect(leader, 20.0)
    while {"stop": True} not in heard:
        if {"ping": True} in heard:
            heard.remove({"ping": True})
            own.tell({"pong": rank + 1})
        time.sleep(0.01)
    if leaves:
        own.leave()
    else:
        os._exit(0)


def until(condition, seconds=40.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


class Leader:
    def __init__(self, directory, leaves=False):
        self.heard, self.lost, listener = [], [], Listener(SECRET)
        self.line = line(0, listener, lambda rank, message: self.heard.append((rank, message)), self.lost.append)
        self.ranks = Ranks(sibling, [0, 1], directory, (listener.address, leaves))
        until(lambda: len(self.line._channels) == 2)


def test_messages_go_both_ways_and_a_kill_is_known_at_once(tmp_path):
    leader = Leader(tmp_path)
    try:
        leader.line.tell({"ping": True})
        until(lambda: len(leader.heard) == 2)
        assert sorted(leader.heard, key=str) == [(1, {"pong": 1}), (2, {"pong": 2})]
        leader.ranks.processes[1].kill()
        until(lambda: leader.lost == [2])
        leader.line.tell({"ping": True})
        until(lambda: len(leader.heard) == 3)
    finally:
        leader.ranks.stop()


def test_a_suspended_rank_is_silent_and_not_lost(tmp_path):
    leader = Leader(tmp_path)
    pid = leader.ranks.processes[0].pid
    try:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: leader.line.silent(5 * BEAT_SECONDS) == [1])
        leader.line.forgive()
        assert leader.line.silent(5 * BEAT_SECONDS) == [] and leader.lost == []
        os.kill(pid, signal.SIGCONT)
        until(lambda: leader.line.silent(2 * BEAT_SECONDS) == [])
    finally:
        os.kill(pid, signal.SIGCONT)
        leader.ranks.stop()


def test_a_farewell_is_no_loss(tmp_path):
    leader = Leader(tmp_path, leaves=True)
    leader.line.tell({"stop": True})
    leader.ranks.wait(40)
    until(lambda: not leader.line._channels)
    assert leader.lost == []


def follow(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    orders = Orders(dist.group.WORLD, torch.device("cpu"), rank == 0)
    taken = []
    for step in range(3):
        if rank == 0:
            for number in range(step):
                orders.give({"step": step, "number": number})
        count = torch.tensor(orders.count if rank == 0 else 1 << 60)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        taken.append(orders.take(int(count)))
    return taken


def test_all_ranks_take_the_same_orders_at_the_same_step(tmp_path):
    first, second = run_ranks(follow, 2, tmp_path)
    assert first == second == [[], [{"step": 1, "number": 0}], [{"step": 2, "number": 0}, {"step": 2, "number": 1}]]


def test_what_comes_before_a_rank_is_ready_is_heard_then_in_order():
    listener, heard = Listener(SECRET), []
    leader = line(0, listener, None, lambda rank: None)
    rank = line(1, Listener(SECRET), None, lambda rank: None)
    rank.connect(listener.address, 20.0)
    until(lambda: leader._channels)
    leader.tell({"reached": 1})
    leader.tell({"dead": 2})
    until(lambda: len(rank._early) == 2)
    rank.hear(lambda sender, message: heard.append((sender, message)))
    leader.tell({"back": 2})
    until(lambda: len(heard) == 3)
    assert heard == [(0, {"reached": 1}), (0, {"dead": 2}), (0, {"back": 2})]
    rank.leave()
    leader.leave()
