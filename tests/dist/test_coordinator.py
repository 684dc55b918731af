"""Leaders that talk over real sockets, with circuits that only say what they were told: who is present, and on what."""

import threading
import time
from datetime import timedelta

import pytest

from noloco_mega.comm.channel import Listener
from noloco_mega.comm.circuits import LOCAL, Circuits
from noloco_mega.comm.control import Leaders
from noloco_mega.comm.coordinator import Coordinator
from noloco_mega.comm.roster import Roster, Standing
from noloco_mega.comm.terms import Terms

SECRET = b"a secret for this test only"
BEAT_SECONDS = 0.3
INNER_STEPS = 10


class Replica:
    """One leader of a replica of one rank; its training loop is the test."""

    def __init__(self, replica, replicas, listeners, incarnation=1, ready=True, members=None):
        members = range(replicas) if members is None else members
        self.replica, self.listener = replica, listeners[replica]
        self.events, self.orders, self.broken = [], [], []
        self.refuses, self.formings, self.given_up, self.ahead = False, 0, set(), []
        self.leaders = Leaders(replica, self.listener, SECRET, "run")
        self.leaders.connect({r: listeners[r].address for r in members})
        own = self._standing(listeners, replica, incarnation, ready)
        self.roster = Roster(replica, own, BEAT_SECONDS, self.leaders.refused)
        for other in members:
            if other != replica:
                self.roster.hear(other, self._standing(listeners, other, 0, True))
        terms = Terms(
            replica=replica, replicas=replicas, site=tuple(range(replicas)), routes=True, heals=True, columns=1, ranks=1,
            inner_steps=INNER_STEPS, steps=10_000, heartbeat_seconds=BEAT_SECONDS, form_seconds=5.0, host="127.0.0.1",
        )  # fmt: skip
        self.coordinator = Coordinator(
            terms, self.leaders, self.roster, self, self, self, self, self.form, self.events.append,
        )  # fmt: skip
        present = ((replica,), -1) if not ready else (tuple(members), 0)
        self.coordinator.start(*present, replicas if ready else 0, tuple(members))

    @staticmethod
    def _standing(listeners, replica, incarnation, ready):
        return Standing(
            incarnation=incarnation, beat=0, ranks=(listeners[replica].address,), ready=ready, circuit=len(listeners)
        )  # fmt: skip

    # As the siblings of a replica of one rank, its orders, its circuits, and its exchange:
    def tell(self, message):
        pass

    def silent(self, seconds):
        return []

    def forgive(self):
        pass

    def give(self, order):
        self.orders.append(order)

    def give_up(self, replica, reason):
        self.given_up.add(replica)

    def expect(self, replica):
        self.given_up.discard(replica)

    def reached(self, replica, outer_step):
        self.ahead.append((replica, outer_step))

    def form(self, order):
        self.formings += 1
        if not self.refuses:
            self.coordinator.formed(order["form"], 0, None)

    def break_off(self, number):
        self.broken.append(number)

    def enter(self, number, step):
        self.coordinator.report(circuit=number, step=step)

    def present(self):
        return next((tuple(order["present"]) for order in reversed(self.orders) if "present" in order), None)

    def circuits(self):
        return [(order["circuit"], order["from_step"]) for order in self.orders if "circuit" in order]

    def die(self):
        self.coordinator._closed.set()
        self.listener.close()


@pytest.fixture
def fleet():
    made = []

    def start(replicas):
        listeners = [Listener(SECRET) for _ in range(replicas)]
        made.extend(Replica(r, replicas, listeners) for r in range(replicas))
        return list(made)

    yield start
    for replica in made:
        replica.die()


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_an_undisturbed_run_announces_and_proposes_nothing(fleet):
    replicas = fleet(3)
    time.sleep(10 * BEAT_SECONDS)
    assert all(not replica.orders and not replica.broken for replica in replicas)
    assert all(replica.roster.able() == (0, 1, 2) for replica in replicas)


def test_a_death_ends_the_circuit_and_brings_a_new_one_without_the_dead(fleet):
    """Also where the lowest, which decided so far, is the dead one."""
    replicas = fleet(4)
    for replica in replicas:
        replica.coordinator.report(launched=6 + replica.replica % 2)
    replicas[0].die()
    living = replicas[1:]
    until(lambda: all(replica.present() == (1, 2, 3) for replica in living))
    assert all(replica.roster.dead() == {0: "its process has ended"} for replica in living)
    assert all(replica.broken[0] == 4 for replica in living), "the first circuit's number is 4 + 0"
    for replica in living:
        replica.enter(0, 75)  # as the loop does when its link breaks
    until(lambda: all(replica.circuits() for replica in living))
    found = {tuple(replica.circuits()) for replica in living}
    assert len(found) == 1
    ((number, from_step),) = found.pop()
    assert number % 4 == 1, "replica 1 proposed it"
    # The furthest has begun outer step 7, so that it is in phase 8: two later is 10.
    assert from_step == 10 * INNER_STEPS


def test_who_cannot_form_a_circuit_is_left_out_and_stays_present(fleet):
    replicas = fleet(3)
    replicas[2].refuses = True
    for replica in replicas:
        replica.coordinator.broken(3)  # a link failed, everybody lives
        replica.enter(0, 5)
    until(lambda: replicas[0].circuits() and replicas[1].circuits(), 60)
    assert not replicas[2].circuits()
    assert all(replica.present() is None for replica in replicas), "nobody was ever absent"


def test_a_commit_that_is_lost_ends_the_circuit_for_all(fleet):
    replicas = fleet(2)
    replicas[1].coordinator._circuits._commit = lambda *_: None
    for replica in replicas:
        replica.coordinator.broken(2)
        replica.enter(0, 5)
    until(lambda: replicas[0].circuits())
    number, from_step = replicas[0].circuits()[0]
    replicas[0].enter(number, from_step)
    until(lambda: all(number in replica.broken for replica in replicas))


def test_one_that_did_not_run_for_a_while_is_told_who_is_present(fleet):
    """It stays by itself until the lowest has told it; and it takes nobody for dead because of its own pause."""
    replicas = fleet(3)
    back = replicas[2].coordinator
    back._post(back._heartbeats.back, 100.0)
    until(lambda: replicas[2].present() == (0, 1, 2))
    assert [order["present"] for order in replicas[2].orders] == [[2], [0, 1, 2]]
    assert all(replica.roster.able() == (0, 1, 2) for replica in replicas)


def test_an_announcement_that_leaves_this_replica_out_is_not_followed(fleet):
    replicas = fleet(3)
    message = {"kind": "present", "number": 9, "from": 3, "members": [1], "ranks": {}}
    replicas[1].leaders.broadcast("present", message)
    time.sleep(5 * BEAT_SECONDS)
    assert replicas[0].present() is None and replicas[2].present() is None


def test_a_newcomer_is_heard_told_and_taken_in(fleet):
    replicas = fleet(3)
    replicas[1].die()
    living = [replicas[0], replicas[2]]
    until(lambda: all(replica.present() == (0, 2) for replica in living))
    listeners = [replica.listener for replica in replicas]
    listeners[1] = Listener(SECRET)
    again = Replica(1, 3, listeners, incarnation=2, ready=False, members=(0, 2))
    try:
        until(lambda: all(r.roster.standing(1).incarnation == 2 for r in living))
        time.sleep(3 * BEAT_SECONDS)
        assert all(replica.present() == (0, 2) for replica in living), "it has no state yet"
        again.coordinator.report(ready=True)
        everybody = [*living, again]
        until(lambda: all(replica.present() == (0, 1, 2) for replica in everybody))
        where = next(o for o in reversed(living[0].orders) if "present" in o)["ranks"]["1"]
        assert where == [list(listeners[1].address)], "at its new address"
    finally:
        again.die()


def test_garbage_from_another_leader_changes_nothing(fleet):
    replicas = fleet(2)
    for kind in ("alive", "present", "circuit"):
        for message in ({}, {"standing": 5}, {"standing": {"ranks": [1]}}, {"number": "x"}, {"propose": None},
                        {"propose": 7, "members": "ab", "stores": 3}, {"commit": [], "from_step": {}}):  # fmt: skip
            replicas[1].leaders.broadcast(kind, message)
    replicas[1].leaders.flush()
    time.sleep(3 * BEAT_SECONDS)
    assert not replicas[0].orders and replicas[0].roster.able() == (0, 1)
    assert replicas[0].coordinator._thread.is_alive()
    assert threading.active_count() < 60


def count_steps(replica, number, at, late_from, stopped):
    """A training loop on a circuit, whose leader is late for outer step 0 from step `late_from` on."""
    step = at
    while step < 60 and replica not in stopped:
        replica.coordinator.report(step=step)
        if step >= late_from:
            replica.coordinator.hurry(number, step, 0)
        if replica.coordinator.due(number, step) == 0:
            stopped[replica] = step
        step += 1
        time.sleep(0.2)


@pytest.mark.parametrize("deaf", [False, True])
def test_the_members_of_a_circuit_end_a_phase_at_the_same_step(fleet, deaf):
    """And one that never hears the decision ends the circuit, so that nobody is left waiting on it."""
    replicas = fleet(3)
    stopped = {}
    if deaf:
        replicas[2].coordinator._circuits._hurry.told = lambda *_: None
    threads = [
        threading.Thread(target=count_steps, args=(replica, 3, ahead, 10 if ahead else 1000, stopped), daemon=True)
        for replica, ahead in zip(replicas, (0, 1, 0), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if deaf:
        assert replicas[2] not in stopped
        until(lambda: all(3 in replica.broken for replica in replicas))
    else:
        assert len(stopped) == 3 and len(set(stopped.values())) == 1, list(stopped.values())
        assert not any(replica.broken for replica in replicas)


def cut(replica, lost):
    """Let no message of a leader's get to the replicas in the set `lost`, now or later, as on a network that is cut."""
    tell = replica.leaders.tell
    replica.leaders.tell = lambda other, *message: None if other in lost else tell(other, *message)
    return lost


def test_two_that_come_at_once_find_each_other_through_a_third():
    """Neither was known to the rendezvous when the other one looked."""
    listeners = [Listener(SECRET) for _ in range(3)]
    replicas = [Replica(r, 3, listeners, members=members) for r, members in enumerate([(0,), (0, 1), (0, 2)])]
    try:
        until(lambda: all(replica.roster.able() == (0, 1, 2) for replica in replicas))
        until(lambda: all(replica.present() == (0, 1, 2) for replica in replicas))
    finally:
        for replica in replicas:
            replica.die()


def test_who_lost_sight_of_the_others_does_not_speak_for_them_when_it_comes_back(fleet):
    """Replica 2 hears replica 3 before it hears 0 and 1 again: 3 must not be taken out of the pairs and the circuit
    that it shares with them."""
    replicas = fleet(4)
    two, three = replicas[2:]
    lost = [cut(replicas[0], {2}), cut(replicas[1], {2}), cut(three, {2}), cut(two, {0, 1, 3})]
    until(lambda: replicas[0].present() == three.present() == (0, 1, 3) and two.present() == (2,))
    until(lambda: three.circuits())
    lost[2].clear()
    lost[3].remove(3)
    until(lambda: two.roster.able() == (2, 3) and three.roster.able() == (0, 1, 2, 3))
    time.sleep(5 * BEAT_SECONDS)
    assert three.present() != (2, 3)
    assert not any(number % 4 == 2 for number, _ in three.circuits()), "replica 2 proposed it"
    for each in lost:
        each.clear()
    until(lambda: all(replica.present() == (0, 1, 2, 3) for replica in replicas))


def test_a_pair_without_a_way_to_each_other_does_not_keep_the_rest_from_their_circuit(fleet):
    replicas = fleet(3)
    cut(replicas[1], {2})
    cut(replicas[2], {1})
    until(lambda: 2 in replicas[1].roster.dead() and 1 in replicas[2].roster.dead())
    for replica in replicas:
        replica.enter(0, 5)
    until(lambda: replicas[0].circuits())
    began = replicas[0].formings
    time.sleep(20 * BEAT_SECONDS)
    assert replicas[0].formings - began <= 20, "what fails is not tried over and over"


def test_who_was_silent_for_a_while_is_waited_for_again_though_nobody_announces_it(fleet):
    replicas = fleet(3)
    lost = cut(replicas[0], {2})
    until(lambda: replicas[2].given_up == {0})
    lost.clear()
    until(lambda: not replicas[2].given_up)
    assert replicas[0].present() is None, "to the lowest nobody was ever absent"


def test_a_circuit_that_ends_before_it_begins_is_not_entered(fleet):
    replicas = fleet(3)
    for replica in replicas:
        replica.coordinator.broken(3)
        replica.enter(0, 5)
    until(lambda: all(replica.circuits() for replica in replicas))
    number, from_step = replicas[1].circuits()[0]
    replicas[0].coordinator.broken(number)
    until(lambda: all({"cancel": number} in replica.orders for replica in replicas))
    circuits = Circuits(None, None, None, "", 0, timedelta(seconds=1))
    circuits.schedule(number, from_step)
    circuits.cancel(number)
    circuits.enter(from_step)
    assert circuits.due is None and circuits.number == LOCAL


@pytest.mark.parametrize("left", [False, True])
def test_a_circuit_that_breaks_takes_along_the_one_that_was_to_follow(fleet, left):
    """Whose death broke it is known only later. It does not matter whether training is on its own pipeline by then."""
    replicas = fleet(3)
    replicas[2].enter(0, 5)  # as after a step that it had to redo
    until(lambda: all(replica.circuits() for replica in replicas))
    number, _ = replicas[0].circuits()[0]
    for replica in replicas[:2] if left else ():
        replica.enter(LOCAL, 6)
    replicas[1].coordinator.broken(3)
    until(lambda: all({"cancel": number} in replica.orders for replica in replicas))


def test_who_is_ahead_is_not_waited_for_and_one_that_starts_again_is(fleet):
    replicas = fleet(2)
    one, other = replicas
    one.coordinator.report(launched=4)
    until(lambda: other.ahead == [(0, 4)])
    other.coordinator.report(launched=5)
    until(lambda: one.ahead == [(1, 5)])
    one.coordinator.report(launched=6)
    until(lambda: other.ahead == [(0, 4), (0, 6)])
    one.coordinator.report(launched=2)  # as a new process would
    until(lambda: other.ahead == [(0, 4), (0, 6), (0, 2)])
    one.coordinator.report(launched=3)
    until(lambda: other.roster.standing(0).launched == 3)
    assert len(other.ahead) == 3, "as far as this one, or behind"
