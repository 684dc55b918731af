"""The directory of addresses: many clients, late, absent, wrong and restarted servers, and who is missing."""

import socket
import threading
import time

import pytest

from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousServer, RendezvousTimeout
from tests.harness import run_ranks

SECRET = b"0123456789abcdef0123456789abcdef"
LIMIT_SECONDS = 30


@pytest.fixture
def server():
    server = RendezvousServer(SECRET)
    yield server
    server.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def client(address, timeout_seconds=LIMIT_SECONDS, secret=SECRET, run_id=""):
    return RendezvousClient(address, secret, timeout_seconds, run_id=run_id)


def _meet(rank, directory, address):
    """One process announces itself and finds all four, of which the last one comes late."""
    here = client(address)
    time.sleep(0.5 if rank == 3 else 0)
    here.announce("store", rank, 0, {"address": ["127.0.0.1", 1000 + rank]})
    return here.wait_for("store", [(other, 0) for other in range(4)])


def test_processes_find_each_other(tmp_path, server):
    expected = {(other, 0): {"address": ["127.0.0.1", 1000 + other]} for other in range(4)}
    assert run_ranks(_meet, 4, tmp_path, server.address, limit_seconds=LIMIT_SECONDS) == [expected] * 4


def test_two_hundred_ranks_meet(server):
    places = [(replica, rank) for replica in range(50) for rank in range(4)]
    found, barrier = {}, threading.Barrier(len(places))

    def meet(place):
        here = client(server.address)
        barrier.wait()
        here.announce("exchange", *place, {"address": ["host", place[0] * 4 + place[1]], "fingerprint": "f" * 64})
        found[place] = here.wait_for("exchange", places)

    threads = [threading.Thread(target=meet, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    expected = {p: {"address": ["host", p[0] * 4 + p[1]], "fingerprint": "f" * 64} for p in places}
    assert len(found) == len(places) and all(records == expected for records in found.values())


def test_topics_are_apart_and_known_shows_what_is_there(server):
    here = client(server.address)
    here.announce("store", 0, 0, {"port": 1})
    here.announce("links", 0, 0, {"port": 2})
    here.announce("links", 1, 3, {"port": 3})
    assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 1}}
    assert here.wait_for("links", [(1, 3)]) == {(1, 3): {"port": 3}}
    assert here.known("links") == {(0, 0): {"port": 2}, (1, 3): {"port": 3}}
    assert here.known("nothing") == {} and here.wait_for("store", []) == {}


def test_who_is_missing_is_named_with_the_server_and_the_time(server):
    here = client(server.address)
    here.announce("store", 1, 0, {})
    with pytest.raises(RendezvousTimeout) as caught:
        here.wait_for("store", [(1, 0), (0, 0), (2, 5)], timeout_seconds=0.3)
    assert caught.value.missing == ((0, 0), (2, 5))
    for part in ("2 of 3", "replica 0 rank 0, replica 2 rank 5", f"127.0.0.1:{server.address[1]}", "0.3 s", "'store'"):
        assert part in str(caught.value)
    assert "replica 1" not in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


def test_a_server_may_start_after_its_clients():
    port = free_port()
    servers = []
    threading.Timer(0.4, lambda: servers.append(RendezvousServer(SECRET, port=port))).start()
    here = client(("127.0.0.1", port))
    here.announce("store", 0, 0, {"port": 7})
    assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 7}}
    servers[0].close()


def test_no_server_at_all_names_address_and_time():
    port = free_port()
    with pytest.raises(RendezvousTimeout, match=rf"no rendezvous answered at 127\.0\.0\.1:{port} in 0\.3 s"):
        client(("127.0.0.1", port), timeout_seconds=0.3).announce("store", 0, 0, {})


def test_a_server_that_restarts_while_clients_wait_loses_nothing():
    port = free_port()
    first = RendezvousServer(SECRET, port=port)
    early, late = client(("127.0.0.1", port)), client(("127.0.0.1", port))
    early.announce("store", 0, 0, {"port": 1})
    found = []
    waiting = threading.Thread(target=lambda: found.append(early.wait_for("store", [(0, 0), (1, 0)])), daemon=True)
    waiting.start()
    time.sleep(0.2)
    first.close()
    second = RendezvousServer(SECRET, port=port)
    late.announce("store", 1, 0, {"port": 2})
    waiting.join(LIMIT_SECONDS)
    assert found == [{(0, 0): {"port": 1}, (1, 0): {"port": 2}}] == [late.wait_for("store", [(0, 0), (1, 0)])]
    second.close()


def test_closing_the_server_ends_serve_forever_and_hurts_no_record_that_was_fetched():
    server = RendezvousServer(SECRET)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    here = client(server.address, timeout_seconds=0.5)
    here.announce("store", 0, 0, {"port": 1})
    records = here.wait_for("store", [(0, 0)])
    server.close()
    serving.join(LIMIT_SECONDS)
    assert not serving.is_alive() and records == {(0, 0): {"port": 1}}
    with pytest.raises(RendezvousTimeout):
        here.wait_for("store", [(0, 0)])


def test_a_higher_generation_replaces_and_a_lower_one_is_refused(server):
    old, new = client(server.address), client(server.address)
    old.announce("store", 0, 0, {"port": 1, "generation": 4})
    old.announce("store", 0, 0, {"port": 1, "generation": 4})  # saying it twice changes nothing
    new.announce("store", 0, 0, {"port": 2, "generation": 5})
    assert new.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 2, "generation": 5}}
    with pytest.raises(ValueError, match="generation 6 or higher"):
        old.announce("store", 0, 0, {"port": 9, "generation": 3})
    assert new.known("store") == {(0, 0): {"port": 2, "generation": 5}}


def test_one_place_can_not_be_taken_twice(server):
    client(server.address).announce("store", 0, 0, {"port": 1})
    with pytest.raises(ValueError, match=r"replica 0 rank 0 has announced 'store'.*runs twice"):
        client(server.address).announce("store", 0, 0, {"port": 2})


def test_a_wrong_secret_or_run_says_so_at_once(server):
    with pytest.raises(ValueError, match="different secret"):
        client(server.address, secret=b"another secret entirely").announce("store", 0, 0, {})
    with pytest.raises(ValueError, match="serves run '', not 'other'"):
        client(server.address, run_id="other").wait_for("store", [(0, 0)])


@pytest.mark.parametrize(
    ("topic", "replica", "record", "message"),
    [
        ("store", -1, {}, "belongs to"),
        ("store", 0, {"generation": "new"}, "integer"),
        ("store", 0, [1], "JSON object"),
        ("store", 0, {"text": "x" * 10_000}, "the limit is 8192"),
        ("store", 0, {"bytes": b"x"}, "must be JSON"),
    ],
)
def test_a_bad_record_is_the_callers_fault(server, topic, replica, record, message):
    with pytest.raises(ValueError, match=message):
        client(server.address).announce(topic, replica, 0, record)


def test_a_malformed_request_leaves_the_server_serving(server):
    from noloco_mega.comm.channel import dial

    for request in ({}, {"announce": [1], "wait": [], "seconds": 1, "topic": "x"}, {"announce": 3}):
        channel = dial(server.address, SECRET, {"kind": "rendezvous", "run_id": ""}, LIMIT_SECONDS)
        channel.expire_in(LIMIT_SECONDS)
        channel.send(request)
        assert channel.receive()["kind"] == "refused"
    dial(server.address, SECRET, {"kind": "rendezvous", "run_id": ""}, LIMIT_SECONDS).close()
    client(server.address).announce("store", 0, 0, {})
