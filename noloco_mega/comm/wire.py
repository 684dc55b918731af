"""What goes over one connection, and by when? Control messages, and raw bytes where both sides know how many.

A control message is a 4-byte big-endian length and a JSON object. Lengths are checked before anything is allocated, and
nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

Address = tuple[str, int]
Message = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 20
LENGTH = struct.Struct(">I")
SILENCE_SECONDS = 10
"""A peer is gone whose kernel acknowledges nothing for so long, or that takes nothing of what we send. One that is
merely quiet is not: its kernel answers."""

MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What reading the fields of a message may raise that no process of this version sends: JSON knows Infinity, and
numbers of 4,000 digits."""


class ProtocolError(ConnectionError):
    """The other side sent what no process of this version sends."""


class Channel:
    """One connection between two processes that have proved themselves to each other.

    `deadline` (a time.monotonic() value, or None for no limit) holds for every operation. One thread may send while
    another one receives. An operation raises TimeoutError past the deadline, ConnectionError when the peer is gone and
    ProtocolError on what is no message; after any of them the stream is out of step and only `close` makes sense.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        _prepare(connection)
        self._socket = connection
        self.peer = peer
        self.deadline: float | None = None
        self.sent_bytes = 0
        """Bytes that send_view has handed to the kernel (messages not counted)."""
        self.received_bytes = 0
        """Bytes that receive_into has taken from the kernel (messages not counted)."""
        self.on_moved: Callable[[], None] = lambda: None
        """Called whenever one of the two has grown; may set the deadline anew."""

    def expire_in(self, seconds: float | None) -> None:
        """Set the deadline, counted from now."""
        self.deadline = None if seconds is None else time.monotonic() + seconds

    def send(self, message: Message) -> None:
        """Send one control message. Raises ValueError if it is larger than MAX_MESSAGE_BYTES."""
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a control message of {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        self.write_exactly(LENGTH.pack(len(body)) + body)

    def receive(self) -> Message:
        """The next control message."""
        (size,) = LENGTH.unpack(self.read_exactly(LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{self.peer} announced a message of {size} bytes; the limit is {MAX_MESSAGE_BYTES}")
        try:
            message = json.loads(self.read_exactly(size))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{self.peer} sent a message that is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"{self.peer} sent a {type(message).__name__} where a JSON object belongs")
        return message

    def send_view(self, view: memoryview) -> None:
        """Send all bytes of a view, straight from its memory."""
        while view:
            count = self._write(view)
            self.sent_bytes += count
            self.on_moved()
            view = view[count:]

    def receive_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes, straight into its memory."""
        while view:
            count = self._read(view)
            self.received_bytes += count
            self.on_moved()
            view = view[count:]

    def fileno(self) -> int:
        """The connection's file descriptor, for a selector that waits for many channels at once."""
        return self._socket.fileno()

    def hung_up(self) -> bool:
        """Whether the peer has closed its end (or is gone) and left nothing to read. For a channel nobody reads now."""
        try:
            self._socket.settimeout(0)
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def interrupt(self) -> None:
        """End both directions now: operations of other threads on this channel raise ConnectionError."""
        with contextlib.suppress(OSError):  # not connected any more: nothing to end
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._socket.close()

    def read_exactly(self, size: int) -> bytearray:
        """The next `size` bytes, for what is small and no message; not counted."""
        buffer = bytearray(size)
        rest = memoryview(buffer)
        while rest:
            rest = rest[self._read(rest) :]
        return buffer

    def write_exactly(self, data: bytes) -> None:
        """Send a few bytes that are no message; not counted."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._write(rest) :]

    def _read(self, view: memoryview) -> int:
        count = self._until_deadline(lambda: self._socket.recv_into(view))
        if count == 0:
            raise ConnectionResetError(f"{self.peer} closed the connection")
        return count

    def _write(self, view: memoryview) -> int:
        return self._until_deadline(lambda: self._socket.send(view))

    def _until_deadline(self, call: Callable[[], int]) -> int:
        """One socket call. Another thread may move the deadline while it blocks."""
        while True:
            self._arm()
            try:
                return call()
            except TimeoutError as error:
                if error.errno is not None:  # the kernel's own verdict, not our deadline
                    raise TimeoutError(error.errno, f"{self.peer} is silent: {error.strerror}") from error

    def _arm(self) -> None:
        """Bound the next socket call. A second thread may do the same meanwhile: the deadline is one for both."""
        if self.deadline is None:
            self._socket.settimeout(None)
            return
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"the deadline passed while waiting for {self.peer}")
        self._socket.settimeout(remaining)


def _prepare(connection: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose host or network is gone."""
    options = {
        (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
        (socket.IPPROTO_TCP, "TCP_NODELAY"): 1,
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): SILENCE_SECONDS // 2,
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 2,
        (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): SILENCE_SECONDS * 1000,
    }
    for (level, name), value in options.items():
        if hasattr(socket, name):  # the last four are Linux's
            connection.setsockopt(level, getattr(socket, name), value)


def shown(value: Any, characters: int = 200) -> str:
    """What a peer has sent, as a message to the user or to a peer may quote it: printable, and short whatever it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = characters
    return short.repr(value)


def spoken(address: Address) -> str:
    """An address as messages print it: host:port."""
    return f"{address[0]}:{address[1]}"
