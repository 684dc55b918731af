"""What is known about the ranks of all runs, and for how long? The rendezvous server's memory.

A record is known while its announcer's lease, one open connection, lasts; a failure for FAILED_SECONDS or until its
place starts again.
"""

from __future__ import annotations

import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noloco_mega.comm.wire import Channel

Record = dict[str, Any]
Place = tuple[int, int]
"""(replica, rank)"""
Key = tuple[str, int, int]
"""(topic, replica, rank)"""
RunKey = tuple[str, Key]
"""(run, (topic, replica, rank))"""

FAILED_SECONDS = 300.0
"""How long a failure is remembered."""
RESTART_SECONDS = 60.0
"""How long a rank that starts after a failure gives the failed place to start again too."""


class PlaceTaken(ValueError):  # noqa: N818
    """Another client that is alive has announced the same."""


@dataclass(frozen=True, eq=False)
class Lease:
    """One client's open connection: what it announced is known while this lasts."""

    channel: Channel
    run: str
    client: str


@dataclass(frozen=True)
class _Entry:
    record: Record
    lease: Lease


@dataclass(frozen=True)
class _Failure:
    client: str
    reason: str
    when: float
    of_run: bool
    """Whether it concerns the whole run, and not its own replica alone."""
    lasting: bool
    """Whether its replica would fail again if it were only started again."""


class Directory:
    """Records and failures, for any number of threads."""

    def __init__(self) -> None:
        self._entries: dict[RunKey, _Entry] = {}
        self._failures: dict[tuple[str, Place], _Failure] = {}
        self._changed = threading.Condition()
        self._closed = False

    def close(self) -> None:
        """Let everybody who waits here go, with what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def announce(self, lease: Lease, announced: Sequence[tuple[RunKey, Record]], seconds: float) -> None:
        """Take all of them or none. Raises PlaceTaken if another client still holds one of the places after that."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._taken(lease, announced), seconds)
            if self._closed:
                raise ConnectionError("the server is closing")
            if (taken := self._taken(lease, announced)) is not None:
                topic, replica, rank = taken
                record = json.dumps(self._entries[lease.run, taken].record)
                raise PlaceTaken(
                    f"replica {replica} rank {rank} has announced {topic!r} already, as {record}, and is alive: "
                    "it runs twice (a second run at this rendezvous needs a name of its own)"
                )
            self._entries.update((where, _Entry(record, lease)) for where, record in announced)
            self._changed.notify_all()

    def _taken(self, lease: Lease, announced: Sequence[tuple[RunKey, Record]]) -> Key | None:
        """The first place that another client holds."""
        for where, _ in announced:
            entry = self._entries.get(where)
            if entry is not None and entry.lease.client != lease.client:
                return where[1]
        return None

    def forget(self, lease: Lease) -> None:
        """A lease has ended: so have its records, except those that the same client holds by a newer one."""
        lease.channel.close()
        with self._changed:
            for where in [where for where, entry in self._entries.items() if entry.lease is lease]:
                del self._entries[where]
            self._changed.notify_all()

    def start_anew(self, run: str, place: Place, client: str) -> None:
        """Somebody is at this place: what another client said about it is over."""
        with self._changed:
            failure = self._failures.get((run, place))
            if failure is not None and failure.client != client:
                del self._failures[run, place]

    def fail(self, lease: Lease, failed: Sequence[tuple[Place, str, bool, bool]]) -> None:
        """Remember that these places failed at their start, why, whether that concerns the whole run, and whether it
        lasts."""
        with self._changed:
            for place, reason, of_run, lasting in failed:
                self._failures[lease.run, place] = _Failure(lease.client, reason, time.monotonic(), of_run, lasting)
            self._changed.notify_all()

    def find(
        self, run: str, wanted: Sequence[RunKey], seconds: float, age_seconds: float, asker: int | None = None
    ) -> tuple[list[tuple[Key, Record]], tuple[str, bool] | None]:
        """The wanted records as soon as all exist.

        Else those that there are when the time is up, or when a rank has failed whose failure concerns the replica
        `asker`: then with its reason, and whether `asker` would fail again for it if it were only started again.
        """
        start = time.monotonic()
        with self._changed:
            while True:
                waited = time.monotonic() - start
                found = [(where[1], entry.record) for where in wanted if (entry := self._entries.get(where))]
                failure = self._failed(run, age_seconds + waited, asker) if len(found) < len(wanted) else None
                if len(found) == len(wanted) or failure or waited >= seconds or self._closed:
                    return found, failure
                old_enough = RESTART_SECONDS - age_seconds - waited  # to be told of failures before its start
                self._changed.wait(min(seconds - waited, old_enough + 0.01) if old_enough >= 0 else seconds - waited)

    def _failed(self, run: str, age_seconds: float, asker: int | None) -> tuple[str, bool] | None:
        """The first failure that concerns a client of this age and replica, in words, and whether it lasts for it.

        One from before the client's start may belong to an earlier start of the run, whose ranks are starting again.
        """
        now = time.monotonic()
        for where in [where for where, failure in self._failures.items() if now - failure.when > FAILED_SECONDS]:
            del self._failures[where]
        failures = sorted(
            (failure.when, place, failure.reason, failure.lasting)
            for (of_run, place), failure in self._failures.items()
            if of_run == run and (failure.of_run or place[0] == asker)
        )
        for when, (replica, rank), reason, lasting in failures:
            if now - when <= age_seconds or age_seconds > RESTART_SECONDS:
                return f"replica {replica}, rank {rank} failed at its start: {reason}", lasting and replica == asker
        return None


class Watch:
    """One thread that waits for all quiet leases at once."""

    def __init__(self, spoke: Callable[[Lease], None], ended: Callable[[Lease], None]) -> None:
        """`spoke` is called in a thread of its own, with a lease that is no longer watched."""
        self._spoke, self._ended = spoke, ended
        self._added: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._quiet: dict[int, Lease] = {}  # by file descriptor; the thread's own
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rendezvous leases", daemon=True)
        self._thread.start()

    def add(self, lease: Lease) -> None:
        """Watch a lease from now on; one that comes after `close` is ended."""
        with self._lock:
            if not self._closed:
                self._added.put(lease)
                self._wake.send(b"x")
                return
        self._ended(lease)

    def close(self) -> None:
        """End all leases."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._added.put(None)
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._woken:
                        selector.unregister(key.fd)
                        self._wakes(self._quiet.pop(key.fd))
                        continue
                    self._woken.recv(1)
                    lease = self._added.get()
                    if lease is None:
                        for other in self._quiet.values():
                            self._ended(other)
                        return
                    self._quiet[lease.channel.fileno()] = lease
                    selector.register(lease.channel.fileno(), selectors.EVENT_READ)

    def _wakes(self, lease: Lease) -> None:
        if lease.channel.hung_up():
            self._ended(lease)
        else:
            threading.Thread(target=self._spoke, args=(lease,), name="rendezvous lease", daemon=True).start()
