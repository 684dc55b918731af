"""Are all ranks of this replica alive, and what does its leader tell them between two steps?

Every other rank keeps one connection to its replica's leader open. When a process ends, the kernel closes it, so that
both sides know at once; a collective of gloo's may wait for a dead rank until its timeout. A rank that is suspended
stays connected and falls silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from noloco_mega.comm.channel import Listener, dial
from noloco_mega.comm.wire import Address, Channel, Message

BEAT_FRACTION = 0.5
"""Of the heartbeat interval: how often a rank shows its leader that it runs."""

Heard = Callable[[int, Message], None]
"""Takes the sender's rank in the replica and its message; called from a thread of the connection's."""


class Siblings:
    """One rank's line to its replica: to everybody on the leader (rank 0), to the leader elsewhere.

    All methods are safe to call from any thread.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        listener: Listener,
        secret: bytes,
        run_id: str,
        replica: int,
        heartbeat_seconds: float,
        lost: Callable[[int], None],
    ) -> None:
        """`lost` is called once for a rank whose process has ended without saying `leave`."""
        self._rank, self._secret, self._run_id, self._replica = rank, secret, run_id, replica
        self._others = frozenset(range(1, size)) if rank == 0 else frozenset({0})
        self._lost = lost
        self._heard: Heard | None = None
        self._early: list[tuple[int, Message]] = []
        self._hearing = threading.Lock()
        self._beat_seconds = BEAT_FRACTION * heartbeat_seconds
        self._channels: dict[int, Channel] = {}
        self._last: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._closed = threading.Event()
        self._sending = threading.Lock()
        if rank == 0:
            listener.register("sibling", self._arrived)

    def connect(self, leader: Address, timeout_seconds: float) -> None:
        """On every rank but the leader: connect to it. Raises OSError."""
        hello = {"kind": "sibling", "run": self._run_id, "replica": self._replica, "rank": self._rank}
        self._serve(0, dial(leader, self._secret, hello, timeout_seconds, keep_trying=True))
        threading.Thread(target=self._beat, name="sign of life", daemon=True).start()

    def hear(self, heard: Heard) -> None:
        """From now on `heard` gets the messages, those first that have come already: the ranks of a replica are not
        ready at the same time."""
        with self._hearing:
            self._heard = heard
            for rank, message in self._early:
                heard(rank, message)
            self._early.clear()

    def tell(self, message: Message) -> None:
        """Send a message to everybody this rank has a line to; one that is gone misses it.

        Messages are few and small, so that the kernel takes them for a suspended sibling too.
        """
        for rank, channel in list(self._channels.items()):
            try:
                with self._sending:
                    channel.send(message)
            except OSError:
                self._ended(rank, channel)

    def silent(self, seconds: float) -> list[int]:
        """On the leader: the ranks that have not been heard of for so long."""
        now = time.monotonic()
        return sorted(rank for rank, last in list(self._last.items()) if now - last > seconds)

    def forgive(self) -> None:
        """Count every silence from now on: this process itself did not run for a while."""
        now = time.monotonic()
        self._last.update(dict.fromkeys(self._last, now))

    def leave(self) -> None:
        """Say that this rank ends as it should, and hang up."""
        self.tell({"leave": True})
        self._closed.set()
        for channel in list(self._channels.values()):
            channel.close()

    def _arrived(self, channel: Channel, hello: Message) -> None:
        rank = hello.get("rank")
        mine = hello.get("run") == self._run_id and hello.get("replica") == self._replica
        if not mine or not isinstance(rank, int) or rank not in self._others or rank in self._channels:
            channel.close()
            return
        self._serve(rank, channel)

    def _serve(self, rank: int, channel: Channel) -> None:
        self._channels[rank] = channel
        self._last[rank] = time.monotonic()
        threading.Thread(target=self._listen, args=(rank, channel), name=f"sibling {rank}", daemon=True).start()

    def _listen(self, rank: int, channel: Channel) -> None:
        while True:
            try:
                message = channel.receive()
            except OSError:
                self._ended(rank, channel)
                return
            self._last[rank] = time.monotonic()
            if message.get("leave"):
                self._leaving.add(rank)
            elif "beat" not in message:
                self._deliver(rank, message)

    def _deliver(self, rank: int, message: Message) -> None:
        with self._hearing:
            if self._heard is None:
                self._early.append((rank, message))
            else:
                self._heard(rank, message)

    def _ended(self, rank: int, channel: Channel) -> None:
        known = self._channels.pop(rank, None)
        self._last.pop(rank, None)
        channel.close()
        if known is not None and rank not in self._leaving and not self._closed.is_set():
            self._lost(rank)

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            self.tell({"beat": True})
