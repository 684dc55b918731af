"""A rank's state from a live twin: every bit of it, or an error that says why, whatever the donor does."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import time
import zlib

import pytest
import torch

from noloco_mega import device
from noloco_mega.checkpoint import donor as giving
from noloco_mega.checkpoint.donor import Donor
from noloco_mega.checkpoint.format import RankContent, Span, Stored, described
from noloco_mega.checkpoint.joiner import DonationFailed, RankShape, fetch
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.wire import Channel
from noloco_mega.grid import Grid
from noloco_mega.model.parameters import Piece, ParameterSlices
from tests.harness import Ranks, replica_world, run_ranks

SECRET = b"0123456789abcdef0123456789abcdef"
LONG_SECONDS = 60.0
INNER_STEPS = 2


def settings_of(grid, bf16):
    import dataclasses

    from tests.dist.test_engine import make_config

    run = make_config(grid, bf16=bf16, clip=1.0)
    return dataclasses.replace(run, noloco=dataclasses.replace(run.noloco, inner_steps=INNER_STEPS))


def digests(state, engine):
    """Of everything that a run goes on from."""
    content = state.collect([])
    found = {t.key: hashlib.sha256(t.tensor.numpy().tobytes()).hexdigest() for t in content.tensors if t.kind != "rng"}
    for name, weight in engine.module.named_parameters():
        found[name] = hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return found, content.numbers


def _donate_and_adopt(place, directory, grid, cases):
    """Replica 0 trains and donates at its second outer step; replica 1 adopts that. Both then take the same steps."""
    import torch.distributed as dist

    from noloco_mega import attach
    from noloco_mega.checkpoint.format import CheckpointError
    from noloco_mega.checkpoint.state import RankState
    from noloco_mega.engine import deepspeed as engines
    from noloco_mega.engine.weights import Masters
    from tests.dist.test_engine import make_stage, run_schedule
    from tests.dist.test_outer import make_peers

    world = replica_world(grid, place, directory)
    rank, answers = grid.replica_rank(place), []
    for number, bf16 in enumerate(cases):
        run = settings_of(grid, bf16)
        engine = engines.build_engine(make_stage(run, world), run, world)
        peers = make_peers(grid, place, directory, f"case{number}", world.replica)
        listener = Listener(SECRET)
        store = dist.FileStore(str(directory / f"donors{number}"), grid.size)
        hook = attach(engine, run, peers)
        peers.addresses = {}
        state = RankState(engine, hook, world)

        def train(steps, engine=engine, hook=hook):
            for _ in range(steps):
                engines.begin(engine)
                run_schedule(engine.module, hook.step, place.data, world)
                engines.apply(engine, world)

        if place.replica == 0:
            donor = Donor(listener, world.device, run_id="run", replica=0, rank=rank)
            store.set(str(rank), json.dumps(listener.address))
            train(2 * INNER_STEPS)
            while not donor.wanted:
                time.sleep(0.01)
            donor.offer(state.collect([(1.0, 1)]), {"step": hook.step})
            before = digests(state, engine)
            train(1)
            store.get(f"adopted {rank}")
        else:
            with torch.no_grad():
                for master in Masters(engine).tensors:
                    master.add_(1.0)  # what it has so far is worth nothing
            address = tuple(json.loads(store.get(str(rank))))
            donated = fetch(
                address, SECRET, state.shape(), run_id="run", replica=1, rank=rank, deadline_seconds=LONG_SECONDS
            )
            assert donated.facts == {"step": 2 * INNER_STEPS} and donated.replica == 0
            elements = sum(master.numel() for master in Masters(engine).tensors)
            assert donated.received_bytes == 4 * 4 * elements, "master, exp_avg, exp_avg_sq, δ: φ is the masters' bits"
            untouched = digests(state, engine)
            for change in ({"layouts": {}}, {"parameters": {}}):
                with pytest.raises(CheckpointError, match="masters hold other|parameters differ"):
                    state.adopt(_changed(donated, slices={**donated.slices, **change}))
            for numbers in ({}, {**donated.numbers, "engine": {"global_steps": -1}}, {**donated.numbers, "inner": []}):
                with pytest.raises(CheckpointError, match="malformed|inner optimizer steps 0"):
                    state.adopt(_changed(donated, numbers=numbers))
            assert digests(state, engine) == untouched
            state.adopt(donated)
            before = digests(state, engine)
            store.set(f"adopted {rank}", "1")
            train(1)
        train(INNER_STEPS - 1)
        answers.append((before, digests(state, engine), hook.step, hook.outer_step))
        peers.exchange.close()
    return answers


def _changed(donated, **fields):
    import dataclasses

    return dataclasses.replace(donated, **fields)


@pytest.mark.parametrize(
    ("grid", "cases"), [(Grid(replicas=2, data=2), [False, True]), (Grid(replicas=2, tensor=2), [False])], ids=["D2", "T2"]
)
def test_a_joiner_goes_on_as_the_donor_does(tmp_path, grid, cases):
    answers = run_ranks(_donate_and_adopt, grid, tmp_path, grid, cases, limit_seconds=200)
    for rank in range(grid.replica_size):
        for number in range(len(cases)):
            donor, joiner = answers[rank][number], answers[grid.replica_size + rank][number]
            assert donor == joiner
            (before, numbers), (after, _), step, outer_step = donor
            assert {key.split(".")[0] for key in before} >= {"master", "exp_avg", "exp_avg_sq", "outer"}
            assert all(before[key] != after[key] for key in before), "the steps after it changed nothing"
            assert (step, outer_step) == (3 * INNER_STEPS, 3) and numbers["hook"]["step"] == 2 * INNER_STEPS


# From here on a rank is a few tensors of the test's own.

ELEMENTS = 3_000_000


def content(elements=ELEMENTS, step=7):
    """A rank's state, whose φ has the bits of its master."""
    slices = [ParameterSlices("weight", (elements,), (Piece(((0, elements),), ((0, elements),)),))]
    values = {kind: torch.full((elements,), value) for kind, value in (("master", 1.0), ("exp_avg", 2.0))}
    values |= {"outer.phi": values["master"].clone(), "outer.delta": torch.full((elements,), -0.0)}
    tensors = [Stored(key=f"{kind}.0", kind=kind, tensor=tensor, layout="0") for kind, tensor in values.items()]
    tensors.append(Stored(key="rng.cpu", kind="rng", tensor=torch.zeros(9, dtype=torch.uint8), layout=None))
    layouts = {"0": [Span("weight", 0, 0, elements)]}
    return RankContent(tensors=tensors, layouts=layouts, slices=slices, numbers={"hook": {"step": step}, "losses": [1]})


def shape(elements=ELEMENTS):
    return RankShape(
        **described(content(elements)), elements={"0": elements}, kinds=frozenset({"master", "outer.phi", "outer.delta"})
    )


class Side:
    """A donor in this process, and calls to it."""

    def __init__(self, listener=None):
        self.listener = listener or Listener(SECRET)
        self.donor = Donor(self.listener, device.select(0, "cpu"), run_id="run", replica=3, rank=0)

    def fetch(self, **different):
        arguments = {"run_id": "run", "replica": 1, "rank": 0, "deadline_seconds": LONG_SECONDS, **different}
        secret = arguments.pop("secret", SECRET)
        address = arguments.pop("address", self.listener.address)
        return fetch(address, secret, arguments.pop("shape", shape()), **arguments)

    def fetch_later(self, **different):
        """A call in a thread of its own: a list that gets its result, and the thread."""
        results = []

        def call():
            try:
                results.append(self.fetch(**different))
            except DonationFailed as error:
                results.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        return results, thread


@pytest.fixture
def side():
    made = Side()
    yield made
    made.donor.close()
    made.listener.close()


def until(condition):
    limit = time.monotonic() + LONG_SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_all_who_wait_get_the_copy_and_it_is_freed(side):
    calls = [side.fetch_later(replica=replica) for replica in (1, 2)]
    until(lambda: side.donor._waiting == 2)
    assert side.donor.wanted
    live = content()
    side.donor.offer(live, {"note": "ü"})
    for stored in live.tensors[:4]:
        stored.tensor.fill_(9.0)  # training goes on
    for results, thread in calls:
        thread.join(LONG_SECONDS)
        (donated,) = results
        expected = content()
        for stored in expected.tensors[:4]:
            assert torch.equal(donated.tensors[stored.key].view(torch.int32), stored.tensor.view(torch.int32))
        assert set(donated.tensors) == {"master.0", "exp_avg.0", "outer.phi.0", "outer.delta.0"}
        assert donated.numbers == {"hook": {"step": 7}} and donated.facts == {"note": "ü"} and donated.replica == 3
        assert donated.received_bytes == 3 * 4 * ELEMENTS
    until(lambda: side.donor._offer is None)
    assert not side.donor.wanted


def test_a_copy_that_nobody_fetches_is_freed_and_one_that_is_there_is_given_at_once(side):
    side.donor.offer(content(), {}, seconds=0.2)
    until(lambda: side.donor._offer is None)
    side.donor.offer(content(step=8), {}, seconds=LONG_SECONDS)
    side.donor.offer(content(step=9), {}, seconds=LONG_SECONDS)
    assert side.fetch().numbers["hook"] == {"step": 9}


def test_a_caller_that_is_gone_is_not_waited_for(side):
    with pytest.raises(DonationFailed, match="deadline passed"):
        side.fetch(deadline_seconds=0.5)
    until(lambda: not side.donor.wanted and side.donor._callers == 0)


@pytest.mark.parametrize(
    ("different", "word"),
    [
        ({"secret": b"another secret entirely"}, "different secret"),
        ({"run_id": "other"}, "run_id 'other' meets run_id 'run' of replica 3"),
        ({"rank": 5}, "rank 5"),
        ({"shape": shape(ELEMENTS + 1)}, r"weight is .*3000000.* there, .*3000001.* here"),
        ({"address": ("127.0.0.1", 9)}, "refused"),
    ],
)
def test_who_does_not_belong_together_is_told_so(side, different, word):
    side.donor.offer(content(), {})
    with pytest.raises(DonationFailed, match=word):
        side.fetch(**different)
    assert side.fetch().numbers["hook"] == {"step": 7}, "the next one is served"


def test_a_donor_that_leaves_says_so(side):
    results, thread = side.fetch_later()
    until(lambda: side.donor.wanted)
    side.donor.close()
    thread.join(LONG_SECONDS)
    assert "replica 3 is leaving" in str(results[0])
    with pytest.raises(DonationFailed, match="replica 3 is leaving"):
        side.fetch()


def test_callers_are_bounded(side, monkeypatch):
    monkeypatch.setattr(giving, "MAX_CALLERS", 1)
    results, thread = side.fetch_later()
    until(lambda: side.donor.wanted)
    with pytest.raises(DonationFailed, match="serves 1 already"):
        side.fetch()
    side.donor.offer(content(), {})
    thread.join(LONG_SECONDS)
    assert results[0].facts == {}


def test_a_state_that_is_not_finite_is_refused(side):
    bad = content()
    bad.tensors[1].tensor[ELEMENTS - 1] = float("nan")
    side.donor.offer(bad, {})
    with pytest.raises(DonationFailed, match=r"exp_avg\.0 that is not finite"):
        side.fetch()


def _relay(source, target, flip_at=None):
    """Hand bytes on until either end closes, one bit changed at an offset."""
    passed = 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(1 << 16)):
            if flip_at is not None and passed <= flip_at < passed + len(data):
                data[flip_at - passed] ^= 4
            passed += len(data)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_bit_that_flips_on_the_wire_is_noticed(side):
    side.donor.offer(content(), {})
    with socket.create_server(("127.0.0.1", 0)) as server:

        def between():
            joiner, _ = server.accept()
            donor = socket.create_connection(side.listener.address)
            threading.Thread(target=_relay, args=(joiner, donor), daemon=True).start()
            _relay(donor, joiner, flip_at=5 * ELEMENTS)
            joiner.close()
            donor.close()

        threading.Thread(target=between, daemon=True).start()
        with pytest.raises(DonationFailed, match=r"a part of exp_avg\.0 that arrived with a wrong checksum"):
            side.fetch(address=server.getsockname())
    assert side.fetch().numbers["hook"] == {"step": 7}


SMALL = 1000


def head(**different):
    tensors = [
        {"key": f"{kind}.0", "kind": kind, "dtype": "float32", "numel": SMALL, "layout": "0"}
        for kind in ("master", "outer.phi", "outer.delta")
    ]
    tensors[1]["same_as"] = "master.0"
    return {"kind": "state", "replica": 3, "tensors": tensors, "numbers": {"a": 1.5}, "facts": {}, **different}


def entries(index, **different):
    """The tensors of `head` with one of them changed."""
    tensors = head()["tensors"]
    tensors[index] |= different
    return tensors


def scripted(channel, announced, digest=None, slices=None):
    """A donor written from the module's docstring alone."""
    channel.expire_in(LONG_SECONDS)
    described_slices = {"kind": "slices", **described(content(SMALL)), **(slices or {})}
    channel.send({"kind": "wait"})
    channel.send(announced)
    channel.send(described_slices)
    sha = hashlib.sha256()
    for message in (announced, described_slices):
        sha.update(json.dumps(message, sort_keys=True).encode())
    for value in (1.0, 2.0):
        data = torch.full((SMALL,), value).numpy().tobytes()
        sha.update(data)
        channel.send_view(memoryview(data))
        channel.write_exactly(zlib.crc32(data).to_bytes(4, "big"))
    channel.send({"kind": "sha256", "digest": digest or sha.hexdigest()})
    return channel.receive()


def act(script):
    """A listener whose "state" hellos meet the script, and what that returned."""
    listener, returned = Listener(SECRET), []

    def handle(channel, hello):
        with contextlib.suppress(OSError):
            returned.append(script(channel))
        channel.close()

    listener.register("state", handle)
    return listener, returned


def call(listener, **different):
    arguments = {"run_id": "run", "replica": 1, "rank": 0, "deadline_seconds": LONG_SECONDS, **different}
    return fetch(listener.address, SECRET, shape(SMALL), **arguments)


def test_the_transfer_is_the_documented_one():
    listener, returned = act(lambda channel: scripted(channel, head()))
    donated = call(listener)
    assert donated.tensors["outer.phi.0"].tolist() == donated.tensors["master.0"].tolist() == [1.0] * SMALL
    assert donated.tensors["outer.delta.0"].tolist() == [2.0] * SMALL and donated.numbers == {"a": 1.5}
    until(lambda: returned == [{"kind": "ack"}])
    listener.close()


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (lambda c: scripted(c, head(tensors=entries(0, numel=1 << 40))), "master.0 has 1099511627776 elements"),
        (lambda c: scripted(c, head(tensors=entries(2, dtype="float64"))), "of float64, here 1000 of float32"),
        (lambda c: scripted(c, head(tensors=entries(2, layout="1"))), "here None of float32"),
        (lambda c: scripted(c, head(tensors=entries(2, key="master.0"))), "each kind of each master once"),
        (lambda c: scripted(c, head(tensors=head()["tensors"][:2])), "here master, outer.delta, outer.phi and an"),
        (
            lambda c: scripted(c, head(tensors=[t | {"kind": f"k{n}"} for n in range(9) for t in entries(0)])),
            "it keeps k0, k1",
        ),
        (lambda c: scripted(c, head(tensors=[1, 2])), "none of this version"),
        (lambda c: scripted(c, head(numbers=None)), "none of this version"),
        (lambda c: scripted(c, head(), slices={"parameters": {"weight": None}}), "weight is null there"),
        (lambda c: scripted(c, head(), slices={"parameters": 3}), "weight is absent there"),
        (lambda c: scripted(c, head(), slices={"layouts": {}}), "masters hold other parts of them: 0 is absent there"),
        (lambda c: c.send_view(memoryview(os.urandom(100_000))), ""),
        (lambda c: None, "closed the connection"),
    ],
)
def test_what_can_not_be_taken_over_is_refused_before_memory_is_taken(monkeypatch, script, word):
    def no_memory(*_, **__):
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", no_memory)
    listener, _ = act(script)
    with pytest.raises(DonationFailed, match=word):
        call(listener)
    listener.close()


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (lambda c: scripted(c, head(), digest="0" * 64), "SHA-256 does not fit"),
        (lambda c: scripted(c, head(tensors=entries(1, same_as="exp_avg.0"))), "sent no exp_avg.0 that outer.phi.0"),
        (lambda c: (c.send({"kind": "wait"}), time.sleep(LONG_SECONDS)), "deadline passed while waiting"),
    ],
)
def test_a_donor_that_misbehaves_later_fails_too(script, word):
    listener, _ = act(script)
    began = time.monotonic()
    with pytest.raises(DonationFailed, match=word):
        call(listener, silence_seconds=1.0)
    assert time.monotonic() - began < LONG_SECONDS / 2
    listener.close()


def _slow_donor(_, directory):
    """Offers at once, sends a chunk every now and then, and says when it is at it."""
    side = Side()
    real = Channel.send_view

    def crawl(channel, view):
        real(channel, view)
        (directory / "transferring").touch()
        time.sleep(0.3)

    Channel.send_view = crawl
    side.donor.offer(content(), {})
    (directory / "part").write_text(json.dumps(side.listener.address))
    (directory / "part").rename(directory / "address")
    time.sleep(10 * LONG_SECONDS)


@pytest.mark.parametrize(("blow", "word"), [(signal.SIGKILL, "closed the connection|reset"), (signal.SIGSTOP, "deadline")])
def test_a_donor_that_is_struck_in_the_middle_of_a_transfer_is_given_up(tmp_path, side, blow, word):
    ranks = Ranks(_slow_donor, [0], tmp_path, ())
    until((tmp_path / "address").exists)
    address = tuple(json.loads((tmp_path / "address").read_text()))
    results, thread = side.fetch_later(address=address, silence_seconds=2.0, deadline_seconds=10 * LONG_SECONDS)
    until((tmp_path / "transferring").exists)
    os.kill(ranks.processes[0].pid, blow)
    thread.join(LONG_SECONDS)
    ranks.stop()
    assert isinstance(results[0], DonationFailed)
    with pytest.raises(DonationFailed, match=word):
        raise results[0]
    side.donor.offer(content(), {})
    assert side.fetch().facts == {}, "another donor will do"
