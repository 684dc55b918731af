"""How does a replica take over a live one's state? Each rank fetches its twin's, as it was at one outer boundary.

φ and δ do not change inside a phase, so a copy taken right after an outer step is the whole state of a rank at that
step, and the donor trains on while the copy travels:

    joiner -> donor   hello: run, replica, rank
    donor  -> joiner  {"kind": "wait"} every second until its next outer step, or {"kind": "refused", "reason"}
    donor  -> joiner  {"kind": "state", "replica", "tensors", "numbers", "facts"}
    donor  -> joiner  {"kind": "slices", "layouts", "parameters"}
    donor  -> joiner  the tensors' bytes in chunks, each followed by its CRC-32 (4 bytes, big endian)
    donor  -> joiner  {"kind": "sha256", "digest"} over both messages and all bytes
    joiner -> donor   {"kind": "ack"}

The words are those of a checkpoint's PART (see format.py). A tensor whose bits are an earlier one's, as φ's are those
of the masters right after NoLoCo's step, does not travel again: its entry says {"same_as": KEY}. Losses that wait for a
row of the journal and random generators stay with the donor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from noloco_mega.checkpoint.format import RankContent, described
from noloco_mega.comm.channel import Listener, WrongSecret, dial
from noloco_mega.comm.transfer import bytes_of, chunks
from noloco_mega.comm.wire import Address, Channel, Message, shown
from noloco_mega.device import Device

KIND = "state"
CRC = struct.Struct(">I")
BEAT_SECONDS = 1.0
"""How often a donor that has nothing to offer yet says that it is alive."""
SILENCE_SECONDS = 30.0
"""How long either side waits for the other's next message or chunk: the donor trains meanwhile."""
MAX_CALLERS = 16
"""Callers that one donor keeps at once."""
MAX_INNER_KINDS = 8
"""Tensors per master that an inner optimizer may bring. AdamW has two."""


class DonationFailed(ConnectionError):  # noqa: N818
    """This donor's state did not come, or is not for this rank; another donor may do better."""


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """What a rank can take over: how its masters are cut, and what must come for each of them."""

    layouts: Mapping[str, Any]
    """As `format.described` gives them."""
    parameters: Mapping[str, Any]
    """As `format.described` gives them."""
    elements: Mapping[str, int]
    """Layout -> elements of each of its tensors."""
    kinds: frozenset[str]
    """The masters and what the outer optimizer keeps. The inner one's kinds are not known before its first step."""

    def misfit(self, slices: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str | None:
        """Why tensors of these slices and entries are not for this rank, naming what differs; None if they are."""
        parameters = slices.get("parameters")
        if parameters != self.parameters:
            return f"parameters differ: {_first_difference(parameters, self.parameters)}"
        if slices.get("layouts") != self.layouts:
            return f"masters hold other parts of them: {_first_difference(slices.get('layouts'), self.layouts)}"
        for entry in entries:
            there = (entry.get("numel"), entry.get("dtype"))
            here = (self.elements.get(str(entry.get("layout"))), "float32")
            if there != here:
                return f"{entry.get('key')} has {there[0]} elements of {there[1]}, here {here[0]} of {here[1]}"
        kinds = {str(entry.get("kind")) for entry in entries}
        inner = sorted(kinds - self.kinds)
        if self.kinds - kinds or any(kind.startswith("outer.") for kind in inner) or len(inner) > MAX_INNER_KINDS:
            return f"it keeps {', '.join(sorted(kinds))}, here {', '.join(sorted(self.kinds))} and an inner optimizer's"
        keys = sorted(str(entry.get("key")) for entry in entries)
        if keys != sorted(f"{kind}.{layout}" for kind in kinds for layout in self.elements):
            return f"it does not hold each kind of each master once: {', '.join(keys)}"
        return None


@dataclass(frozen=True, kw_only=True)
class Donated:
    """A rank's state as its twin had it, on the CPU, verified."""

    replica: int
    """The donor."""
    tensors: Mapping[str, torch.Tensor]
    """By key; two of them may share memory."""
    entries: Sequence[Mapping[str, Any]]
    """What each of them is, as in a PART."""
    slices: Mapping[str, Any]
    """Layouts and parameters, as `format.described` gives them."""
    numbers: Mapping[str, Any]
    """As `RankState.collect` gives them, without losses."""
    facts: Mapping[str, Any]
    """What the donor said beside it."""
    digest: str
    """SHA-256 of all that came, in hexadecimal."""
    received_bytes: int
    seconds: float
    """From dialing to the last byte, the wait for the donor's outer step included."""


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
                _send(channel, {"kind": "refused", "reason": reason})
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
            _send(channel, {"kind": "refused", "reason": f"replica {self._replica} is leaving"})
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
                _send(channel, {"kind": "wait"})
        finally:
            with self._changed:
                self._waiting -= 1


def fetch(
    address: Address,
    secret: bytes,
    shape: RankShape,
    *,
    run_id: str,
    replica: int,
    rank: int,
    deadline_seconds: float,
    silence_seconds: float = SILENCE_SECONDS,
) -> Donated:
    """The state of this rank's twin behind `address`, as of the donor's next outer step. `replica` is the own one.

    All of it is here within `deadline_seconds`, and every message and chunk within `silence_seconds` of the one before,
    or this raises DonationFailed with the reason; so it does for what `shape` does not allow, before any memory is
    taken, and for what arrives damaged or is not finite.
    """
    began = time.monotonic()
    hello = {"kind": KIND, "run_id": run_id, "replica": replica, "rank": rank}
    try:
        channel = dial(address, secret, hello, min(deadline_seconds, silence_seconds))
        with contextlib.closing(channel):
            return _Reader(channel, began, deadline_seconds, silence_seconds).read(shape)
    except DonationFailed:
        raise
    except (OSError, WrongSecret) as error:
        raise DonationFailed(f"the donor failed: {error}") from error


class _Reader:
    """The joiner's end of one transfer."""

    def __init__(self, channel: Channel, began: float, deadline_seconds: float, silence_seconds: float) -> None:
        self._channel, self._began, self._silence_seconds = channel, began, silence_seconds
        self._deadline = began + deadline_seconds

    def read(self, shape: RankShape) -> Donated:
        head = self._receive()
        while head.get("kind") == "wait":
            head = self._receive()
        slices = self._receive()
        entries, numbers, facts = head.get("tensors"), head.get("numbers"), head.get("facts")
        if not (isinstance(entries, list) and all(isinstance(e, dict) for e in entries)) or not (
            isinstance(numbers, dict) and isinstance(facts, dict) and isinstance(head.get("replica"), int)
        ):
            self._fail("sent a state that is none of this version")
        if (reason := shape.misfit(slices, entries)) is not None:
            self._fail(f"holds another state than this rank needs: {reason}")
        tensors, digest = self._tensors(entries, _digest(head, slices))
        if self._receive() != {"kind": "sha256", "digest": digest}:
            self._fail("sent data that its SHA-256 does not fit")
        for key, tensor in tensors.items():
            if not math.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float64)):
                self._fail(f"holds a {key} that is not finite")
        with contextlib.suppress(OSError):  # the state is here whatever the donor hears of it
            self._channel.send({"kind": "ack"})
        return Donated(
            replica=head["replica"],
            tensors=tensors,
            entries=entries,
            slices={"layouts": slices["layouts"], "parameters": slices["parameters"]},
            numbers=numbers,
            facts=facts,
            digest=digest,
            received_bytes=self._channel.received_bytes,
            seconds=time.monotonic() - self._began,
        )

    def _tensors(self, entries: Sequence[Mapping[str, Any]], digest: Any) -> tuple[dict[str, torch.Tensor], str]:
        """The tensors of these entries, which fit, and the SHA-256 over what came before and their bytes."""
        found: dict[str, torch.Tensor] = {}
        for entry in entries:
            key, same_as = str(entry["key"]), str(entry.get("same_as", ""))
            if not same_as:
                tensor = found[key] = torch.empty(entry["numel"], dtype=torch.float32)
                for chunk in chunks([bytes_of(tensor)]):
                    self._arm()
                    self._channel.receive_into(chunk)
                    digest.update(chunk)
                    if CRC.unpack(self._channel.read_exactly(CRC.size)) != (zlib.crc32(chunk),):
                        self._fail(f"sent a part of {key} that arrived with a wrong checksum")
            elif same_as in found and found[same_as].numel() == entry["numel"]:
                found[key] = found[same_as]
            else:
                self._fail(f"sent no {same_as} that {key} could equal")
        return found, digest.hexdigest()

    def _receive(self) -> Message:
        self._arm()
        message = self._channel.receive()
        if message.get("kind") == "refused":
            self._fail(f"refuses: {shown(message.get('reason'), 1000)}")
        return message

    def _arm(self) -> None:
        self._channel.deadline = min(self._deadline, time.monotonic() + self._silence_seconds)

    def _fail(self, reason: str) -> NoReturn:
        raise DonationFailed(f"{self._channel.peer} {reason}")


def _stream(channel: Channel, offer: _Offer) -> None:
    """Send a copy. Raises OSError when the caller is gone or takes nothing any more."""
    digest = _digest(offer.head, offer.slices)
    try:
        _send(channel, offer.head)
        _send(channel, offer.slices)
    except ValueError as error:
        _send(channel, {"kind": "refused", "reason": f"the state can't be described: {error}"})
        return
    for chunk in chunks(offer.buffers):
        channel.expire_in(SILENCE_SECONDS)
        channel.send_view(chunk)
        channel.write_exactly(CRC.pack(zlib.crc32(chunk)))
        digest.update(chunk)
    _send(channel, {"kind": "sha256", "digest": digest.hexdigest()})


def _send(channel: Channel, message: Message) -> None:
    channel.expire_in(SILENCE_SECONDS)
    channel.send(message)


def _digest(*messages: Message) -> Any:
    """A SHA-256 that has seen these messages."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode())
    return digest


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous fp32 tensors are equal bit by bit: −0 is not 0 here, and NaN is NaN."""
    if not tensor.dtype == other.dtype == torch.float32:
        return False
    return torch.equal(tensor.view(torch.int32), other.view(torch.int32))


def _first_difference(there: Any, here: Mapping[str, Any]) -> str:
    """The first name under which two mappings hold something else."""
    there = there if isinstance(there, dict) else {}
    for name in [*here, *there]:
        told = [json.dumps(side[name]) if name in side else "absent" for side in (there, here)]
        if told[0] != told[1]:
            return f"{str(name)[:200]} is {told[0][:200]} there, {told[1][:200]} here"
    return "in kind"
