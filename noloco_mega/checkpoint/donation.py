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

import hashlib
import json
import struct
from typing import Any

from noloco_mega.comm.wire import Channel, Message

KIND = "state"
CRC = struct.Struct(">I")
SILENCE_SECONDS = 30.0
"""How long either side waits for the other's next message or chunk: the donor trains meanwhile."""


def send(channel: Channel, message: Message) -> None:
    """Send a message that the other side takes within SILENCE_SECONDS. Raises OSError."""
    channel.expire_in(SILENCE_SECONDS)
    channel.send(message)


def digest_of(*messages: Message) -> Any:
    """A SHA-256 that has seen these messages."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode())
    return digest
