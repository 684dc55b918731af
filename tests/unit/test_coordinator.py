"""Who takes part and on which circuit: several leaders' control threads in one process, on real connections."""

import time

import pytest

from noloco_mega.comm.channel import Listener
from noloco_mega.comm.control import Leaders
from noloco_mega.comm.coordinator import UNKNOWN, Coordinator, Plan
from noloco_mega.comm.roster import Roster, Standing

SECRET = b"a secret for this test only"
BEAT_SECONDS = 0.3
REPLICAS = 4


class Siblings:
    """Of a replica of one rank."""

    def silent(self, seconds):
        return []

    def tell(self, message):
        pass

    def forgive(self):
        pass


class Circuits:
    def break_off(self, number):
        pass


class Orders:
    """What the leader has told its ranks, in order."""

    def __init__(self):
        self.given = []

    def give(self, order):
        self.given.append(order)

    def last(self, kind):
        return next((order for order in reversed(self.given) if kind in order), {})


class Leader:
    """One replica's leader. `ready` replicas train; circuits form at once."""

    def __init__(self, replica, incarnation=1):
        self.replica, self.listener, self.orders = replica, Listener(SECRET), Orders()
        self.leaders = Leaders(replica, self.listener, SECRET, "run")
        own = Standing(incarnation=incarnation, beat=0, ranks=(self.listener.address,), ready=True)
        self.roster = Roster(replica, own, BEAT_SECONDS)
        self.proposed = []
        plan = Plan(
            replica=replica, replicas=REPLICAS, site=tuple(range(REPLICAS)), routes=True, columns=1, ranks=1,
            inner_steps=5, steps=1000, heartbeat_seconds=BEAT_SECONDS, form_seconds=5.0, host="127.0.0.1",
        )  # fmt: skip
        self.coordinator = Coordinator(
            plan, self.leaders, self.roster, Siblings(), Circuits(), self.orders, self.form, lambda *_: None,
            lambda _: None,
        )  # fmt: skip

    def form(self, order):
        self.proposed.append(order["members"])
        self.coordinator.formed(order["form"], 0, None)

    def start(self, known=()):
        self.leaders.connect({other.replica: other.listener.address for other in known})
        for other in known:
            self.roster.hear(other.replica, other.roster.own)
        present = (self.replica, *(other.replica for other in known))
        self.coordinator.start(sorted(present), UNKNOWN if not known else 0, 0, ())

    def close(self):
        self.coordinator.close()
        self.listener.close()


@pytest.fixture
def leader():
    made = []

    def make(replica, **settings):
        made.append(Leader(replica, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(ready, limit_seconds=30.0):
    deadline = time.monotonic() + limit_seconds
    while not ready():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def cut(leader, lost):
    """Let no message of a leader's get to the replicas in the set `lost`, now or later, as on a network that is cut."""
    tell = leader.leaders.tell
    leader.leaders.tell = lambda replica, *message: None if replica in lost else tell(replica, *message)
    return lost


def present(leader):
    return leader.orders.last("present").get("present")


def test_two_that_came_at_once_find_each_other_through_a_third(leader):
    """Neither was in the rendezvous when the other one looked."""
    zero, one, two = (leader(replica) for replica in range(3))
    zero.start()
    one.start([zero])
    two.start([zero])
    until(lambda: all(each.roster.able() == (0, 1, 2) for each in (zero, one, two)))
    until(lambda: all(present(each) == [0, 1, 2] for each in (zero, one, two)))


def test_who_lost_sight_of_the_others_does_not_speak_for_them_when_it_comes_back(leader):
    """Replica 2 hears replica 3 before it hears 0 and 1 again: 3 must not be taken out of the pairs and the circuit
    that it shares with them."""
    everybody = [leader(replica) for replica in range(REPLICAS)]
    for each in everybody:
        each.start([other for other in everybody if other is not each])
    until(lambda: all(each.orders.last("circuit") for each in everybody))
    two, three = everybody[2], everybody[3]
    lost = [cut(each, {2}) for each in (everybody[0], everybody[1], three)] + [cut(two, {0, 1, 3})]
    until(lambda: present(everybody[0]) == [0, 1, 3] and present(three) == [0, 1, 3] and present(two) == [2])
    lost[2].clear()
    lost[3].remove(3)
    until(lambda: two.roster.able() == (2, 3) and three.roster.able() == (0, 1, 2, 3))
    time.sleep(5 * BEAT_SECONDS)
    assert [2, 3] not in [order["present"] for order in three.orders.given if "present" in order]
    assert [2, 3] not in three.proposed
    for each in lost:
        each.clear()
    until(lambda: all(present(each) == [0, 1, 2, 3] for each in everybody))


def test_a_pair_without_a_way_to_each_other_does_not_keep_the_rest_from_their_circuit(leader):
    zero, one, two = (leader(replica) for replica in range(3))
    cut(one, {2})
    cut(two, {1})
    zero.start([one, two])
    one.start([zero])
    two.start([zero])
    one.roster.hear(2, Standing(incarnation=1, beat=0, ranks=(two.listener.address,), ready=True))
    until(lambda: one.roster.dead())
    began = len(zero.proposed)
    time.sleep(20 * BEAT_SECONDS)
    assert zero.orders.last("circuit")
    assert len(zero.proposed) - began <= 8, "what fails is not tried over and over"
