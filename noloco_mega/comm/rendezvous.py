"""Where is everybody? A directory of addresses, kept by one server and needed only while somebody is looking.

Each rank announces records (addresses, fingerprints, ...) under a topic and its place (replica, rank), and waits for
the records of the ranks that it wants to reach:

    client.announce("exchange", replica, rank, {"address": [host, port]})
    client.wait_for("exchange", [(0, 0), (1, 0)], timeout_seconds=300)

A record lives as long as its announcer: a client that has announced something keeps one connection open, its lease, and
the server forgets the client's records when that ends, by `close`, with the process, or because its host fell silent.
Whoever announces therefore stays until all who need the record have it.
So one server serves any number of runs, at once (each sees its own records only) and one after another, the same one
started again included.

A rank that fails at its start says so with `fail`; all who wait, or all of its own replica where the others can do
without it, are then told, now or within directory.FAILED_SECONDS.

The server keeps everything in memory only. Whoever has fetched what it needs does not notice when the server goes away;
clients that still wait while it is restarted announce themselves again.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from noloco_mega.comm.channel import Listener, dial
from noloco_mega.comm.directory import Directory, Key, Lease, Place, PlaceTaken, Record, Watch
from noloco_mega.comm.wire import MALFORMED, Address, Channel, Message, shown, spoken

T = TypeVar("T")

MAX_RECORD_BYTES = 8192
MAX_REASON_CHARACTERS = 2000
RECORDS_PER_MESSAGE = 64
POLL_SECONDS = 10.0
"""How long the server keeps one request waiting; a client asks again until its own timeout."""
ANSWER_SECONDS = 10.0
"""How long after that a client waits for the answer of a server that is alive."""
TAKEN_SECONDS = 13.0
"""How long a place that is taken is waited for before its second announcer is refused: by then the server's kernel has
noticed that the first one's host is gone (wire.py's keepalive)."""
TELL_SECONDS = 5.0
"""How long `fail` tries to reach the server."""


class RendezvousTimeout(TimeoutError):  # noqa: N818
    """Somebody has not announced itself in time; the message names the replicas and ranks."""


class StartFailed(ValueError):  # noqa: N818
    """Another rank of the run has said that it failed at its start; the message gives its place and reason."""

    def __init__(self, message: str, lasting: bool = False) -> None:
        """`lasting`: it is one of the own replica, which would fail again if it were only started again."""
        super().__init__(message)
        self.lasting = lasting


class RendezvousServer:
    """The directory of any number of runs; serves from threads of its own as soon as it exists.

    A thread per request under way, and one for all the leases that are open and quiet.
    """

    def __init__(
        self, secret: bytes, host: str = "127.0.0.1", port: int = 0, *, public_host: str | None = None
    ) -> None:
        """See Listener for `host`, `port`, `public_host` and the errors raised."""
        self._directory = Directory()
        self._closed = threading.Event()
        self._listener = Listener(secret, host, port, public_host=public_host)
        self._watch = Watch(self._spoke, self._directory.forget)
        self._listener.register("rendezvous", self._serve)
        self.address: Address = self._listener.address

    def serve_forever(self) -> None:
        """Block until `close` is called from another thread (or the process is interrupted)."""
        self._closed.wait()

    def close(self) -> None:
        """Stop serving; clients that wait see the connection end and keep trying until their own timeout."""
        self._listener.close()
        self._closed.set()
        self._directory.close()
        self._watch.close()

    def _serve(self, channel: Channel, hello: Message) -> None:
        """A new connection: its first request says whether it is a lease or a question."""
        run, client, place = str(hello.get("run")), str(hello.get("client")), hello.get("place")
        channel.expire_in(ANSWER_SECONDS)
        try:
            if place is not None:
                self._directory.start_anew(run, _place(place), client)
            request = channel.receive()
            if "hold" in request:
                self._hold(Lease(channel, run, client), request)
                return
            self._answer(channel, run, None if place is None else _place(place)[0], request)
        except MALFORMED as error:
            _refuse(channel, error)
        except OSError:
            pass  # the client is gone, or will ask again
        channel.close()

    def _answer(self, channel: Channel, run: str, asker: int | None, request: Message) -> None:
        """Send the records that a client looks for once all exist, or what there is of them after a while."""
        wanted = [(run, _key(key)) for key in request["find"]]
        seconds, age_seconds = min(float(request["seconds"]), POLL_SECONDS), float(request["age"])
        found, failure = self._directory.find(run, wanted, seconds, age_seconds, asker)
        if self._closed.is_set():
            return
        channel.expire_in(ANSWER_SECONDS)
        if failure is not None:
            reason, lasting = failure
            channel.send({"kind": "failed", "reason": reason, "lasting": lasting})
            return
        for start in range(0, len(found), RECORDS_PER_MESSAGE):
            channel.send({"kind": "records", "records": found[start : start + RECORDS_PER_MESSAGE]})
        channel.send({"kind": "end"})

    def _spoke(self, lease: Lease) -> None:
        """A lease that was quiet has something to read."""
        lease.channel.expire_in(ANSWER_SECONDS)
        try:
            self._hold(lease, lease.channel.receive())
        except OSError:
            self._directory.forget(lease)

    def _hold(self, lease: Lease, request: Message) -> None:
        """Take a lease's announcements and failures, answer, and watch it from now on."""
        try:
            announced = [((lease.run, _key(key)), _record(record)) for key, record in request["hold"]]
            failed = [
                (_place(place), str(why), bool(of_run), bool(lasting))
                for place, why, of_run, lasting in request["failed"]
            ]
            self._directory.announce(lease, announced, min(float(request["seconds"]), TAKEN_SECONDS))
            self._directory.fail(lease, failed)
            lease.channel.expire_in(ANSWER_SECONDS)
            lease.channel.send({"kind": "taken"})
        except MALFORMED as error:
            _refuse(lease.channel, error)
            self._directory.forget(lease)
        except OSError:
            self._directory.forget(lease)
        else:
            self._watch.add(lease)


class RendezvousClient:
    """One rank's view of the directory, for one thread at a time; another one may call `renew`.

    Its records are known until `close`. Each call retries until `timeout_seconds` have passed.
    """

    def __init__(
        self, address: Address, secret: bytes, timeout_seconds: float, *, run: str = "", place: Place | None = None
    ) -> None:
        """`run` is the run whose records this client sees and makes; `place` is the (replica, rank) that it speaks for.

        The first call tells the server that `place` has started: a failure of an earlier start of it is then over.
        """
        self.address = address
        self._secret = secret
        self._hello = {"kind": "rendezvous", "run": run, "client": secrets.token_hex(16), "place": place}
        self._timeout_seconds = timeout_seconds
        self._announced: dict[Key, Record] = {}
        self._failed: dict[Place, tuple[str, bool, bool]] = {}
        self._lease: Channel | None = None
        self._on_lease = threading.RLock()
        self._born = time.monotonic()

    def announce(self, topic: str, replica: int, rank: int, record: Record) -> None:
        """Publish a record (JSON, at most MAX_RECORD_BYTES) under (topic, replica, rank), until `close`.

        Raises RendezvousTimeout if no server answers in time, PlaceTaken, and ValueError if the server's secret is
        another one.
        """
        key = _key((topic, replica, rank))
        before = dict(self._announced)
        self._announced[key] = _record(record)
        try:
            self._hold([key], [], self._timeout_seconds)
        except ValueError:
            self._announced = before
            raise

    def fail(self, replica: int, rank: int, reason: str, *, of_run: bool = True, lasting: bool = False) -> bool:
        """Tell all ranks of the run that wait, or will soon, that this one failed at its start; without `of_run` only
        those of its own replica: the others can do without it. `lasting`: its replica would fail again if it were only
        started again.

        Returns whether the server knows it now, after TELL_SECONDS at most: a process that fails has no more to do
        where it can't be told.
        """
        place = _place((replica, rank))
        self._failed[place] = (reason[:MAX_REASON_CHARACTERS], of_run, lasting)
        try:
            self._hold([], [place], TELL_SECONDS)
        except (RendezvousTimeout, ValueError):
            return False
        return True

    def wait_for(self, topic: str, keys: Iterable[Place], timeout_seconds: float | None = None) -> dict[Place, Record]:
        """The records of all (replica, rank) pairs of `keys` under `topic`, as soon as all have announced them.

        Raises RendezvousTimeout, which names who is missing, after `timeout_seconds` (the client's own by default), and
        StartFailed once a rank of the run fails at its start (if it had failed before this client existed, not before
        directory.RESTART_SECONDS: it may be about to start again as well).
        """
        wanted = list(dict.fromkeys(keys))
        timeout_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = self._retry(lambda: self._ask(topic, wanted, deadline), deadline, timeout_seconds, wanted)
            missing = [key for key in wanted if key not in found]
            if not missing:
                return {key: found[key] for key in wanted}
            if time.monotonic() >= deadline:
                raise RendezvousTimeout(
                    f"{len(missing)} of {len(wanted)} have not announced {topic!r} at {spoken(self.address)} "
                    f"in {timeout_seconds:g} s: {_names(missing)}"
                )

    def look(self, topic: str, keys: Iterable[Place], seconds: float = 0.0) -> dict[Place, Record]:
        """Which of these records there are: all of them, or after `seconds` those that there are by then.

        Raises RendezvousTimeout if no server answers in the client's time, and StartFailed as `wait_for` does.
        """
        wanted, deadline = list(dict.fromkeys(keys)), time.monotonic() + self._timeout_seconds
        return self._retry(lambda: self._ask(topic, wanted, deadline, seconds), deadline, self._timeout_seconds, wanted)

    def renew(self) -> bool:
        """Announce everything again to a server that has been restarted; whether the server knows it now."""
        try:
            self._keep_lease(time.monotonic() + TELL_SECONDS)
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """End the lease: what this client announced is forgotten. It may announce again afterwards."""
        self._announced, self._failed = {}, {}
        self._drop_lease()

    def _drop_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _hold(self, keys: Sequence[Key], failed: Sequence[Place], timeout_seconds: float) -> None:
        """Tell the server these records and failures on the lease, retrying until the time is up."""
        deadline = time.monotonic() + timeout_seconds
        self._retry(lambda: self._tell_alone(keys, failed, deadline), deadline, timeout_seconds, [])

    def _tell_alone(self, keys: Sequence[Key], failed: Sequence[Place], deadline: float) -> None:
        with self._on_lease:
            self._tell(keys, failed, deadline)

    def _tell(self, keys: Sequence[Key], failed: Sequence[Place], deadline: float) -> None:
        """One attempt at that; a new lease repeats all that this client has said."""
        if self._lease is not None and self._lease.hung_up():
            self._drop_lease()
        try:
            if self._lease is None:
                keys, failed = list(self._announced), list(self._failed)
                self._lease = self._dial(deadline)
            remaining = max(0.0, deadline - time.monotonic())
            self._lease.expire_in(min(remaining + 2, TAKEN_SECONDS + ANSWER_SECONDS))
            self._lease.send(
                {
                    "hold": [(key, self._announced[key]) for key in keys],
                    "failed": [(place, *self._failed[place]) for place in failed],
                    "seconds": remaining,
                }
            )
            answer = self._lease.receive()
            if answer["kind"] != "taken":
                raise self._refused(answer)
        except BaseException:
            self._drop_lease()
            raise

    def _ask(
        self, topic: str, wanted: Sequence[Place], deadline: float, most_seconds: float = math.inf
    ) -> dict[Place, Record]:
        """One question that a server has answered, by the deadline or within `most_seconds`.

        It also knows our announcements then, if it was restarted.
        """
        if self._announced or self._failed:
            self._keep_lease(deadline)
        channel = self._dial(deadline)
        try:
            now = time.monotonic()
            seconds = max(0.0, min(deadline - now, most_seconds))
            channel.expire_in(min(seconds + 2, POLL_SECONDS + ANSWER_SECONDS))
            find = [(topic, *place) for place in wanted]
            channel.send({"find": find, "seconds": seconds, "age": now - self._born})
            return self._read(channel)
        finally:
            channel.close()

    def _keep_lease(self, deadline: float) -> None:
        with self._on_lease:
            if self._lease is None or self._lease.hung_up():
                self._tell([], [], deadline)

    def _dial(self, deadline: float) -> Channel:
        return dial(self.address, self._secret, self._hello, max(0.1, deadline - time.monotonic()), keep_trying=True)

    def _retry(self, attempt: Callable[[], T], deadline: float, timeout_seconds: float, wanted: Sequence[Place]) -> T:
        """Repeat an attempt until a server has answered it. Raises RendezvousTimeout if none does by the deadline."""
        while True:
            try:
                return attempt()
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise RendezvousTimeout(
                        f"no rendezvous answered at {spoken(self.address)} in {timeout_seconds:g} s ({error})"
                        + (f"; still wanted: {_names(wanted)}" if wanted else "")
                    ) from error
                time.sleep(0.05)  # the server went away in the middle of an answer: it may come back

    def _read(self, channel: Channel) -> dict[Place, Record]:
        found = {}
        while (answer := channel.receive())["kind"] == "records":
            found.update({(replica, rank): record for (_, replica, rank), record in answer["records"]})
        if answer["kind"] == "failed":
            raise StartFailed(answer["reason"], answer["lasting"])
        if answer["kind"] != "end":
            raise self._refused(answer)
        return found

    def _refused(self, answer: Message) -> ValueError:
        kind = PlaceTaken if answer.get("taken") else ValueError
        return kind(f"refused by the rendezvous at {spoken(self.address)}: {answer.get('reason')}")


def _refuse(channel: Channel, error: Exception) -> None:
    channel.expire_in(ANSWER_SECONDS)
    with contextlib.suppress(OSError):  # one that is gone needs no telling
        taken = isinstance(error, PlaceTaken)
        channel.send({"kind": "refused", "reason": str(error)[:MAX_REASON_CHARACTERS], "taken": taken})


def _names(places: Iterable[Place]) -> str:
    return ", ".join(f"replica {replica} rank {rank}" for replica, rank in places)


def _place(place: Any) -> Place:
    """A checked (replica, rank). Raises ValueError."""
    replica, rank = place
    if not (isinstance(replica, int) and isinstance(rank, int) and min(replica, rank) >= 0):
        raise ValueError(f"a place is (replica, rank), not {shown(place)}")
    return replica, rank


def _key(key: Any) -> Key:
    """A checked (topic, replica, rank). Raises ValueError."""
    topic, replica, rank = key
    if not (isinstance(topic, str) and isinstance(replica, int) and isinstance(rank, int) and min(replica, rank) >= 0):
        raise ValueError(f"a record belongs to (topic, replica, rank), not to {shown(key)}")
    return topic, replica, rank


def _record(record: Any) -> Record:
    """The record as JSON returns it. Raises ValueError if it is no JSON object, or too large."""
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object; got {shown(record)}")
    try:
        text = json.dumps(record)
    except TypeError as error:
        raise ValueError(f"a record must be JSON: {error}") from error
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(text)} bytes; the limit is {MAX_RECORD_BYTES}")
    return json.loads(text)
