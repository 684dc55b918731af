"""What do replicas tell each other beside activations and outer state? For now: at which step to stop.

Every replica's leader (its rank 0) holds one `StopAgreement`. A replica that was asked to stop proposes a step a
little ahead; whoever has already gone past a proposal raises it, and the largest step wins. At that step a leader
tells the others that it has arrived and waits until everybody has, or until a larger step turns up, or, for those
that don't answer, until a deadline. So replicas coupled by random routes all leave after the same inner step, and a
replica that hangs holds nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from noloco_mega.comm.channel import Address, Channel, Listener, Message, dial

# A step that no run reaches; small enough for an int64 sum.
NEVER = 1 << 60


class StopAgreement:
    """The stop step as this replica's leader knows it. All methods are safe to call from any thread."""

    KIND = "stop"
    MARGIN = 2
    """Steps between a proposal and the earliest stop: one for the message, one for the replica's own agreement."""

    def __init__(self, replica: int, listener: Listener, secret: bytes, run_id: str) -> None:
        self._replica = replica
        self._secret = secret
        self._run_id = run_id
        self._leaders: dict[int, Address] = {}
        self._changed = threading.Condition()
        self._stop_step = NEVER
        self._decided_through = 0
        self._arrived: dict[int, int] = {}
        self._gone: set[int] = set()
        listener.register(self.KIND, self._on_message)

    def connect(self, leaders: Mapping[int, Address]) -> None:
        """Learn where the other replicas' leaders listen."""
        self._leaders = {replica: where for replica, where in leaders.items() if replica != self._replica}

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
                    for replica in self._leaders
                    if self._arrived.get(replica, -1) < step and replica not in self._gone
                ]
                left = deadline - time.monotonic()
                if not missing or left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def _raise_to(self, step: int) -> None:
        """Take `step`, or a later one if the agreement on `step` has already been passed; callers hold the lock."""
        if self._stop_step != NEVER and step <= self._stop_step:
            return
        self._stop_step = step if step > self._decided_through else self._decided_through + self.MARGIN
        self._changed.notify_all()

    def _on_message(self, channel: Channel, hello: Message) -> None:
        channel.close()
        stop, arrived, sender = hello.get("stop"), hello.get("arrived"), hello.get("replica")
        if hello.get("run") != self._run_id or not isinstance(stop, int) or not 0 <= stop < NEVER:
            return
        with self._changed:
            self._raise_to(stop)
            if isinstance(arrived, int) and isinstance(sender, int):
                self._arrived[sender] = max(self._arrived.get(sender, -1), arrived)
                self._changed.notify_all()
            news = self._stop_step
        if news > stop:
            self._broadcast({"stop": news})

    def _broadcast(self, message: Message) -> None:
        hello = {"kind": self.KIND, "run": self._run_id, "replica": self._replica, **message}
        for replica, where in self._leaders.items():
            # One thread each: a leader that hangs must not delay the message to the next one.
            threading.Thread(target=self._tell, args=(replica, where, hello), daemon=True).start()

    def _tell(self, replica: int, where: Address, hello: Message) -> None:
        try:
            dial(where, self._secret, hello, timeout_seconds=5.0).close()
        except ConnectionRefusedError:
            # Its listener existed when the replicas met: the process is gone, and not to be waited for.
            with self._changed:
                self._gone.add(replica)
                self._changed.notify_all()
        except OSError:
            return  # silent for whatever reason: `confirm` waits for it until its timeout
