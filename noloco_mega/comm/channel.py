"""How do two processes of a run talk over TCP, and how does each know that the other belongs to the run?

Both prove on connecting that they hold the run's secret, over each other's fresh random nonce and with their role in
the proof, so neither a recorded nor a reflected proof is worth anything:

    listener -> dialer   MAGIC, nonce_l
    dialer -> listener   MAGIC, nonce_d, HMAC-SHA256(secret, "dialer", nonce_l, nonce_d)
    listener -> dialer   HMAC-SHA256(secret, "listener", nonce_l, nonce_d), or zeros: refused

The dialer, which chose whom to call, proves first: a port that anybody can reach gives away nothing to guess secrets
from. What follows on the connection is wire.py's.

Traffic is authenticated when the connection is made, and neither encrypted nor authenticated afterwards: whoever can
read or alter packets between the sites can read or alter the run's. Put a VPN below it where that matters.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from noloco_mega.comm.wire import Address, Channel, Message, ProtocolError, spoken

MAGIC = b"NOLOCO1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)

MIN_SECRET_CHARACTERS = 16
HANDSHAKE_SECONDS = 10.0
MAX_UNPROVEN = 128
"""Connections that have not proved themselves yet; one more closes the oldest."""
ACCEPTED_AT_ONCE = 32
"""Strangers taken from the kernel's queue before the answers of others are looked at: a queue that overflows makes a
good caller try again seconds later."""


class WrongSecret(ValueError):  # noqa: N818
    """The other side holds a different secret."""


def read_secret(environ: Mapping[str, str]) -> bytes:
    """The run's secret: NOLOCO_SECRET itself, or the content of the file NOLOCO_SECRET_FILE (white space stripped).

    Raises ValueError if neither or both are set, the file is readable by others, or the secret is too short.
    """
    text, path = environ.get("NOLOCO_SECRET"), environ.get("NOLOCO_SECRET_FILE")
    if text is not None and path is not None:
        raise ValueError("NOLOCO_SECRET and NOLOCO_SECRET_FILE are both set; unset one")
    if path is not None:
        try:
            with open(path) as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise ValueError(f"{path} has mode {mode:04o}: others may read the secret; run: chmod 600 {path}")
                text = file.read()
        except OSError as error:
            raise ValueError(f"cannot read NOLOCO_SECRET_FILE {path}: {error.strerror}") from error
    if text is None:
        raise ValueError(
            "this run has no secret, which its processes prove to each other: make one with "
            "`(umask 077; openssl rand -hex 32 > secret)` and set NOLOCO_SECRET_FILE=secret on every node"
        )
    text = text.strip()
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ValueError(
            f"the secret has {len(text)} characters and needs at least {MIN_SECRET_CHARACTERS}; "
            "make one with `openssl rand -hex 32`"
        )
    return text.encode()


def _proof(secret: bytes, role: str, listener_nonce: bytes, dialer_nonce: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role.encode() + b"\n" + listener_nonce + dialer_nonce, "sha256")


def dial(
    address: Address,
    secret: bytes,
    hello: Message,
    timeout_seconds: float,
    *,
    keep_trying: bool = False,
    refusals_seconds: float | None = None,
) -> Channel:
    """Connect to a Listener, prove ourselves, check its proof and send `hello`, whose "kind" chooses the handler.

    `keep_trying` repeats failed attempts until the timeout, for a listener that may start later; one that must have
    started already is given up with ConnectionRefusedError once its host has refused for `refusals_seconds`. The
    channel comes back without a deadline. Raises WrongSecret, TimeoutError, ProtocolError (no Listener of ours) or
    another OSError.
    """
    deadline = time.monotonic() + timeout_seconds
    pause_seconds = 0.02
    refused_since: float | None = None
    while True:
        limit = min(deadline, time.monotonic() + HANDSHAKE_SECONDS) if keep_trying else deadline
        try:
            return _dial_once(address, secret, hello, limit)
        except ProtocolError:
            raise
        except OSError as error:
            if not keep_trying:
                raise
            if not isinstance(error, ConnectionRefusedError):
                refused_since = None
            elif refused_since is None:
                refused_since = time.monotonic()
            elif refusals_seconds is not None and time.monotonic() - refused_since >= refusals_seconds:
                raise ConnectionRefusedError(f"nobody listens on {spoken(address)} any more: {error}") from error
            if time.monotonic() + pause_seconds >= deadline:
                raise TimeoutError(f"could not reach {spoken(address)} in {timeout_seconds:g} s: {error}") from error
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.5)


def _dial_once(address: Address, secret: bytes, hello: Message, deadline: float) -> Channel:
    connection = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
    channel = Channel(connection, spoken(address))
    channel.deadline = deadline
    try:
        if connection.getsockname() == connection.getpeername():
            # Dialing a free local port can be given that very port as its own, and TCP then connects it to itself.
            raise ConnectionRefusedError(f"nobody listens on {spoken(address)}")
        greeting = channel.read_exactly(len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise ProtocolError(f"{spoken(address)} is not a noloco_mega listener of this version")
        listener_nonce, dialer_nonce = bytes(greeting[len(MAGIC) :]), secrets.token_bytes(NONCE_BYTES)
        channel.write_exactly(MAGIC + dialer_nonce + _proof(secret, "dialer", listener_nonce, dialer_nonce))
        answer = channel.read_exactly(PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(secret, "listener", listener_nonce, dialer_nonce)):
            raise WrongSecret(
                f"{spoken(address)} holds a different secret: give every process of the run the same "
                "NOLOCO_SECRET or NOLOCO_SECRET_FILE"
            )
        channel.send(hello)
    except BaseException:
        channel.close()
        raise
    channel.deadline = None
    return channel


Handler = Callable[[Channel, Message], None]


@dataclass
class _Unproven:
    """A connection that has not answered its nonce yet: all that a stranger can make us hold."""

    connection: socket.socket
    peer: str
    expires: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    answer: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts connections, lets only holders of the secret in, and hands each to the handler its hello asks for.

    One thread holds every connection that has proved nothing yet, at most MAX_UNPROVEN of them and each for at most
    HANDSHAKE_SECONDS, so silent or hostile strangers cost a bounded amount of memory and delay nobody. A connection
    that is let in gets a thread of its own, in which the handler runs as handler(channel, hello); from then on the
    channel is the handler's to close.
    """

    def __init__(
        self, secret: bytes, host: str = "127.0.0.1", port: int = 0, *, public_host: str | None = None
    ) -> None:
        """Listen on `host` (loopback unless told otherwise) and a free port unless one is given.

        `public_host` is the name under which others reach `host`; needed when that is a wildcard. Raises ValueError
        without one, or if the address can't be listened on.
        """
        if public_host is None and host in ("", "0.0.0.0", "::"):
            raise ValueError(f'listening on all addresses ("{host}") needs public_host, the name that others dial')
        self._secret = secret
        self._handlers: dict[str, Handler] = {}
        self._unproven: dict[socket.socket, _Unproven] = {}
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._server = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            taken = "; another process has this port: choose another one, or 0 for any free one"
            hint = taken if error.errno == errno.EADDRINUSE else ""
            raise ValueError(f"cannot listen on {spoken((host, port))}: {error.strerror}{hint}") from error
        self.address: Address = (public_host or host, self._server.getsockname()[1])
        self._server.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"listener {spoken(self.address)}", daemon=True)
        self._thread.start()

    def register(self, kind: str, handler: Handler) -> None:
        """Hand connections whose hello says {"kind": kind} to `handler`."""
        assert kind not in self._handlers, f"two handlers for {kind}"
        self._handlers[kind] = handler

    def close(self) -> None:
        """Stop accepting. Channels that were handed out stay open."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                first = next(iter(self._unproven.values()), None)
                timeout = None if first is None else max(0.0, first.expires - time.monotonic())
                for key, _ in selector.select(timeout):
                    if key.fileobj is self._woken:
                        self._shut()
                        return
                    if key.fileobj is self._server:
                        for _ in range(ACCEPTED_AT_ONCE):
                            if not self._accept(selector):
                                break
                    elif (unproven := self._unproven.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._advance(selector, unproven)
                self._expire(selector)

    def _shut(self) -> None:
        for connection in (self._server, self._woken, *self._unproven):
            connection.close()
        self._unproven.clear()

    def _expire(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for unproven in list(self._unproven.values()):  # oldest first
            if unproven.expires > now:
                return
            self._drop(selector, unproven)

    def _accept(self, selector: selectors.BaseSelector) -> bool:
        """Take one more stranger, if one is there and there is room for it."""
        try:
            connection, peer = self._server.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no file descriptor left: take our oldest stranger's
                for unproven in list(self._unproven.values())[:1]:
                    self._drop(selector, unproven)
                time.sleep(0.01)
            return False
        if len(self._unproven) >= MAX_UNPROVEN:
            self._drop(selector, next(iter(self._unproven.values())))
        connection.setblocking(False)
        unproven = _Unproven(connection, spoken(peer[:2]), time.monotonic() + HANDSHAKE_SECONDS)
        self._unproven[connection] = unproven
        selector.register(connection, selectors.EVENT_READ)
        self._tell(selector, unproven, MAGIC + unproven.nonce)
        return True

    def _tell(self, selector: selectors.BaseSelector, unproven: _Unproven, answer: bytes) -> bool:
        """Write a few bytes, which fit the empty buffer of a connection that is alive."""
        try:
            whole = unproven.connection.send(answer) == len(answer)
        except OSError:
            whole = False
        if not whole:
            self._drop(selector, unproven)
        return whole

    def _drop(self, selector: selectors.BaseSelector, unproven: _Unproven) -> None:
        self._release(selector, unproven)
        unproven.connection.close()

    def _release(self, selector: selectors.BaseSelector, unproven: _Unproven) -> None:
        selector.unregister(unproven.connection)
        del self._unproven[unproven.connection]

    def _advance(self, selector: selectors.BaseSelector, unproven: _Unproven) -> None:
        """Read more of a stranger's answer; when it is whole, let the stranger in or refuse it."""
        size = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
        try:
            more = unproven.connection.recv(size - len(unproven.answer))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        unproven.answer += more
        if not more or unproven.answer[: len(MAGIC)] != MAGIC[: len(unproven.answer)]:
            self._drop(selector, unproven)
            return
        if len(unproven.answer) < size:
            return
        dialer_nonce, proof = bytes(unproven.answer[len(MAGIC) : -PROOF_BYTES]), unproven.answer[-PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, "dialer", unproven.nonce, dialer_nonce)):
            if self._tell(selector, unproven, REFUSED):
                self._drop(selector, unproven)
            return
        if self._tell(selector, unproven, _proof(self._secret, "listener", unproven.nonce, dialer_nonce)):
            self._release(selector, unproven)
            thread = threading.Thread(target=self._greet, args=(unproven,), name=f"from {unproven.peer}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process may have no more threads now; the caller will try again
                unproven.connection.close()

    def _greet(self, proven: _Unproven) -> None:
        channel = Channel(proven.connection, proven.peer)
        channel.expire_in(HANDSHAKE_SECONDS)
        try:
            hello = channel.receive()
            handler = self._handlers.get(str(hello.get("kind")))
            if handler is None:
                channel.send({"kind": "refused", "reason": f"{spoken(self.address)} does not serve this kind of hello"})
        except OSError:
            handler = None  # whoever called is gone, and nobody here was waiting for it
        if handler is None:
            channel.close()
            return
        channel.deadline = None
        try:
            handler(channel, hello)
        except BaseException:
            channel.close()  # a fault of ours, which the thread's end reports
            raise
