"""News among leaders, and the stop step: agreed by whoever is furthest, and waited for by nobody who is hung."""

import threading
import time

import pytest

from noloco_mega.comm.channel import Listener
from noloco_mega.comm.control import NEVER, Leaders, StopAgreement

SECRET = b"a secret for this test only"


@pytest.fixture
def leaders():
    listeners = [Listener(SECRET) for _ in range(4)]
    lines = [Leaders(i, listener, SECRET, "run") for i, listener in enumerate(listeners)]
    agreements = [StopAgreement(line) for line in lines]
    for line in lines:
        line.connect({i: listener.address for i, listener in enumerate(listeners)})
    yield agreements
    for listener in listeners:
        listener.close()


def run_until_stopped(agreement, at, stopped, asked=None, timeout_seconds=20.0):
    """A training loop that only counts: inner step `asked` gets the request to stop."""
    step, stop = at, NEVER
    while step < 100_000:
        if step == asked:
            agreement.propose(step)
        stop = agreement.decide(step)
        step += 1
        if step >= stop and agreement.confirm(step, timeout_seconds):
            break
        threading.Event().wait(0.001)
    stopped.append(step)


@pytest.mark.parametrize("steps_ahead", [(0, 0, 0, 0), (0, 1, 2, 0), (0, 50, 3, 7)])
def test_all_replicas_stop_after_the_same_step(leaders, steps_ahead):
    stopped = []
    threads = [
        threading.Thread(
            target=run_until_stopped, args=(agreement, ahead, stopped, 20 if replica == 0 else None), daemon=True
        )
        for replica, (agreement, ahead) in enumerate(zip(leaders, steps_ahead, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stopped) == 4 and len(set(stopped)) == 1, stopped
    assert stopped[0] >= 20 + StopAgreement.MARGIN


def test_two_requests_at_once_still_agree(leaders):
    stopped = []
    threads = [
        threading.Thread(target=run_until_stopped, args=(agreement, 0, stopped, 10 + 5 * replica), daemon=True)
        for replica, agreement in enumerate(leaders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stopped) == 4 and len(set(stopped)) == 1, stopped


def test_a_leader_that_hangs_holds_nobody(leaders):
    stopped = []
    threads = [
        threading.Thread(target=run_until_stopped, args=(leader, 0, stopped, 5 if replica == 0 else None, 1.0))
        for replica, leader in enumerate(leaders[:3])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stopped) == 3 and len(set(stopped)) == 1, stopped


def test_a_stop_that_comes_too_late_is_raised(leaders):
    assert leaders[0].decide(9) == NEVER  # whether to stop at 10 is settled: no
    with leaders[0]._changed:
        leaders[0]._raise_to(10)
    assert leaders[0].decide(10) == 10 + StopAgreement.MARGIN
    with leaders[0]._changed:
        leaders[0]._raise_to(11)
    assert leaders[0].decide(11) == 10 + StopAgreement.MARGIN, "an agreed step never moves back"


def test_news_reach_every_leader_of_the_run_and_no_other():
    listeners = [Listener(SECRET) for _ in range(4)]
    lines = [Leaders(i, listener, SECRET, "other run" if i == 3 else "run") for i, listener in enumerate(listeners)]
    heard = []
    for line in lines:
        line.subscribe("news", lambda sender, message, me=line.replica: heard.append((me, sender, message["text"])))
        line.connect({i: listener.address for i, listener in enumerate(listeners)})
    listeners[2].close()  # one that can't be reached delays nobody
    for line in lines:
        line.broadcast("news", {"text": f"from {line.replica}"})
    for line in lines:
        line.flush()
    deadline = time.monotonic() + 20
    while len(heard) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert sorted(heard) == [(0, 1, "from 1"), (0, 2, "from 2"), (1, 0, "from 0"), (1, 2, "from 2")]
    for line in (0, 1, 3):
        listeners[line].close()


def test_a_leader_that_is_gone_is_not_waited_for():
    gone, listener = Listener(SECRET), Listener(SECRET)
    gone.close()
    line = Leaders(0, listener, SECRET, "run")
    agreement = StopAgreement(line)
    line.connect({1: gone.address})
    began = time.monotonic()
    agreement.propose(3)
    assert agreement.confirm(5, timeout_seconds=60.0) and time.monotonic() - began < 30
    assert line.gone == line.refused.keys() == {1}
    line.learn(1, listener.address)  # it has come back elsewhere
    assert not line.gone
    listener.close()
