"""How do two buffers cross one connection at once? Out of and into the tensors' own memory, with a checksum.

Each side sends its bytes, {"kind": "checksum", "crc32": ...} over them, and {"kind": "ack"} once it has verified what
it received. One thread sends while the caller's receives, so neither side waits for the other one to turn around.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from noloco_mega.comm.wire import Channel

CHUNK_BYTES = 1 << 20
"""What is checksummed while it is still in the processor's cache."""


class WrongChecksum(Exception):  # noqa: N818
    """What arrived is not what was sent."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory, without a copy. Raises ValueError unless it is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"only a contiguous tensor on the CPU can be exchanged; this one is on {tensor.device} "
            f"with strides {tensor.stride()}"
        )
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def swap_buffers(channel: Channel, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> bool:
    """Send `outgoing` and fill `incoming` at once, by the channel's deadline; whether the peer acknowledged ours.

    Nothing touches the buffers any more when this returns or raises. Raises WrongChecksum if what came is damaged and
    OSError if it did not come whole; `incoming` then holds anything.
    """
    sender = _Sender(channel, outgoing)
    sender.start()
    try:
        checksum = 0
        for chunk in chunks(incoming):
            channel.receive_into(chunk)
            checksum = zlib.crc32(chunk, checksum)
        intact = channel.receive() == {"kind": "checksum", "crc32": checksum}
    except BaseException as error:
        broke_first = sender.error
        channel.interrupt()
        sender.join()
        if broke_first is not None and isinstance(error, OSError):
            raise broke_first from error  # after it, receiving just finds the connection ended
        raise
    sender.join()
    if not intact:
        with contextlib.suppress(OSError):  # a peer that is gone needs no telling
            channel.send({"kind": "damaged"})
        raise WrongChecksum(f"the data from {channel.peer} arrived with a wrong checksum")
    if sender.error is not None:
        return False
    try:
        channel.send({"kind": "ack"})
        return channel.receive() == {"kind": "ack"}
    except OSError:
        return False  # the peer's data is here and verified: whether it has ours is all that stays open


class _Sender(threading.Thread):
    """Sends buffers and the checksum over them; `error` says what stopped it, if anything did."""

    def __init__(self, channel: Channel, buffers: Sequence[memoryview]) -> None:
        super().__init__(name=f"sending to {channel.peer}", daemon=True)
        self._channel = channel
        self._buffers = buffers
        self.error: OSError | None = None

    def run(self) -> None:
        checksum = 0
        try:
            for chunk in chunks(self._buffers):
                checksum = zlib.crc32(chunk, checksum)
                self._channel.send_view(chunk)
            self._channel.send({"kind": "checksum", "crc32": checksum})
        except OSError as error:
            self.error = error


def chunks(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """The buffers in pieces of CHUNK_BYTES, in order; the last piece of each may be shorter."""
    for buffer in buffers:
        for start in range(0, len(buffer), CHUNK_BYTES):
            yield buffer[start : start + CHUNK_BYTES]
