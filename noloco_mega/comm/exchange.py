"""How do two ranks swap buffers by a deadline? Each gets `Received` or `Missed` for its partner, never an exception.

The twins of a pair (the same rank inside either replica) meet on one fresh TCP connection per outer step: the lower
replica dials, the higher one listens. Then each sends and receives at once, straight out of and into the tensors'
memory:

    dialer -> listener   hello: run, fingerprint, outer step, replica, rank, dtype and size of every tensor
    listener -> dialer   its own hello, or {"kind": "refused", "reason": ..., "outer_step": the listener's}
    both ways            payload, its CRC-32, and {"kind": "ack"} once the other side's payload is verified

Received means "I have all of my partner's data, and its checksum is right". Two partners need not agree: one may have
received while the other one missed, when the connection breaks between the two ends of the transfer.

Until the two have met, the launch's deadline holds; then the transfer has time of its own, which follows the link's
speed (pace.py). Each side decides that for itself, and the other one sees the connection end.

A connection of its own per pair and outer step keeps one partner's death from touching any other exchange, and plain
TCP with TCP_USER_TIMEOUT sees the death when it happens. On loopback with two cores it moves 1.1 GB/s per direction,
1.4 times what pyzmq does and half of what bare sockets do; the other half is the checksum, computed at both ends,
without which it is level with them (tools/bench/exchange.py). Links that such an exchange is for carry less than that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from noloco_mega.comm.channel import Listener, WrongSecret, dial
from noloco_mega.comm.pace import Pace, Speeds
from noloco_mega.comm.seats import Seats
from noloco_mega.comm.transfer import WrongChecksum, bytes_of, swap_buffers
from noloco_mega.comm.wire import SILENCE_SECONDS, Address, Channel, Message, shown

REFUSALS_SECONDS = 1.0
"""How long a partner's host may refuse our connections. All listeners exist before the first launch, so a refusal means
that the partner's process is gone; the time is for a host whose accept queue overflows or whose network stumbles."""
SLACK_SECONDS = 2.0
"""How long after the deadline `Pending.wait` still waits for its threads to notice it."""


@dataclass(frozen=True)
class Received:
    """All of the partner's data is in the receive buffers, verified."""

    partner: int
    seconds: float
    """From launch to the end of this exchange."""
    payload_bytes: int
    """Bytes received, e.g. 4 per fp32 element."""
    acknowledged: bool
    """Whether the partner said that it has all of ours; if not, it may well have missed us."""


@dataclass(frozen=True)
class Missed:
    """The partner's data did not arrive whole; the receive buffers hold anything and must not be read."""

    partner: int
    reason: str
    seconds: float


Outcome = Received | Missed


class _Refused(Exception):  # noqa: N818
    """One side will not swap with the other; the message is the reason."""


@dataclass
class _Swap:
    """One launch's exchange with one partner."""

    partner: int
    address: Address
    hello: Message
    outgoing: Sequence[memoryview]
    incoming: Sequence[memoryview]
    launched: float
    deadline: float
    """When (time.monotonic()) it ends at the latest: without having met by then, and later once the transfer began."""
    patience_seconds: float
    cap_seconds: float

    @property
    def size_bytes(self) -> int:
        """Payload of both directions."""
        return sum(map(len, self.outgoing)) + sum(map(len, self.incoming))

    @property
    def outer_step(self) -> int:
        return self.hello["outer_step"]

    def elapsed(self) -> float:
        return time.monotonic() - self.launched

    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class Pending:
    """The exchanges of one launch. The tensors given to it must be left alone until `wait` has returned."""

    def __init__(self, swaps: Sequence[_Swap], run: Callable[[_Swap], Outcome]) -> None:
        self._swaps = swaps
        self._outcomes: dict[int, Outcome] = {}
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(swap, run), name=f"exchange with {swap.partner}", daemon=True)
            for swap in swaps
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, swap: _Swap, run: Callable[[_Swap], Outcome]) -> None:
        try:
            self._outcomes[swap.partner] = run(swap)
        except BaseException as error:  # a fault of ours, not of a partner: it belongs to whoever waits
            self._error = error

    def wait(self) -> dict[int, Outcome]:
        """Each partner's outcome, when its time is over at the latest (and a little slack)."""
        for swap, thread in zip(self._swaps, self._threads, strict=True):
            while thread.is_alive() and swap.deadline + SLACK_SECONDS > time.monotonic():
                thread.join(swap.remaining() + SLACK_SECONDS)  # the deadline may have moved meanwhile
        if self._error is not None:
            raise self._error
        # A thread that still lives hangs in the name service: it will find its deadline gone before it moves a byte.
        return {
            swap.partner: self._outcomes.get(swap.partner)
            or Missed(swap.partner, "the deadline passed while looking up its address", swap.elapsed())
            for swap in self._swaps
        }


class Exchange:
    """One rank's end of all pair exchanges. `rank` is the rank inside the replica, the same for both twins."""

    def __init__(
        self, *, replica: int, rank: int, listener: Listener, secret: bytes, run_id: str, fingerprint: str
    ) -> None:
        """Serve the listener's "exchange" hellos. `fingerprint` must be equal on both sides of every exchange."""
        self.replica, self.rank = replica, rank
        self.sent_bytes = 0
        """Payload bytes handed to sockets so far, by all exchanges that have ended."""
        self.received_bytes = 0
        """Payload bytes taken from sockets so far, by all exchanges that have ended."""
        self._hello: Message = {
            "kind": "exchange", "run_id": run_id, "fingerprint": fingerprint, "replica": replica, "rank": rank
        }  # fmt: skip
        self._secret = secret
        self._speeds = Speeds()
        self._seats = Seats(self._hello)
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._closed = False
        listener.register("exchange", self._seats.arrived)

    @property
    def latest_outer_step(self) -> int:
        """The highest outer step of the training that any twin of this rank has shown us, ours included; -1 before the
        first."""
        return self._seats.latest_outer_step

    @property
    def latest_after_training(self) -> int:
        """The same for exchanges numbered from AFTER_TRAINING on."""
        return self._seats.latest_after_training

    def launch(
        self,
        outer_step: int,
        send: Sequence[Tensor],
        receive: Mapping[int, Sequence[Tensor]],
        addresses: Mapping[int, Address],
        deadline_seconds: float,
        transfer_cap_seconds: float,
    ) -> Pending:
        """Start to swap `send` with each partner of `receive`, into the tensors given there, and return at once.

        All tensors are contiguous and on the CPU; those of a partner have the dtypes and sizes of `send`, in its
        order, and any may be empty. `addresses[partner]` is where its twin's listener is. A partner that has not been
        met within `deadline_seconds` is missed; a transfer may take `transfer_cap_seconds` more, and gets less where
        earlier ones were faster. Outer steps must rise from launch to launch, and a partner that dials for a later one
        is taken to have given up the earlier ones: wait for a launch before the next one with the same partner. Raises
        ValueError for arguments that do not fit this.
        """
        launched = time.monotonic()
        outgoing = [bytes_of(tensor) for tensor in send]
        tensors = [[str(tensor.dtype).removeprefix("torch."), tensor.numel()] for tensor in send]
        swaps = []
        for partner, buffers in receive.items():
            if partner == self.replica or partner not in addresses:
                raise ValueError(f"replica {partner} is no partner with an address for replica {self.replica}")
            if [(t.dtype, t.numel()) for t in buffers] != [(t.dtype, t.numel()) for t in send]:
                raise ValueError(f"the receive buffers for replica {partner} differ from what is sent")
            hello = {**self._hello, "outer_step": outer_step, "tensors": tensors}
            swap = _Swap(
                partner,
                addresses[partner],
                hello,
                outgoing,
                [bytes_of(tensor) for tensor in buffers],
                launched,
                launched + deadline_seconds,
                patience_seconds=min(SILENCE_SECONDS, deadline_seconds),
                cap_seconds=transfer_cap_seconds,
            )
            swaps.append(swap)
        self._seats.open(outer_step, [swap.partner for swap in swaps if swap.partner < self.replica])
        return Pending(swaps, self._run)

    def give_up(self, partner: int, reason: str) -> None:
        """A partner is dead: exchanges with it are missed at once, until `expect` says that it is back."""
        self._seats.give_up(partner, reason)

    def expect(self, partner: int) -> None:
        """A partner that was given up is back."""
        self._seats.expect(partner)

    def reached(self, partner: int, outer_step: int) -> None:
        """A partner has begun this outer step: it will not come for an earlier one, and is missed there at once."""
        self._seats.reached(partner, outer_step)

    def close(self) -> None:
        """Stop: exchanges in flight end as Missed, dialers are refused from now on."""
        with self._lock:
            self._closed = True
            for channel in self._channels:
                channel.interrupt()
        self._seats.close()

    def _misfit(self, swap: _Swap, hello: Message) -> str | None:
        """Why this hello is not what the swap needs; None if it is."""
        if (reason := self._seats.other_run(hello)) is not None:
            return reason
        for name, expected in (
            ("replica", swap.partner),
            ("outer_step", swap.outer_step),
            ("tensors", swap.hello["tensors"]),
        ):
            if hello.get(name) != expected:
                return f"{name} {shown(hello.get(name))} where replica {self.replica} expects {shown(expected)}"
        return None

    def _run(self, swap: _Swap) -> Outcome:
        """One exchange, from connecting to its outcome; runs in a thread of its own."""
        channel: Channel | None = None
        pace: Pace | None = None
        try:
            channel, hello = self._dial(swap) if self.replica < swap.partner else self._take_seat(swap)
            self._adopt(channel, swap)
            self._agree(channel, swap, hello)
            pace = self._begin_transfer(channel, swap)
            acknowledged = swap_buffers(channel, swap.outgoing, swap.incoming)
        except (_Refused, WrongSecret, WrongChecksum) as refusal:
            return Missed(swap.partner, str(refusal), swap.elapsed())
        except OSError as error:
            received = channel.received_bytes if channel else 0
            size = sum(len(view) for view in swap.incoming)
            if pace is not None and pace.overran():
                self._speeds.overran(swap.partner, swap.size_bytes, pace.allowed_seconds)
            return Missed(swap.partner, f"{error} ({received} of {size} bytes received)", swap.elapsed())
        finally:
            if channel is not None:
                self._part_with(channel)
        if acknowledged:  # else the end was waited for in vain, and says nothing about the link
            self._speeds.measured(swap.partner, swap.size_bytes, pace.seconds())
        return Received(swap.partner, swap.elapsed(), channel.received_bytes, acknowledged)

    def _dial(self, swap: _Swap) -> tuple[Channel, Message | None]:
        """A channel to the higher twin, which will answer our hello once it has launched this outer step."""
        if (reason := self._seats.given_up(swap.partner)) is not None:
            raise _Refused(reason)
        channel = dial(
            swap.address,
            self._secret,
            swap.hello,
            swap.remaining(),
            keep_trying=True,
            refusals_seconds=REFUSALS_SECONDS,
        )
        return channel, None

    def _take_seat(self, swap: _Swap) -> tuple[Channel, Message | None]:
        """The lower twin's channel and hello, as soon as it is here."""
        caller = self._seats.take(swap.outer_step, swap.partner, swap.remaining())
        if isinstance(caller, str):
            raise _Refused(caller)
        return caller.channel, caller.hello

    def _agree(self, channel: Channel, swap: _Swap, hello: Message | None) -> None:
        """Make sure that both sides mean the same exchange, before any byte of it moves. The listener decides first."""
        listening = hello is not None
        if hello is None:
            hello = channel.receive()
            self._seats.see(hello)
            if hello.get("kind") == "refused":
                raise _Refused(f"refused by replica {swap.partner}: {shown(hello.get('reason'), 1000)}")
        if (reason := self._misfit(swap, hello)) is not None:
            if listening:
                self._seats.refuse(channel, reason)
            raise _Refused(reason)
        if listening:
            channel.send(swap.hello)

    def _begin_transfer(self, channel: Channel, swap: _Swap) -> Pace:
        """The partners have met: from now on the transfer's own time counts."""
        patience, cap = swap.patience_seconds, swap.cap_seconds
        pace = Pace(channel, self._speeds.allowance(swap.partner, swap.size_bytes, patience, cap), patience)
        swap.deadline = pace.ends
        return pace

    def _adopt(self, channel: Channel, swap: _Swap) -> None:
        channel.deadline = swap.deadline
        with self._lock:
            self._channels.add(channel)
            if self._closed:
                channel.interrupt()

    def _part_with(self, channel: Channel) -> None:
        with self._lock:
            self._channels.discard(channel)
            self.sent_bytes += channel.sent_bytes
            self.received_bytes += channel.received_bytes
        channel.close()
