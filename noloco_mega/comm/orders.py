"""What has a replica's leader decided for all its ranks, and from when on do they follow?

The leader learns things at any time, from threads of its own; what follows from them must happen between the same two
inner steps on all ranks. So it lists orders, their count travels in the one reduction that ends every inner step
(membership.agree), and where the count has grown the new orders are handed out.
"""

from __future__ import annotations

import json
import threading

import torch
import torch.distributed as dist

from noloco_mega.comm.wire import Message


class Orders:
    """One rank's end. `give` is for the leader, from any thread."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, leads: bool) -> None:
        """`group` holds all ranks of the replica; its rank 0 leads."""
        self._group, self._device, self._leads = group, device, leads
        self._lock = threading.Lock()
        self._waiting: list[Message] = []
        self._given = 0
        self._taken = 0

    def give(self, order: Message) -> None:
        """Let all ranks follow `order` after the inner step that is under way."""
        with self._lock:
            self._waiting.append(order)
            self._given += 1

    @property
    def count(self) -> int:
        """How many the leader has given so far."""
        return self._given

    def take(self, count: int) -> list[Message]:
        """The orders up to number `count` that this rank has not had yet. Collective over the replica if there are any.

        All ranks pass the same count.
        """
        new = count - self._taken
        if new <= 0:
            return []
        self._taken = count
        text = b""
        if self._leads:
            with self._lock:
                orders, self._waiting = self._waiting[:new], self._waiting[new:]
            text = json.dumps(orders).encode()
        size = torch.tensor([len(text)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, group_src=0, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if self._leads:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, group_src=0, group=self._group)
        return json.loads(bytes(data.cpu().numpy()))
