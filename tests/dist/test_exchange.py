"""Pair exchanges: what arrives, and what a partner that dies, hangs, lies or comes late turns into."""

import contextlib
import os
import signal
import socket
import threading
import time
import tracemalloc
import zlib

import pytest
import torch

from noloco_mega.comm import exchange
from noloco_mega.comm.channel import Listener, dial
from noloco_mega.comm.exchange import Exchange, Missed, Received
from noloco_mega.comm.seats import MAX_PARKED
from noloco_mega.comm.wire import Channel
from tests.harness import Ranks, run_ranks

SECRET = b"0123456789abcdef0123456789abcdef"
LONG_SECONDS = 30.0  # deadline of an exchange that is expected to end by itself, long before
SHORT_SECONDS = 0.6  # deadline of an exchange that is expected to run into it
UNTOUCHED = 7.0


class Member:
    """One rank of one replica in this process, with an exchange of its own."""

    def __init__(self, replica, port=0, secret=SECRET, **different):
        self.listener = Listener(secret, port=port)
        self.address = self.listener.address
        identity = {"rank": 0, "run_id": "run", "fingerprint": "print", **different}
        self.exchange = Exchange(replica=replica, listener=self.listener, secret=secret, **identity)

    def launch(self, step, send, partners, seconds=LONG_SECONDS, cap_seconds=LONG_SECONDS):
        """Swap `send` with {replica: address}; the Pending and the buffers by partner."""
        buffers = {partner: [torch.full_like(t, UNTOUCHED) for t in send] for partner in partners}
        return self.exchange.launch(step, send, buffers, partners, seconds, cap_seconds), buffers

    def close(self):
        self.exchange.close()
        self.listener.close()


@pytest.fixture
def members():
    made = []

    def make(replica, **different):
        made.append(Member(replica, **different))
        return made[-1]

    yield make
    for member in made:
        member.close()
    deadline = time.monotonic() + LONG_SECONDS
    while stuck := [t.name for t in threading.enumerate() if t.name.startswith(("exchange with", "sending to"))]:
        assert time.monotonic() < deadline, f"threads left over: {stuck}"
        time.sleep(0.01)


def untouched(buffers):
    return all(bool((t == UNTOUCHED).all()) for ts in buffers.values() for t in ts)


def payload(seed, elements=200_000):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(elements, generator=generator),
        torch.randn(33, 5, generator=generator).bfloat16(),
        torch.empty(0),
        torch.tensor(float(seed)),
    ]


def test_two_members_swap_every_dtype_and_count_every_byte(members):
    low, high = members(0), members(1)
    mine, theirs = payload(1), payload(2)
    for step in (4, 5, 9):
        first, into_low = low.launch(step, mine, {1: high.address})
        second, into_high = high.launch(step, theirs, {0: low.address})
        at_low, at_high = first.wait(), second.wait()
        expected_bytes = sum(t.numel() * t.element_size() for t in mine)
        assert isinstance(at_low[1], Received) and isinstance(at_high[0], Received), (at_low, at_high)
        assert at_low[1].payload_bytes == at_high[0].payload_bytes == expected_bytes == 200_001 * 4 + 165 * 2
        assert at_low[1].acknowledged and at_high[0].acknowledged
        assert all(torch.equal(a, b) for a, b in zip(into_low[1], theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(into_high[0], mine, strict=True))
        assert first.wait() == at_low, "waiting twice changes nothing"
    for member in (low, high):
        assert member.exchange.sent_bytes == member.exchange.received_bytes == 3 * expected_bytes
        assert member.exchange.latest_outer_step == 9


def _group_of_three(replica, directory):
    member = Member(replica)
    partners = {}
    (directory / f"part_{replica}").write_text(str(member.address[1]))
    (directory / f"part_{replica}").rename(directory / f"port_{replica}")
    for other in {0, 1, 2} - {replica}:
        while not (path := directory / f"port_{other}").exists():
            time.sleep(0.01)
        partners[other] = ("127.0.0.1", int(path.read_text()))
    answers = []
    for step in range(3):
        time.sleep(0.1 * ((replica + step) % 3))
        pending, buffers = member.launch(step, [torch.full((500_000,), float(10 * step + replica))], partners)
        outcomes = pending.wait()
        answers.append({p: (isinstance(o, Received), buffers[p][0].unique().tolist()) for p, o in outcomes.items()})
    return answers


def test_a_group_of_three_processes(tmp_path):
    for replica, answers in enumerate(run_ranks(_group_of_three, 3, tmp_path, limit_seconds=60)):
        for step, answer in enumerate(answers):
            assert answer == {other: (True, [10.0 * step + other]) for other in {0, 1, 2} - {replica}}


def test_no_partners_is_no_outcome_but_moves_the_outer_step(members):
    alone, behind = members(1), members(0)
    assert alone.launch(7, payload(1), {})[0].wait() == {}
    outcome = behind.launch(6, payload(1), {1: alone.address})[0].wait()[1]
    assert isinstance(outcome, Missed) and "at outer step 7" in outcome.reason
    assert behind.exchange.latest_outer_step == 7


def test_arguments_that_can_not_work_are_refused(members):
    member = members(0)
    address = {1: member.address, 0: member.address}
    good = [torch.zeros(4)]
    launch = member.exchange.launch
    for send, receive, where, message in (
        ([torch.zeros(4, 4).t()], {1: [torch.zeros(4, 4)]}, address, "contiguous"),
        (good, {1: [torch.zeros(5)]}, address, "differ from what is sent"),
        (good, {1: [torch.zeros(4, dtype=torch.int32)]}, address, "differ from what is sent"),
        (good, {0: good}, address, "no partner"),
        (good, {2: good}, address, "no partner"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(1, send, receive, where, 1.0, 1.0)
    launch(1, good, {}, {}, 1.0, 1.0)
    with pytest.raises(ValueError, match="launched already"):
        launch(1, good, {}, {}, 1.0, 1.0)


@pytest.mark.parametrize(
    ("difference", "word"),
    [
        ({"run_id": "other"}, "run_id"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"rank": 3}, "rank"),
        ([torch.zeros(11)], "tensors"),
        ([torch.zeros(10, dtype=torch.float16)], "tensors"),
        ([torch.zeros(10), torch.zeros(1)], "tensors"),
    ],
)
@pytest.mark.parametrize("who", [0, 1])
def test_a_mismatch_is_missed_with_its_reason_on_both_sides(members, difference, word, who):
    odd_send = difference if isinstance(difference, list) else [torch.zeros(10)]
    options = [{}, {}]
    options[who] = difference if isinstance(difference, dict) else {}
    pair = [members(replica, **options[replica]) for replica in (0, 1)]
    launched = [
        pair[r].launch(0, odd_send if r == who else [torch.zeros(10)], {1 - r: pair[1 - r].address}) for r in (1, 0)
    ]
    for pending, buffers in launched:
        (outcome,) = pending.wait().values()
        assert isinstance(outcome, Missed) and word in outcome.reason, outcome
        assert untouched(buffers)


def test_a_wrong_secret_is_missed(members):
    low, high = members(0), members(1, secret=b"another secret entirely")
    outcome = low.launch(0, payload(1), {1: high.address})[0].wait()[1]
    assert isinstance(outcome, Missed) and "different secret" in outcome.reason


def test_a_partner_that_is_behind_learns_the_outer_step(members):
    low, high = members(0), members(1)
    ahead, _ = high.launch(5, payload(2), {0: low.address}, SHORT_SECONDS)
    outcome = low.launch(3, payload(1), {1: high.address})[0].wait()[1]
    assert isinstance(outcome, Missed) and "replica 1 is at outer step 5" in outcome.reason
    assert low.exchange.latest_outer_step == 5
    missed = ahead.wait()[0]
    assert isinstance(missed, Missed) and "did not connect by the deadline" in missed.reason


def test_the_steps_of_another_run_mean_nothing(members):
    stranger, high = members(0, run_id="other"), members(1)
    high.launch(5, payload(2), {})
    for step in (3, 9):
        outcome = stranger.launch(step, payload(1), {1: high.address})[0].wait()[1]
        assert isinstance(outcome, Missed) and "run_id 'other' meets run_id 'run'" in outcome.reason
        assert (stranger.exchange.latest_outer_step, high.exchange.latest_outer_step) == (step, 5)


def test_a_partner_that_is_ahead_is_kept_and_ends_the_wait_of_earlier_steps(members):
    low, high = members(0), members(1)
    early, _ = high.launch(3, payload(2), {0: low.address})
    later, into_low = low.launch(5, payload(1), {1: high.address})
    missed = early.wait()[0]
    assert isinstance(missed, Missed) and "replica 0 is at outer step 5 already" in missed.reason
    assert missed.seconds < LONG_SECONDS / 2 and high.exchange.latest_outer_step == 5
    caught_up, _ = high.launch(5, payload(2), {0: low.address})
    assert isinstance(caught_up.wait()[0], Received) and isinstance(later.wait()[1], Received)
    assert torch.equal(into_low[1][0], payload(2)[0])


def test_who_was_kept_for_a_step_that_is_skipped_is_told(members):
    low, high = members(0), members(1)
    pending, _ = low.launch(5, payload(1), {1: high.address})
    while not high.exchange._seats._parked:
        time.sleep(0.01)
    high.launch(8, payload(1), {})
    outcome = pending.wait()[1]
    assert isinstance(outcome, Missed) and "replica 1 is at outer step 8" in outcome.reason


def test_launching_late_is_no_miss(members):
    low, high = members(0), members(1)
    first, _ = low.launch(0, payload(1), {1: high.address})
    time.sleep(0.4)
    second, _ = high.launch(0, payload(2), {0: low.address})
    assert isinstance(first.wait()[1], Received) and isinstance(second.wait()[0], Received)


def test_a_short_time_without_a_listener_is_no_miss(members):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    low = members(0)
    first, _ = low.launch(0, payload(1), {1: address})
    time.sleep(0.2)
    high = members(1, port=address[1])
    second, _ = high.launch(0, payload(2), {0: low.address})
    assert isinstance(first.wait()[1], Received) and isinstance(second.wait()[0], Received)


def test_a_partner_whose_process_is_gone_does_not_cost_the_deadline(members):
    low, high = members(0), members(1)
    high.close()
    outcome = low.launch(0, payload(1), {1: high.address}, 10 * LONG_SECONDS)[0].wait()[1]
    assert isinstance(outcome, Missed) and f"nobody listens on 127.0.0.1:{high.address[1]}" in outcome.reason
    assert outcome.seconds < LONG_SECONDS


def test_an_absent_partner_is_missed_at_the_deadline_in_both_roles(members):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = probe.getsockname()
    middle, idle = members(1), members(2)
    outcomes = middle.launch(0, payload(1), {0: nobody, 2: idle.address, 3: nobody}, SHORT_SECONDS)[0].wait()
    reasons = {partner: outcome.reason for partner, outcome in outcomes.items() if isinstance(outcome, Missed)}
    assert "replica 0 did not connect by the deadline" in reasons[0]
    assert "deadline passed" in reasons[2] and f"could not reach 127.0.0.1:{nobody[1]}" in reasons[3]
    # Whoever gave up is not taken for a partner later on.
    late = idle.launch(0, payload(1), {1: middle.address}, SHORT_SECONDS)[0].wait()[1]
    assert isinstance(late, Missed) and "did not connect" in late.reason


def test_waiting_dialers_are_bounded(members):
    high = members(1000)

    def call(replica):
        hello = {"kind": "exchange", "run_id": "run", "fingerprint": "print", "rank": 0, "replica": replica}
        return dial(high.address, SECRET, {**hello, "outer_step": 0, "tensors": []}, LONG_SECONDS)

    callers = [call(replica) for replica in range(MAX_PARKED)]
    while high.exchange._seats._parked.keys() < {(0, replica) for replica in range(MAX_PARKED)}:
        time.sleep(0.01)
    for replica in range(MAX_PARKED, MAX_PARKED + 3):
        caller = call(replica)
        caller.expire_in(LONG_SECONDS)
        assert "waiting already" in caller.receive()["reason"]
    assert len(high.exchange._seats._parked) == MAX_PARKED
    # Those that hang up make room for others.
    callers[0].close()
    time.sleep(0.1)
    last = call(999)
    while (0, 999) not in high.exchange._seats._parked:
        time.sleep(0.01)
    assert len(high.exchange._seats._parked) == MAX_PARKED and not last.hung_up()


class Actor:
    """A higher twin that agrees to an exchange of SIZE bytes as it should, and then follows a script of the test's."""

    SIZE = 4_000_000

    def __init__(self, script):
        self.listener = Listener(SECRET)
        self.script = script
        self.listener.register("exchange", self.act)

    def act(self, channel, hello):
        channel.expire_in(LONG_SECONDS)
        channel.send({**hello, "replica": 1})
        with contextlib.suppress(OSError):  # the exchange under test may hang up
            self.script(channel)
        channel.close()


DATA = memoryview(bytes(range(256)) * (Actor.SIZE // 256))


def _garbage(channel):
    channel.send_view(memoryview(os.urandom(3 * Actor.SIZE)))


def _closed_at_once(channel):
    pass


def _too_little(channel):
    channel.send_view(DATA[:1000])


def _too_much(channel):
    channel.send_view(DATA)
    channel.send_view(DATA[200:1200])
    # Closing with their data unread would throw away what we sent.
    channel.receive_into(memoryview(bytearray(Actor.SIZE)))
    channel.receive()


def _flipped(channel):
    damaged = bytearray(DATA)
    damaged[Actor.SIZE // 2] ^= 1
    channel.send_view(memoryview(damaged))
    channel.send({"kind": "checksum", "crc32": zlib.crc32(DATA)})
    channel.receive_into(memoryview(bytearray(Actor.SIZE)))
    channel.receive()


def _silent(channel):
    time.sleep(LONG_SECONDS)


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (_garbage, ""),
        (_closed_at_once, ""),
        (_too_little, "of 4000000 bytes received"),
        (_too_much, "announced a message of"),
        (_flipped, "checksum"),
        (_silent, "deadline passed while waiting for 127.0.0.1"),
    ],
)
def test_a_partner_that_misbehaves_is_missed(members, script, word):
    low, actor = members(0), Actor(script)
    seconds = SHORT_SECONDS if script is _silent else LONG_SECONDS
    outcome = low.launch(0, [torch.zeros(Actor.SIZE // 4)], {1: actor.listener.address}, seconds)[0].wait()[1]
    assert isinstance(outcome, Missed) and word in outcome.reason, outcome
    assert outcome.seconds < (seconds + 10 if script is _silent else LONG_SECONDS / 2)
    actor.listener.close()


def test_data_that_came_whole_counts_although_the_acknowledgement_is_lost(members):
    def no_ack(channel):
        reader = threading.Thread(target=channel.receive_into, args=(memoryview(bytearray(Actor.SIZE)),))
        reader.start()
        channel.send_view(DATA)
        channel.send({"kind": "checksum", "crc32": zlib.crc32(DATA)})
        reader.join()

    low, actor = members(0), Actor(no_ack)
    pending, buffers = low.launch(0, [torch.zeros(Actor.SIZE, dtype=torch.uint8)], {1: actor.listener.address})
    outcome = pending.wait()[1]
    assert isinstance(outcome, Received) and not outcome.acknowledged and outcome.payload_bytes == Actor.SIZE
    assert bytes(buffers[1][0].numpy()) == bytes(DATA)
    actor.listener.close()


def test_one_partner_that_fails_does_not_touch_the_other_one(members):
    low, high, actor = members(0), members(2), Actor(_too_little)
    send = [torch.arange(Actor.SIZE // 4, dtype=torch.float32)]
    first, buffers = low.launch(0, send, {1: actor.listener.address, 2: high.address})
    second, _ = high.launch(0, send, {0: low.address})
    outcomes = first.wait()
    assert isinstance(outcomes[1], Missed) and isinstance(outcomes[2], Received)
    assert isinstance(second.wait()[0], Received) and torch.equal(buffers[2][0], send[0])
    actor.listener.close()


class SlowLink:
    """A proxy before a listener that lets so many bytes per second through, each way."""

    PIECE_SECONDS = 0.02

    def __init__(self, target, bytes_per_second):
        self.target, self.bytes_per_second = target, bytes_per_second
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(self.target)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(max(1, int(self.bytes_per_second * self.PIECE_SECONDS))):
                sink.sendall(data)
                time.sleep(len(data) / self.bytes_per_second)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.server.close()


def test_a_transfer_that_takes_longer_than_the_deadline_is_no_miss(members):
    low, high = members(0), members(1)
    link = SlowLink(high.address, 500_000)
    send = [torch.arange(550_000, dtype=torch.float32)]  # 4.4 seconds each way
    first, _ = low.launch(0, send, {1: link.address}, 2.0, LONG_SECONDS)
    second, into_high = high.launch(0, send, {0: low.address}, 2.0, LONG_SECONDS)
    at_low, at_high = first.wait()[1], second.wait()[0]
    assert isinstance(at_low, Received) and isinstance(at_high, Received), (at_low, at_high)
    assert torch.equal(into_high[0][0], send[0]) and at_low.seconds > 4.0
    third, _ = low.launch(1, send, {1: link.address}, 2.0, 2.0)
    fourth, _ = high.launch(1, send, {0: low.address}, 2.0, 2.0)
    for missed in (third.wait()[1], fourth.wait()[0]):
        assert isinstance(missed, Missed) and missed.seconds < LONG_SECONDS, "the cap holds for whatever link"
    link.close()


def test_a_link_that_has_become_slow_is_given_more_time_from_miss_to_miss(members, monkeypatch):
    monkeypatch.setattr(exchange, "SILENCE_SECONDS", 0.5)
    low, high = members(0), members(1)
    link = SlowLink(high.address, 1e9)
    send, outcomes = [torch.zeros(250_000)], []
    for step in range(20):
        first, _ = low.launch(step, send, {1: link.address})
        second, _ = high.launch(step, send, {0: low.address})
        outcomes.append([first.wait()[1], second.wait()[0]])
        good = [isinstance(outcome, Received) for outcome in outcomes[-1]]
        if step == 0:
            assert all(good), outcomes
            link.bytes_per_second = 300_000  # three seconds and more; 0.5 are allowed after this speed
        elif all(good):
            break
    assert step >= 2 and all(good), outcomes
    link.close()


def test_a_deadline_that_passed_once_is_forgotten_at_the_next_outer_step(members):
    low, high = members(0), members(1)
    alone, _ = low.launch(0, payload(1), {1: high.address}, SHORT_SECONDS)
    late, _ = high.launch(0, payload(2), {})
    assert isinstance(alone.wait()[1], Missed) and late.wait() == {}
    first, _ = low.launch(1, payload(1), {1: high.address})
    second, _ = high.launch(1, payload(2), {0: low.address})
    assert isinstance(first.wait()[1], Received) and isinstance(second.wait()[0], Received)


def test_a_malformed_hello_is_refused_and_forgotten(members):
    high = members(1)
    for hello in (
        {},
        {"outer_step": "3", "replica": 0},
        {"outer_step": 3, "replica": None},
        {"outer_step": -3, "replica": 0},
        {"outer_step": 1 << 70, "replica": 0},
    ):
        identity = {"kind": "exchange", "run_id": "run", "fingerprint": "print", "rank": 0}
        caller = dial(high.address, SECRET, {**identity, **hello}, LONG_SECONDS)
        caller.expire_in(LONG_SECONDS)
        assert "malformed" in caller.receive()["reason"]
    assert not high.exchange._seats._parked and high.exchange.latest_outer_step == -1


def test_a_hello_full_of_large_values_is_refused_in_few_words(members):
    """Quoted whole, they would not fit into the refusal."""
    low, high = members(0), members(1)
    pending, _ = high.launch(0, payload(1), {0: low.address})
    nested = []
    for _ in range(600):
        nested = [nested]
    hello = {"kind": "exchange", "run_id": "run", "fingerprint": "print", "rank": 0, "replica": 0, "outer_step": 0}
    for odd in ({"tensors": ["\ud800" * 170_000]}, {"run_id": "x" * 1_048_000}, {"tensors": nested}):
        caller = dial(high.address, SECRET, {**hello, **odd}, LONG_SECONDS)
        caller.expire_in(LONG_SECONDS)
        reason = caller.receive()["reason"]
        assert len(reason) < 1000 and reason.isprintable()
    outcome = pending.wait()[0]
    assert isinstance(outcome, Missed) and "where replica 1 expects" in outcome.reason


def test_closing_ends_what_is_in_flight(members):
    low, high, actor = members(0), members(2), Actor(_silent)
    nobody = {1: actor.listener.address}
    talking, _ = low.launch(0, [torch.zeros(Actor.SIZE // 4)], nobody)
    waiting, _ = high.launch(0, payload(1), {0: low.address})
    while not low.exchange._channels:
        time.sleep(0.01)
    low.exchange.close()
    high.exchange.close()
    for pending in (talking, waiting):
        (outcome,) = pending.wait().values()
        assert isinstance(outcome, Missed) and outcome.seconds < LONG_SECONDS / 2
        assert "silent" not in outcome.reason, "it ended by itself, not because it was closed"
    with pytest.raises(ValueError, match="closed"):
        low.launch(1, payload(1), {})
    actor.listener.close()


def test_buffers_are_not_copied(members):
    low, high = members(0), members(1)
    send = [torch.ones(8_000_000)]
    tracemalloc.start()
    first, _ = low.launch(0, send, {1: high.address})
    second, _ = high.launch(0, send, {0: low.address})
    assert isinstance(first.wait()[1], Received) and isinstance(second.wait()[0], Received)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000, "two members moved 32 MB each way"


def _stall_and_fall(replica, directory):
    """Replica 1 takes one slice after another at a crawl, says so, and is then killed or suspended by the test."""
    member = Member(replica)
    (directory / f"part_{replica}").write_text(str(member.address[1]))
    (directory / f"part_{replica}").rename(directory / f"port_{replica}")
    while not (path := directory / f"port_{1 - replica}").exists():
        time.sleep(0.01)
    exchange.SILENCE_SECONDS = 2.0
    if replica == 1:
        whole = Channel.receive_into

        def crawl(channel, view):
            whole(channel, view)
            (directory / "transferring").touch()
            time.sleep(0.2)

        Channel.receive_into = crawl
    partners = {1 - replica: ("127.0.0.1", int(path.read_text()))}
    # Far more than the kernel's buffers hold, so that the transfer can't be over when the test strikes.
    pending, _ = member.launch(0, [torch.zeros(25_000_000)], partners, 2 * LONG_SECONDS, 2 * LONG_SECONDS)
    return pending.wait()[1 - replica]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_partner_process_that_is_struck_in_the_middle_of_a_transfer_is_missed(tmp_path, blow):
    ranks = Ranks(_stall_and_fall, [0, 1], tmp_path, ())
    limit = time.monotonic() + 60
    while not (tmp_path / "transferring").exists():
        assert time.monotonic() < limit and ranks.processes[1].is_alive()
        time.sleep(0.01)
    os.kill(ranks.processes[1].pid, blow)
    outcome = ranks.wait(60, expect_missing=frozenset({1}))[0]
    assert isinstance(outcome, Missed) and "of 100000000 bytes received" in outcome.reason
    assert outcome.seconds < LONG_SECONDS, "a death or silence is seen soon, not at the deadline"
    if blow == signal.SIGSTOP:
        assert "deadline passed while waiting for 127.0.0.1" in outcome.reason and outcome.seconds >= 2.0


@pytest.mark.parametrize("before", [False, True])
def test_a_partner_that_is_known_to_be_further_is_missed_at_once(members, before):
    """Whether it is known before the launch or while that waits; who is not further is waited for."""
    dialer, listener = members(0), members(1)
    listener.exchange.reached(0, 2)
    if before:
        listener.exchange.reached(0, 3)
    pending, _ = listener.launch(2, [torch.zeros(3)], {0: dialer.address})
    if not before:
        listener.exchange.reached(0, 3)
    missed = pending.wait()[0]
    assert isinstance(missed, Missed) and missed.seconds < LONG_SECONDS / 2
    assert missed.reason == "replica 0 is at outer step 3 already"
    pending, _ = listener.launch(3, [torch.zeros(3)], {0: dialer.address})
    other, _ = dialer.launch(3, [torch.zeros(3)], {1: listener.address})
    assert all(isinstance(outcome, Received) for outcome in (pending.wait()[0], other.wait()[1]))
