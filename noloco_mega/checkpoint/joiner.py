"""How does a rank that joins fetch its twin's state, and what does it take? The words are those of donation.py."""

from __future__ import annotations

import contextlib
import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from noloco_mega.checkpoint.donation import CRC, KIND, SILENCE_SECONDS, digest_of
from noloco_mega.comm.channel import WrongSecret, dial
from noloco_mega.comm.transfer import bytes_of, chunks
from noloco_mega.comm.wire import Address, Channel, Message, shown

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
        tensors, digest = self._tensors(entries, digest_of(head, slices))
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


def _first_difference(there: Any, here: Mapping[str, Any]) -> str:
    """The first name under which two mappings hold something else."""
    there = there if isinstance(there, dict) else {}
    for name in [*here, *there]:
        told = [json.dumps(side[name]) if name in side else "absent" for side in (there, here)]
        if told[0] != told[1]:
            return f"{str(name)[:200]} is {told[0][:200]} there, {told[1][:200]} here"
    return "in kind"
