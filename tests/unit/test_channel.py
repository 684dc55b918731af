"""The channel against strangers: who gets in, what a hostile client can cost, and what a message may be."""

import hashlib
import hmac
import json
import os
import queue
import socket
import struct
import threading
import time

import pytest

from noloco_mega.comm.channel import MAX_UNPROVEN, Listener, WrongSecret, dial, read_secret
from noloco_mega.comm.wire import MAX_MESSAGE_BYTES, Channel, ProtocolError

SECRET = b"0123456789abcdef0123456789abcdef"
LIMIT_SECONDS = 20  # hang limit of a test, never a measurement
MAGIC = b"NOLOCO1\n"


@pytest.fixture
def arrivals():
    return queue.Queue()


@pytest.fixture
def listener(arrivals):
    listener = Listener(SECRET)
    listener.register("test", lambda channel, hello: arrivals.put((channel, hello)))
    yield listener
    listener.close()


def connect(listener):
    stranger = socket.create_connection(listener.address, timeout=LIMIT_SECONDS)
    stranger.settimeout(LIMIT_SECONDS)
    return stranger


def read(stranger, size):
    data = b""
    while len(data) < size and (more := stranger.recv(size - len(data))):
        data += more
    return data


def pair(listener, arrivals):
    """Both ends of one good connection."""
    mine = dial(listener.address, SECRET, {"kind": "test"}, LIMIT_SECONDS)
    theirs, _ = arrivals.get(timeout=LIMIT_SECONDS)
    for channel in (mine, theirs):
        channel.expire_in(LIMIT_SECONDS)
    return mine, theirs


def test_both_sides_exchange_messages_and_bytes(listener, arrivals):
    mine = dial(listener.address, SECRET, {"kind": "test", "step": 3}, LIMIT_SECONDS)
    theirs, hello = arrivals.get(timeout=LIMIT_SECONDS)
    assert hello == {"kind": "test", "step": 3}
    mine.send({"text": "Größe", "list": [1, 2.5, None]})
    assert theirs.receive() == {"text": "Größe", "list": [1, 2.5, None]}
    data, buffer = os.urandom(3_000_001), bytearray(3_000_001)
    sender = threading.Thread(target=theirs.send_view, args=(memoryview(data),))
    sender.start()
    mine.receive_into(memoryview(buffer))
    sender.join()
    assert bytes(buffer) == data
    assert theirs.sent_bytes == mine.received_bytes == len(data) and mine.sent_bytes == theirs.received_bytes == 0


def test_the_handshake_is_the_documented_one(listener, arrivals):
    """A dialer written from the docstring alone gets in, and the listener's proof is what it says."""
    stranger = connect(listener)
    greeting = read(stranger, 40)
    theirs, mine = greeting[8:], os.urandom(32)

    def proof(role):
        return hmac.new(SECRET, MAGIC + role + b"\n" + theirs + mine, hashlib.sha256).digest()

    stranger.sendall(MAGIC + mine + proof(b"dialer"))
    assert greeting[:8] == MAGIC and read(stranger, 32) == proof(b"listener")
    body = json.dumps({"kind": "test"}).encode()
    stranger.sendall(struct.pack(">I", len(body)) + body)
    assert arrivals.get(timeout=LIMIT_SECONDS)[1] == {"kind": "test"}


def test_a_wrong_secret_is_named_on_the_dialers_side(listener, arrivals):
    with pytest.raises(WrongSecret, match="different secret"):
        dial(listener.address, b"another secret entirely", {"kind": "test"}, LIMIT_SECONDS, keep_trying=True)
    assert arrivals.empty()


def test_a_listener_without_the_secret_is_refused():
    """Somebody who took over the port can't answer the dialer's nonce, whatever it replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor():
            caller, _ = server.accept()
            caller.sendall(MAGIC + bytes(32))
            proof = read(caller, 72)[-32:]
            caller.sendall(proof)  # reflect the dialer's own proof
            caller.recv(1)

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(WrongSecret):
            dial(server.getsockname(), SECRET, {"kind": "test"}, LIMIT_SECONDS)


def test_a_recorded_handshake_is_worth_nothing(listener, arrivals):
    """What a good dialer once sent, or the listener's own proof, does not let anybody in."""
    recorded = []
    with socket.create_server(("127.0.0.1", 0)) as tap:

        def relay():
            caller, _ = tap.accept()
            upstream = connect(listener)
            caller.sendall(read(upstream, 40))
            recorded.append(read(caller, 72))
            upstream.sendall(recorded[0])
            recorded.append(read(upstream, 32))
            caller.sendall(recorded[1])
            upstream.sendall(caller.recv(1000))

        threading.Thread(target=relay, daemon=True).start()
        dial(tap.getsockname(), SECRET, {"kind": "test"}, LIMIT_SECONDS)
        arrivals.get(timeout=LIMIT_SECONDS)
    answer, proof = recorded
    for attempt in (answer, answer[:40] + proof):
        stranger = connect(listener)
        read(stranger, 40)
        stranger.sendall(attempt)
        assert read(stranger, 33) == bytes(32)
    assert arrivals.empty()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0", os.urandom(100_000), b"NOLOCO1\n" + bytes(64), b"NOLOCO0\n"]
)
def test_garbage_is_cut_off_and_delays_nobody(listener, arrivals, garbage):
    stranger = connect(listener)
    read(stranger, 40)
    try:
        stranger.sendall(garbage)
        assert read(stranger, 1000) in (b"", bytes(32))
    except ConnectionError:
        pass  # cut off while sending, or with bytes unread: as good an end
    pair(listener, arrivals)


def test_silent_strangers_block_nobody_and_are_bounded(listener, arrivals):
    strangers = [connect(listener) for _ in range(200)]
    pair(listener, arrivals)
    assert len(listener._unproven) <= MAX_UNPROVEN
    time.sleep(0.1)
    strangers[0].setblocking(False)
    assert strangers[0].recv(40)[:8] == MAGIC and strangers[0].recv(1) == b"", "the oldest should have been closed"
    for stranger in strangers:
        stranger.close()
    pair(listener, arrivals)


def test_a_silent_stranger_is_dropped_after_the_handshake_time(monkeypatch, arrivals):
    monkeypatch.setattr("noloco_mega.comm.channel.HANDSHAKE_SECONDS", 0.2)
    listener = Listener(SECRET)
    silent, dripping = connect(listener), connect(listener)
    dripping.sendall(MAGIC[:3])
    for stranger in (silent, dripping):
        assert len(read(stranger, 41)) == 40  # greeted, then closed
    listener.close()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (struct.pack(">I", MAX_MESSAGE_BYTES + 1), "announced a message of"),
        (struct.pack(">I", 0xFFFFFFFF), "announced a message of"),
        (struct.pack(">I", 4) + b"{]{]", "not JSON"),
        (struct.pack(">I", 2) + b"\xff\xfe", "not JSON"),
        (struct.pack(">I", 6) + b'"text"', "a str where a JSON object"),
        (struct.pack(">I", 100_000) + b"[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_message_is_refused_before_it_costs_memory(listener, arrivals, frame, message):
    mine, theirs = pair(listener, arrivals)
    mine.send_view(memoryview(frame))
    with pytest.raises(ProtocolError, match=message):
        theirs.receive()


def test_a_message_that_is_too_large_is_not_sent(listener, arrivals):
    mine, _ = pair(listener, arrivals)
    with pytest.raises(ValueError, match="the limit is"):
        mine.send({"text": "x" * MAX_MESSAGE_BYTES})


def test_deadlines_hold_for_reading_and_writing(listener, arrivals):
    mine, theirs = pair(listener, arrivals)
    mine.expire_in(0.2)
    with pytest.raises(TimeoutError, match="deadline passed"):
        mine.receive()
    data = memoryview(bytearray(100_000_000))
    theirs.expire_in(1.0)
    with pytest.raises(TimeoutError, match="deadline passed"):
        theirs.send_view(data)  # nobody reads
    assert 0 < theirs.sent_bytes < 100_000_000


def test_a_peer_that_drips_does_not_stretch_the_deadline(listener, arrivals):
    mine, theirs = pair(listener, arrivals)
    stop = threading.Event()

    def drip():
        while not stop.wait(0.02):
            theirs.send_view(memoryview(b"x"))

    threading.Thread(target=drip, daemon=True).start()
    mine.expire_in(0.3)
    with pytest.raises(TimeoutError):
        mine.receive_into(memoryview(bytearray(1_000_000)))
    stop.set()


def test_closing_wakes_another_thread(listener, arrivals):
    mine, theirs = pair(listener, arrivals)
    errors = queue.Queue()

    def wait():
        try:
            mine.receive()
        except OSError as error:
            errors.put(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    mine.interrupt()
    assert isinstance(errors.get(timeout=LIMIT_SECONDS), ConnectionError)
    with pytest.raises(ConnectionError, match="closed the connection"):
        theirs.receive()


def test_an_unknown_kind_is_told_so(listener):
    channel = dial(listener.address, SECRET, {"kind": "nonsense"}, LIMIT_SECONDS)
    channel.expire_in(LIMIT_SECONDS)
    assert channel.receive()["kind"] == "refused"


def test_dialing_waits_for_a_late_listener_and_names_one_that_never_comes(arrivals):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(ConnectionRefusedError):
        dial(address, SECRET, {"kind": "test"}, LIMIT_SECONDS)
    with pytest.raises(TimeoutError, match=f"could not reach 127.0.0.1:{address[1]} in 0.3 s"):
        dial(address, SECRET, {"kind": "test"}, 0.3, keep_trying=True)
    with pytest.raises(ConnectionRefusedError, match=f"nobody listens on 127.0.0.1:{address[1]}"):
        dial(address, SECRET, {"kind": "test"}, 100 * LIMIT_SECONDS, keep_trying=True, refusals_seconds=0.2)
    late = []

    def start():
        late.append(Listener(SECRET, port=address[1]))
        late[0].register("test", lambda channel, hello: arrivals.put(channel))

    threading.Timer(0.3, start).start()
    assert isinstance(dial(address, SECRET, {"kind": "test"}, LIMIT_SECONDS, keep_trying=True), Channel)
    arrivals.get(timeout=LIMIT_SECONDS)
    late[0].close()


def test_refusals_end_the_dialing_and_other_failures_do_not(monkeypatch):
    answers = [ConnectionRefusedError(), TimeoutError(), OSError(113, "No route to host")]
    seen = []

    def fail(*_):
        seen.append(answers[len(seen) % 3])
        raise seen[-1]

    monkeypatch.setattr("noloco_mega.comm.channel._dial_once", fail)
    with pytest.raises(TimeoutError, match="could not reach"):
        dial(("h", 1), SECRET, {"kind": "test"}, 0.8, keep_trying=True, refusals_seconds=0.1)
    assert len(seen) >= 4, "refused twice, never for long at a stretch"


def test_a_server_of_another_kind_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"220 mail.example ESMTP" * 4), daemon=True).start()
        with pytest.raises(ProtocolError, match="not a noloco_mega listener"):
            dial(server.getsockname(), SECRET, {"kind": "test"}, LIMIT_SECONDS, keep_trying=True)


def test_listening_on_every_address_needs_a_name_for_others():
    with pytest.raises(ValueError, match="public_host"):
        Listener(SECRET, "0.0.0.0")
    listener = Listener(SECRET, "0.0.0.0", public_host="localhost")
    assert listener.address[0] == "localhost" and listener.address[1] > 0
    listener.close()
    assert Listener(SECRET).address[0] == "127.0.0.1"


def test_a_taken_port_is_named(listener):
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{listener.address[1]}"):
        Listener(SECRET, port=listener.address[1])


def test_the_secret_comes_from_the_environment_or_a_private_file(tmp_path):
    assert read_secret({"NOLOCO_SECRET": " 0123456789abcdef \n"}) == b"0123456789abcdef"
    path = tmp_path / "secret"
    path.write_text("fedcba9876543210\n")
    path.chmod(0o600)
    assert read_secret({"NOLOCO_SECRET_FILE": str(path)}) == b"fedcba9876543210"
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_secret({"NOLOCO_SECRET_FILE": str(path)})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "openssl rand -hex 32"),
        ({"NOLOCO_SECRET": "short"}, "at least 16"),
        ({"NOLOCO_SECRET": "0123456789abcdef", "NOLOCO_SECRET_FILE": "x"}, "both set"),
        ({"NOLOCO_SECRET_FILE": "/nonexistent/secret"}, "cannot read NOLOCO_SECRET_FILE"),
    ],
)
def test_a_missing_or_poor_secret_says_what_to_do(environ, message):
    with pytest.raises(ValueError, match=message):
        read_secret(environ)
