"""A listener under fire: frames that are random, cut off, oversized or replayed, from strangers and from peers.

Two processes exchange all along. Whatever is sent to one of them, they go on, and it neither grows nor keeps anything.
"""

import contextlib
import json
import os
import random
import resource
import socket
import struct
import threading
import time

import psutil
import pytest
import torch

from noloco_mega import device
from noloco_mega.checkpoint.donor import Donor
from noloco_mega.comm.channel import MAX_UNPROVEN, Listener, dial
from noloco_mega.comm.control import Leaders, StopAgreement
from noloco_mega.comm.exchange import Exchange, Received
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousServer
from noloco_mega.comm.wire import MAX_MESSAGE_BYTES as LARGEST
from tests.harness import Ranks

SECRET = b"0123456789abcdef0123456789abcdef"
MAGIC = b"NOLOCO1\n"
LIMIT_SECONDS = 120.0
ROUNDS = 300
HALF_OPEN = 1000
KINDS = ["exchange", "exchange", "exchange", "state", "state", "stop", "rendezvous", "nonsense", "", "refused"]
FIELDS = ["run_id", "run", "fingerprint", "rank", "replica", "outer_step", "tensors", "stop", "arrived", "place", "client"]


def _exchange_all_along(replica, directory):
    """Swap a buffer with the other one, outer step after outer step, until told to stop; how many came and how many
    did not after the first, and what went wrong in other threads."""
    faults = []
    threading.excepthook = lambda args: faults.append(repr(args.exc_value))
    listener = Listener(SECRET)
    identity = {"rank": 0, "run_id": "run", "fingerprint": "print"}
    exchange = Exchange(replica=replica, listener=listener, secret=SECRET, **identity)
    Donor(listener, device.select(0, "cpu"), run_id="run", replica=replica, rank=0)
    StopAgreement(Leaders(replica, listener, SECRET, "run"))
    (directory / f"part_{replica}").write_text(json.dumps(listener.address))
    (directory / f"part_{replica}").rename(directory / f"address_{replica}")
    other = 1 - replica
    while not (path := directory / f"address_{other}").exists():
        time.sleep(0.01)
    address, step, good, reasons = tuple(json.loads(path.read_text())), 0, 0, []
    send, receive = torch.full((100_000,), float(replica)), torch.zeros(100_000)
    stop = directory / "stop"

    def end_the_last_one():
        while not stop.exists():
            time.sleep(0.05)
        exchange.close()

    threading.Thread(target=end_the_last_one, daemon=True).start()
    while not stop.exists():
        try:
            outcome = exchange.launch(step, [send], {other: [receive]}, {other: address}, 30.0, 30.0).wait()[other]
        except ValueError:
            assert stop.exists(), "closed, but not at the end"
        if stop.exists():
            break
        if isinstance(outcome, Received):
            assert bool((receive == other).all())
            good += 1
            (directory / f"good_{replica}").write_text(str(good))
        else:
            reasons.append(outcome.reason)
        step = max(step + 1, exchange.latest_outer_step)
        time.sleep(0.02)
    return good, reasons, faults


def anything(chance, depth=3):
    """A random JSON value, with a liking for what programs stumble over."""
    kind = chance.randrange(10 if depth else 7)
    if kind in (0, 3):
        return chance.choice([0, 1, -1, 2**31, 2**63, -(2**70), 10**400, True])
    if kind == 1:
        return chance.choice([0.5, float("nan"), float("inf"), -1e308])
    if kind in (2, 4):
        return chance.choice(["", "run", "print", "\ud800", "\0", "ü" * 50, "\ud800" * 170_000, "y" * 9000])
    if kind in (5, 6):
        return chance.choice([None, False, [], {}, 1])
    if kind == 7:
        return {chance.choice(FIELDS): anything(chance, depth - 1) for _ in range(chance.randrange(4))}
    value = [anything(chance, depth - 1) for _ in range(chance.randrange(4))]
    if depth == 3 and chance.random() < 0.3:
        for _ in range(600):
            value = [value]
    return value


def hello(chance):
    """A hello that some handler takes for its own, and whose fields are right, wrong or missing."""
    made = {"kind": chance.choice(KINDS), "run_id": "run", "run": "run", "fingerprint": "print", "rank": 0, "replica": 7}
    made["outer_step"] = chance.choice([0, 1, 1 << 60])
    made |= {field: anything(chance) for field in chance.sample(FIELDS, chance.randrange(1, 4))}
    for field in chance.sample(FIELDS, 2):
        made.pop(field, None)
    if made.get("replica") in (0, 1):
        made["fingerprint"] = "another"  # a twin that lies about itself costs its partner an exchange, as it may
    return made if len(json.dumps(made)) < LARGEST else hello(chance)


def frame(chance):
    """Bytes where a message belongs."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 2000))
    if kind == 1:
        return struct.pack(">I", chance.choice([0xFFFFFFFF, (1 << 20) + 1, 1 << 20])) + chance.randbytes(100)
    if kind == 2:
        return struct.pack(">I", 50_000) + b"[" * 50_000
    body = json.dumps(anything(chance)).encode()
    whole = struct.pack(">I", len(body)) + body
    return whole if kind == 3 else whole[: chance.randrange(1, len(whole) + 1)]


def by_a_stranger(chance, address, recorded):
    """One connection that proves nothing; it ends in an orderly way, by a reset, or stays for the caller to close."""
    stranger = socket.create_connection(address, timeout=LIMIT_SECONDS)
    with contextlib.suppress(OSError):
        kind = chance.randrange(6)
        if kind > 0:
            stranger.recv(40)
        if kind == 1:
            stranger.sendall(chance.randbytes(chance.randrange(1, 300)))
        elif kind == 2:
            stranger.sendall(MAGIC + chance.randbytes(chance.randrange(0, 200)))
        elif kind == 3:
            stranger.sendall(chance.choice(recorded))
        elif kind == 4:
            stranger.sendall(chance.choice(recorded)[: chance.randrange(1, 72)])
        elif kind == 5:
            stranger.sendall(chance.randbytes(500_000))
        if chance.random() < 0.3:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return stranger


def by_a_peer(chance, address):
    """One connection of somebody who holds the secret and sends garbage, as or after the hello."""
    channel = dial(address, SECRET, {"kind": "nonsense"} if chance.random() < 0.2 else hello(chance), LIMIT_SECONDS)
    channel.expire_in(LIMIT_SECONDS)
    with contextlib.suppress(OSError):
        for _ in range(chance.randrange(3)):
            channel.send_view(memoryview(frame(chance)))
    return channel


def record(address):
    """What a good dialer sends to prove itself: through a tap between it and the listener."""
    with socket.create_server(("127.0.0.1", 0)) as tap:
        answers = []

        def relay():
            caller, _ = tap.accept()
            upstream = socket.create_connection(address, timeout=LIMIT_SECONDS)
            caller.sendall(upstream.recv(40, socket.MSG_WAITALL))
            answers.append(caller.recv(72, socket.MSG_WAITALL))
            upstream.sendall(answers[0])
            caller.sendall(upstream.recv(32, socket.MSG_WAITALL))
            upstream.close()
            caller.close()

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        with contextlib.suppress(OSError):
            dial(tap.getsockname(), SECRET, {"kind": "nonsense"}, LIMIT_SECONDS).close()
        thread.join()
    return answers


def attack(chance, address, rounds, recorded):
    """So many hostile connections, a few of them open at once."""
    held = []
    for _ in range(rounds):
        with contextlib.suppress(OSError):  # cut off at once by a listener that has enough of us
            held.append(
                by_a_stranger(chance, address, recorded) if chance.random() < 0.5 else by_a_peer(chance, address)
            )
        while len(held) > 20:
            held.pop(chance.randrange(len(held))).close()
    for connection in held:
        connection.close()


def held_by(process):
    """What a process holds: file descriptors, threads, megabytes."""
    return process.num_fds(), process.num_threads(), process.memory_info().rss / 1e6


def settled(process, before):
    """What the process holds once that is no more than before, or after a while."""
    deadline = time.monotonic() + 30
    while True:
        fds, threads, megabytes = held_by(process)
        if (fds <= before[0] + 3 and threads <= before[1] + 3) or time.monotonic() > deadline:
            return fds, threads, megabytes
        time.sleep(0.1)


def good(directory, replica=0):
    try:
        return int((directory / f"good_{replica}").read_text() or 0)
    except FileNotFoundError:
        return 0


def until(condition, what):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(10 * ROUNDS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_a_process_under_fire_goes_on_and_does_not_grow(tmp_path, rounds):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * HALF_OPEN)), hard))
    ranks = Ranks(_exchange_all_along, [0, 1], tmp_path, ())
    until(lambda: good(tmp_path) >= 3, "the two never met")
    address = tuple(json.loads((tmp_path / "address_0").read_text()))
    process = psutil.Process(ranks.processes[0].pid)
    seed = int(os.environ.get("NOLOCO_FUZZ_SEED", "1"))
    chance, recorded = random.Random(seed), record(address)

    attack(chance, address, rounds // 3, recorded)  # buffers and arenas that are made once: 30 MB in 2,000 rounds
    before = settled(process, (10**9, 10**9))
    exchanged = good(tmp_path)
    attack(chance, address, rounds, recorded)
    deadline = time.monotonic() + LIMIT_SECONDS
    while good(tmp_path) < exchanged + 2:
        assert time.monotonic() < deadline, "no exchange while under fire"
        attack(chance, address, 20, recorded)
    after = settled(process, before)
    assert after[0] <= before[0] + 3 and after[1] <= before[1] + 3, (seed, before, after)
    assert after[2] <= before[2] + 30, (seed, before, after)

    half_open = []
    for _ in range(HALF_OPEN):
        half_open.append(socket.socket())
        half_open[-1].setblocking(False)
        half_open[-1].connect_ex(address)
    exchanged = good(tmp_path)
    until(lambda: good(tmp_path) >= exchanged + 3, "no exchange beside half-open connections")
    fds, threads, _ = held_by(process)
    assert fds <= before[0] + MAX_UNPROVEN + 3 and threads <= before[1] + 3
    for stranger in half_open:
        stranger.close()
    assert settled(process, before)[2] <= before[2] + 30

    (tmp_path / "stop").touch()
    answers = ranks.wait(LIMIT_SECONDS)
    for swapped, reasons, faults in answers.values():
        assert not faults, (seed, faults[:3])
        assert len(reasons) <= 1 + 0.1 * swapped, (seed, swapped, reasons[:5])


def test_a_rendezvous_under_fire_goes_on_and_keeps_nothing():
    faults, hook = [], threading.excepthook
    threading.excepthook = lambda args: faults.append(repr(args.exc_value))
    chance = random.Random(int(os.environ.get("NOLOCO_FUZZ_SEED", "1")))
    server = RendezvousServer(SECRET)
    try:
        for _ in range(ROUNDS):
            with contextlib.suppress(OSError):
                channel = dial(server.address, SECRET, {**hello(chance), "kind": "rendezvous"}, LIMIT_SECONDS)
                channel.expire_in(LIMIT_SECONDS)
                for _ in range(chance.randrange(1, 4)):
                    channel.send(request(chance))
                    if chance.random() < 0.7:
                        channel.expire_in(0.5)
                        channel.receive()
                channel.close()
        client = RendezvousClient(server.address, SECRET, LIMIT_SECONDS, run="mine", place=(0, 0))
        client.announce("topic", 0, 0, {"a": 1})
        assert client.wait_for("topic", [(0, 0)]) == {(0, 0): {"a": 1}}
        client.close()
        until(lambda: not server._directory._entries, "records of clients that are gone")
        until(lambda: not server._watch._quiet, "leases of clients that are gone")
    finally:
        server.close()
        threading.excepthook = hook
    assert not faults, faults[:3]


def request(chance):
    """A request to a rendezvous whose parts are right, or anything."""
    good_hold = {"hold": [[["t", 0, chance.randrange(5)], {"r": 1}]], "failed": [], "seconds": 0.1}
    good_find = {"find": [["t", 0, 0]], "seconds": 0.1, "age": 1.0}
    made = dict(chance.choice([good_hold, good_find, {"hold": [], "failed": [[[0, 0], "why", True, False]], "seconds": 0}]))
    for key in list(made):
        if chance.random() < 0.4:
            made[key] = anything(chance)
    return made if len(json.dumps(made)) < LARGEST else request(chance)
