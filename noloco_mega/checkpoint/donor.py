"""How does a rank give its state to twins that join, and train on meanwhile? The words are those of donation.py."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noloco_mega.checkpoint.donation import CRC, KIND, SILENCE_SECONDS, digest_of, send
from noloco_mega.checkpoint.format import RankContent, described
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.transfer import bytes_of, chunks
from noloco_mega.comm.wire import Channel, Message, shown
from noloco_mega.device import Device

BEAT_SECONDS = 1.0
"""How often a donor that has nothing to offer yet says that it is alive."""
MAX_CALLERS = 16
"""Callers that one donor keeps at once."""


@dataclass
class _Offer:
    """One copy of the state, in memory that training does not touch."""

    head: Message
    slices: Message
    buffers: Sequence[memoryview]
    readers: int = 0
    delivered: bool = False


class Donor:
    """Serves one rank's state to its twins in replicas that join. All methods are safe to call from any thread."""

    def __init__(self, listener: Listener, device: Device, *, run_id: str, replica: int, rank: int) -> None:
        """Serve the listener's hellos of kind "state". `rank` is the rank inside the replica."""
        self._device, self._run_id, self._replica, self._rank = device, run_id, replica, rank
        self._changed = threading.Condition()
        self._callers = 0
        self._waiting = 0
        self._offer: _Offer | None = None
        self._expiry: threading.Timer | None = None
        self._closed = False
        listener.register(KIND, self._serve)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for an offer."""
        return self._waiting > 0

    def offer(self, content: RankContent, facts: Mapping[str, Any], seconds: float = 600.0) -> float:
        """Copy the state and let whoever waits, or comes within `seconds`, have it; returns the seconds that took.

        Call it right after an outer step, on all ranks of a replica or on none: a joiner needs its ranks' states of one
        step. The copy takes the place of an earlier one, and is freed when a caller has it whole and nobody else is
        still reading. `facts` is any JSON.
        """
        began = time.monotonic()
        offer = self._staged(content, facts)
        with self._changed:
            self._let_go()
            if not self._closed:
                self._offer = offer
                self._expiry = threading.Timer(seconds, self._expire, (offer,))
                self._expiry.daemon = True
                self._expiry.start()
                self._changed.notify_all()
        return time.monotonic() - began

    def close(self) -> None:
        """Refuse who waits and who comes. Who is being served already has the rest while this process lives."""
        with self._changed:
            self._closed = True
            self._let_go()
            self._changed.notify_all()

    def _staged(self, content: RankContent, facts: Mapping[str, Any]) -> _Offer:
        entries, buffers, pairs = [], [], []
        masters = {stored.layout: stored for stored in content.tensors if stored.kind == "master"}
        for stored in content.tensors:
            if stored.layout is None:
                continue
            entry = {
                "key": stored.key,
                "kind": stored.kind,
                "dtype": str(stored.tensor.dtype).removeprefix("torch."),
                "numel": stored.tensor.numel(),
                "layout": stored.layout,
            }
            entries.append(entry)
            master = masters[stored.layout]
            if stored.kind.startswith("outer.") and _same_bits(stored.tensor, master.tensor):
                entry["same_as"] = master.key
                continue
            host = self._device.host_tensor(stored.tensor)
            pairs.append((host, stored.tensor))
            buffers.append(bytes_of(host))
        self._device.copy_to_host(pairs)
        numbers = {key: value for key, value in content.numbers.items() if key != "losses"}
        head = {"kind": KIND, "replica": self._replica, "tensors": entries, "numbers": numbers, "facts": dict(facts)}
        # As the other side will read them: the digest covers both.
        head = json.loads(json.dumps(head))
        return _Offer(head, {"kind": "slices", **described(content)}, buffers)

    def _let_go(self) -> None:
        """Free the copy once its readers are done; callers hold the lock."""
        self._offer = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self, offer: _Offer) -> None:
        with self._changed:
            if self._offer is offer:
                self._let_go()

    def _serve(self, channel: Channel, hello: Message) -> None:
        """One caller, in a thread of its own."""
        with self._changed:
            reason = self._refusal(hello)
            self._callers += reason is None
        try:
            if reason is None:
                self._give(channel)
            else:
                send(channel, {"kind": "refused", "reason": reason})
        except OSError:
            pass  # the caller is gone, or has given up: it knows
        finally:
            channel.close()
            with self._changed:
                self._callers -= reason is None

    def _refusal(self, hello: Message) -> str | None:
        """Why a caller gets nothing; None if it does. Callers hold the lock."""
        for name, own in (("run_id", self._run_id), ("rank", self._rank)):
            if hello.get(name) != own:
                return f"{name} {shown(hello.get(name))} meets {name} {own!r} of replica {self._replica}"
        if self._closed:
            return f"replica {self._replica} is leaving"
        if self._callers >= MAX_CALLERS:
            return f"replica {self._replica} serves {MAX_CALLERS} already"
        return None

    def _give(self, channel: Channel) -> None:
        offer = self._await_offer(channel)
        if offer is None:
            send(channel, {"kind": "refused", "reason": f"replica {self._replica} is leaving"})
            return
        try:
            _stream(channel, offer)
            channel.expire_in(SILENCE_SECONDS)
            offer.delivered = channel.receive() == {"kind": "ack"} or offer.delivered
        finally:
            with self._changed:
                offer.readers -= 1
                if self._offer is offer and offer.delivered and not offer.readers:
                    self._let_go()

    def _await_offer(self, channel: Channel) -> _Offer | None:
        """The copy, once there is one; None if this donor closes. Raises ConnectionError when the caller is gone."""
        with self._changed:
            self._waiting += 1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._offer is not None or self._closed, BEAT_SECONDS)
                    if self._closed:
                        return None
                    if self._offer is not None:
                        self._offer.readers += 1
                        return self._offer
                if channel.hung_up():
                    raise ConnectionResetError(f"{channel.peer} no longer waits")
                send(channel, {"kind": "wait"})
        finally:
            with self._changed:
                self._waiting -= 1


def _stream(channel: Channel, offer: _Offer) -> None:
    """Send a copy. Raises OSError when the caller is gone or takes nothing any more."""
    digest = digest_of(offer.head, offer.slices)
    try:
        send(channel, offer.head)
        send(channel, offer.slices)
    except ValueError as error:
        send(channel, {"kind": "refused", "reason": f"the state can't be described: {error}"})
        return
    for chunk in chunks(offer.buffers):
        channel.expire_in(SILENCE_SECONDS)
        channel.send_view(chunk)
        channel.write_exactly(CRC.pack(zlib.crc32(chunk)))
        digest.update(chunk)
    send(channel, {"kind": "sha256", "digest": digest.hexdigest()})


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous fp32 tensors are equal bit by bit: −0 is not 0 here, and NaN is NaN."""
    if not tensor.dtype == other.dtype == torch.float32:
        return False
    return torch.equal(tensor.view(torch.int32), other.view(torch.int32))
