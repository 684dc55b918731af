"""Where is everybody? A directory of addresses, kept by one server and needed only while somebody is looking.

Each rank announces records (addresses, fingerprints, ...) under a topic and its place (replica, rank), and waits for
the records of the ranks that it wants to reach:

    client.announce("exchange", replica, rank, {"address": [host, port], "generation": 0})
    client.wait_for("exchange", [(0, 0), (1, 0)], timeout_seconds=300)

A record may carry a "generation" (0 if not): a higher one replaces, as a restarted replica's must. The server keeps its
records in memory only. Whoever has fetched what it needs does not notice when the server goes away; clients that still
wait while it is restarted announce themselves again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from noloco_mega.comm.channel import Listener, dial
from noloco_mega.comm.wire import Address, Channel, Message, spoken

Record = dict[str, Any]
Key = tuple[str, int, int]
"""(topic, replica, rank)"""

MAX_RECORD_BYTES = 8192
RECORDS_PER_MESSAGE = 64
POLL_SECONDS = 10.0
"""How long the server keeps one request waiting; a client asks again until its own timeout."""
ANSWER_SECONDS = 10.0
"""How long after that a client waits for the answer of a server that is alive."""


class RendezvousTimeout(TimeoutError):  # noqa: N818
    """Somebody has not announced itself in time; `missing` lists the (replica, rank) pairs."""

    def __init__(self, message: str, missing: Sequence[tuple[int, int]]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RendezvousServer:
    """The directory of one run; serves from threads of its own as soon as it exists."""

    def __init__(
        self, secret: bytes, host: str = "127.0.0.1", port: int = 0, *, run_id: str = "", public_host: str | None = None
    ) -> None:
        """See Listener for `host`, `port` and `public_host`. Clients with another `run_id` are refused."""
        self._run_id = run_id
        self._records: dict[Key, Record] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._listener = Listener(secret, host, port, public_host=public_host)
        self._listener.register("rendezvous", self._serve)
        self.address: Address = self._listener.address

    def serve_forever(self) -> None:
        """Block until `close` is called from another thread (or the process is interrupted)."""
        self._closed.wait()

    def close(self) -> None:
        """Stop serving; clients that wait see the connection end and keep trying until their own timeout."""
        self._listener.close()
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def _serve(self, channel: Channel, hello: Message) -> None:
        """Answer one request: take its announcements, then wait for the records that it asks for."""
        channel.expire_in(POLL_SECONDS + ANSWER_SECONDS)
        try:
            request = channel.receive()
            try:
                if hello.get("run_id") != self._run_id:
                    raise ValueError(f"it serves run {self._run_id!r}, not {hello.get('run_id')!r}")
                announced = [(_key(key), _record(record)) for key, record in request["announce"]]
                wanted = None if request["wait"] is None else [_key(key) for key in request["wait"]]
                seconds, topic = min(float(request["seconds"]), POLL_SECONDS), str(request["topic"])
                self._announce(announced)
            except (KeyError, TypeError, ValueError) as error:
                channel.send({"kind": "refused", "reason": str(error)})
                return
            found = self._known(topic) if wanted is None else self._find(wanted, seconds)
            if self._closed.is_set():
                return
            for start in range(0, len(found), RECORDS_PER_MESSAGE):
                channel.send({"kind": "records", "records": found[start : start + RECORDS_PER_MESSAGE]})
            channel.send({"kind": "end"})
        except OSError:
            return  # the client is gone; its announcements stay
        finally:
            channel.close()

    def _announce(self, announced: Sequence[tuple[Key, Record]]) -> None:
        """Take all of them or none. Raises ValueError if one is older than, or contradicts, what is known."""
        with self._changed:
            for key, record in announced:
                old = self._records.get(key, record)
                if _generation(record) < _generation(old) or (
                    _generation(record) == _generation(old) and record != old
                ):
                    raise ValueError(
                        f"replica {key[1]} rank {key[2]} has announced {key[0]!r} with generation {_generation(old)} "
                        f"already, as {json.dumps(old)}: it runs twice, or was restarted and must announce itself "
                        f"with generation {_generation(old) + 1} or higher"
                    )
            self._records.update(announced)
            self._changed.notify_all()

    def _known(self, topic: str) -> list[tuple[Key, Record]]:
        with self._changed:
            return [(key, record) for key, record in self._records.items() if key[0] == topic]

    def _find(self, wanted: Sequence[Key], seconds: float) -> list[tuple[Key, Record]]:
        """Those of the wanted records that exist once all do, or when the time is up."""
        deadline = time.monotonic() + seconds
        missing = list(wanted)
        with self._changed:
            while True:
                missing = [key for key in missing if key not in self._records]
                remaining = deadline - time.monotonic()
                if not missing or remaining <= 0 or self._closed.is_set():
                    return [(key, self._records[key]) for key in wanted if key in self._records]
                self._changed.wait(remaining)


class RendezvousClient:
    """One rank's view of the directory, for one thread at a time.

    Each call connects anew, and retries until `timeout_seconds` have passed.
    """

    def __init__(self, address: Address, secret: bytes, timeout_seconds: float, *, run_id: str = "") -> None:
        self.address = address
        self._secret = secret
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._announced: dict[Key, Record] = {}

    def announce(self, topic: str, replica: int, rank: int, record: Record) -> None:
        """Publish a record (JSON, at most MAX_RECORD_BYTES) under (topic, replica, rank).

        Raises RendezvousTimeout if no server answers in time, and ValueError if the server's secret or run is another
        one, or if the place is known with a higher generation, or with the same one and another record.
        """
        key = _key((topic, replica, rank))
        before = dict(self._announced)
        self._announced[key] = _record(record)
        deadline = time.monotonic() + self._timeout_seconds
        try:
            self._ask([], topic, deadline, self._timeout_seconds)
        except ValueError:
            self._announced = before
            raise

    def wait_for(
        self, topic: str, keys: Iterable[tuple[int, int]], timeout_seconds: float | None = None
    ) -> dict[tuple[int, int], Record]:
        """The records of all (replica, rank) pairs of `keys` under `topic`, as soon as all have announced them.

        Raises RendezvousTimeout, which names who is missing, after `timeout_seconds` (the client's own by default).
        """
        wanted = list(dict.fromkeys(keys))
        timeout_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = self._ask([(topic, *key) for key in wanted], topic, deadline, timeout_seconds)
            missing = [key for key in wanted if key not in found]
            if not missing:
                return {key: found[key] for key in wanted}
            if time.monotonic() >= deadline:
                names = ", ".join(f"replica {replica} rank {rank}" for replica, rank in missing)
                raise RendezvousTimeout(
                    f"{len(missing)} of {len(wanted)} have not announced {topic!r} at {spoken(self.address)} "
                    f"in {timeout_seconds:g} s: {names}",
                    missing,
                )

    def known(self, topic: str) -> dict[tuple[int, int], Record]:
        """Every record that exists under `topic` at this moment. Raises as `wait_for` does, if no server answers."""
        return self._ask(None, topic, time.monotonic() + self._timeout_seconds, self._timeout_seconds)

    def _ask(
        self, wait: list[Key] | None, topic: str, deadline: float, timeout_seconds: float
    ) -> dict[tuple[int, int], Record]:
        """One request that a server has answered; also repeats our announcements, for one that was restarted."""
        while True:
            remaining = max(0.1, deadline - time.monotonic())
            try:
                hello = {"kind": "rendezvous", "run_id": self._run_id}
                channel = dial(self.address, self._secret, hello, remaining, keep_trying=True)
                try:
                    channel.expire_in(min(remaining + 2, POLL_SECONDS + ANSWER_SECONDS))
                    channel.send(
                        {
                            "announce": list(self._announced.items()),
                            "wait": wait,
                            "topic": topic,
                            "seconds": max(0.0, deadline - time.monotonic()),
                        }
                    )
                    return self._read(channel)
                finally:
                    channel.close()
            except OSError as error:
                if time.monotonic() >= deadline:
                    missing = [key[1:] for key in wait or []]
                    names = ", ".join(f"replica {replica} rank {rank}" for replica, rank in missing)
                    raise RendezvousTimeout(
                        f"no rendezvous answered at {spoken(self.address)} in {timeout_seconds:g} s ({error})"
                        + (f"; still wanted: {names}" if names else ""),
                        missing,
                    ) from error
                time.sleep(0.05)  # the server went away in the middle of an answer: it may come back

    def _read(self, channel: Channel) -> dict[tuple[int, int], Record]:
        found = {}
        while (answer := channel.receive())["kind"] == "records":
            found.update({(replica, rank): record for (_, replica, rank), record in answer["records"]})
        if answer["kind"] == "refused":
            raise ValueError(f"refused by the rendezvous at {spoken(self.address)}: {answer['reason']}")
        return found


def _key(key: Any) -> Key:
    """A checked (topic, replica, rank). Raises ValueError."""
    topic, replica, rank = key
    if not (isinstance(topic, str) and isinstance(replica, int) and isinstance(rank, int) and min(replica, rank) >= 0):
        raise ValueError(f"a record belongs to (topic, replica, rank), not to {key!r}")
    return topic, replica, rank


def _record(record: Any) -> Record:
    """The record as JSON returns it. Raises ValueError if it is no JSON object, too large, or its generation no int."""
    if not isinstance(record, dict) or not isinstance(record.get("generation", 0), int):
        raise ValueError(f'a record is a JSON object whose "generation", if any, is an integer; got {record!r}')
    try:
        text = json.dumps(record)
    except TypeError as error:
        raise ValueError(f"a record must be JSON: {error}") from error
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(text)} bytes; the limit is {MAX_RECORD_BYTES}")
    return json.loads(text)


def _generation(record: Record) -> int:
    return record.get("generation", 0)
