"""What do replicas tell each other beside activations and outer state? Small news among their leaders, and a stop step.

Every replica's leader (its rank 0) holds one `Leaders`, which carries news to all others as best it can: whoever can't
be reached misses them, so news repeat what is still of use. Whoever needs an answer builds it on top.

`StopAgreement` is one such: a replica that was asked to stop proposes a step a little ahead; whoever has already gone
past a proposal raises it, and the largest step wins. At that step a leader tells the others that it has arrived and
waits until everybody has, or until a larger step turns up, or, for those that don't answer, until a deadline. So
replicas coupled by random routes all leave after the same inner step, and a replica that hangs holds nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from noloco_mega.comm.channel import Listener, dial
from noloco_mega.comm.wire import Address, Channel, Message

# A step that no run reaches; small enough for an int64 sum.
NEVER = 1 << 60

News = Callable[[int, Message], None]
"""Takes the sender's replica and its message; called from threads of its own, several at once."""


class Leaders:
    """One leader's line to the leaders of all other replicas. All methods are safe to call from any thread."""

    TELL_SECONDS = 5.0
    """How long one leader is tried."""

    def __init__(self, replica: int, listener: Listener, secret: bytes, run_id: str) -> None:
        self.replica = replica
        self._listener = listener
        self._secret = secret
        self._run_id = run_id
        self._leaders: dict[int, Address] = {}
        self._under_way: set[threading.Thread] = set()
        self._starting = threading.Lock()
        self.refused: dict[int, Address] = {}
        """Where a replica's leader listened that has refused a connection since it was last heard of. The roster, which
        knows whom it hears, takes them out."""
        self.on_refused: list[Callable[[], None]] = []
        """Called after every refusal, from a thread of its own."""

    def connect(self, leaders: Mapping[int, Address]) -> None:
        """Learn where the other replicas' leaders listen."""
        self._leaders = {replica: where for replica, where in leaders.items() if replica != self.replica}

    def learn(self, replica: int, where: Address) -> None:
        """A replica has come, or has come back, and its leader listens there."""
        self._leaders = {**self._leaders, replica: where}

    @property
    def gone(self) -> set[int]:
        """The replicas whose leader's process has ended, with no other one known in its place."""
        return {replica for replica, where in dict(self.refused).items() if self._leaders.get(replica) == where}

    @property
    def others(self) -> tuple[int, ...]:
        """The other replicas."""
        return tuple(self._leaders)

    def subscribe(self, kind: str, news: News) -> None:
        """Hand messages of this kind from other leaders of this run to `news`."""

        def take(channel: Channel, hello: Message) -> None:
            channel.close()
            sender = hello.get("replica")
            if hello.get("run") == self._run_id and isinstance(sender, int):
                news(sender, hello)

        self._listener.register(kind, take)

    def broadcast(self, kind: str, message: Message) -> None:
        """Send a message to all others; returns at once."""
        for replica in self._leaders:
            self.tell(replica, kind, message)

    def tell(self, replica: int, kind: str, message: Message) -> None:
        """Send a message to one other leader; returns at once. Nothing happens where its address is not known."""
        where = self._leaders.get(replica)
        if where is None:
            return
        hello = {"kind": kind, "run": self._run_id, "replica": self.replica, **message}
        # One thread each: a leader that hangs must not delay the message to the next one.
        thread = threading.Thread(target=self._tell, args=(replica, where, hello), daemon=True)
        with self._starting:
            self._under_way.add(thread)
            thread.start()

    def flush(self) -> None:
        """Wait until every message has been handed over or given up (TELL_SECONDS at most)."""
        with self._starting:  # heartbeats go out from another thread, and a thread can't be joined before it starts
            threads = list(self._under_way)
        for thread in threads:
            thread.join()

    def _tell(self, replica: int, where: Address, hello: Message) -> None:
        try:
            dial(where, self._secret, hello, timeout_seconds=self.TELL_SECONDS).close()
        except ConnectionRefusedError:
            # Its listener existed when the replicas met: the process is gone, and not to be waited for. It may have
            # come back, elsewhere, while we were trying.
            if self._leaders.get(replica) == where:
                self.refused[replica] = where
                for notify in self.on_refused:
                    notify()
        except OSError:
            pass  # silent for whatever reason: news may be missed
        self._under_way.discard(threading.current_thread())


class StopAgreement:
    """The stop step as this replica's leader knows it. All methods are safe to call from any thread."""

    KIND = "stop"
    MARGIN = 2
    """Steps between a proposal and the earliest stop: one for the message, one for the replica's own agreement."""

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders
        self._changed = threading.Condition()
        self._stop_step = NEVER
        self._decided_through = 0
        self._arrived: dict[int, int] = {}
        leaders.subscribe(self.KIND, self._on_message)
        leaders.on_refused.append(self._look_again)

    def decide(self, step: int) -> int:
        """The stop step known now, which settles whether to stop at `step` + 1 or before; NEVER if none is known."""
        with self._changed:
            self._decided_through = max(self._decided_through, step + 1)
            return self._stop_step

    def propose(self, step: int) -> None:
        """This replica wants to stop and is in inner step `step`."""
        with self._changed:
            if self._stop_step != NEVER:
                return
            self._raise_to(step + self.MARGIN)
        self._broadcast({"stop": self._stop_step})

    def confirm(self, step: int, timeout_seconds: float) -> bool:
        """At stop step `step`: True once every leader has arrived there or the timeout passed; False if the stop has
        moved to a later step, to which this replica must go on."""
        self._broadcast({"stop": step, "arrived": step})
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._stop_step <= step:
                missing = [
                    replica
                    for replica in self._leaders.others
                    if self._arrived.get(replica, -1) < step and replica not in self._leaders.gone
                ]
                left = deadline - time.monotonic()
                if not missing or left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _raise_to(self, step: int) -> None:
        """Take `step`, or a later one if the agreement on `step` has already been passed; callers hold the lock."""
        if self._stop_step != NEVER and step <= self._stop_step:
            return
        self._stop_step = step if step > self._decided_through else self._decided_through + self.MARGIN
        self._changed.notify_all()

    def _on_message(self, sender: int, message: Message) -> None:
        stop, arrived = message.get("stop"), message.get("arrived")
        if not isinstance(stop, int) or not 0 <= stop < NEVER:
            return
        with self._changed:
            self._raise_to(stop)
            if isinstance(arrived, int):
                self._arrived[sender] = max(self._arrived.get(sender, -1), arrived)
                self._changed.notify_all()
            news = self._stop_step
        if news > stop:
            self._broadcast({"stop": news})

    def _broadcast(self, message: Message) -> None:
        self._leaders.broadcast(self.KIND, message)
