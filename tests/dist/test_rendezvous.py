"""The directory of addresses: many clients, late, absent, wrong and restarted servers, who is missing, and who failed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from noloco_mega import config as configs
from noloco_mega import versions
from noloco_mega.comm import directory, rendezvous
from noloco_mega.comm import muster as mustering
from noloco_mega.comm.muster import Muster
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousServer, RendezvousTimeout, StartFailed
from noloco_mega.entry import TRY_AGAIN, USER_MUST_ACT, guarded
from noloco_mega.gathering import Gathering, run_id
from noloco_mega.grid import Place
from tests.harness import Ranks, run_ranks

SECRET = b"0123456789abcdef0123456789abcdef"
LIMIT_SECONDS = 30
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "demo_noloco_random_4x2.json"


@pytest.fixture
def server():
    server = RendezvousServer(SECRET)
    yield server
    server.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def client(address, timeout_seconds=LIMIT_SECONDS, secret=SECRET, **options):
    return RendezvousClient(address, secret, timeout_seconds, **options)


def soon(true):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def _meet(rank, directory, address):
    """One process announces itself and finds all four, of which the last one comes late."""
    here = client(address)
    time.sleep(0.5 if rank == 3 else 0)
    here.announce("store", rank, 0, {"address": ["127.0.0.1", 1000 + rank]})
    found = here.wait_for("store", [(other, 0) for other in range(4)])
    (directory / f"found_{rank}").touch()
    soon(lambda: len(list(directory.glob("found_*"))) == 4)  # a process that leaves takes its record along
    return found


def test_processes_find_each_other(tmp_path, server):
    expected = {(other, 0): {"address": ["127.0.0.1", 1000 + other]} for other in range(4)}
    assert run_ranks(_meet, 4, tmp_path, server.address, limit_seconds=LIMIT_SECONDS) == [expected] * 4


def test_two_hundred_ranks_meet(server):
    places = [(replica, rank) for replica in range(50) for rank in range(4)]
    found, barrier = {}, threading.Barrier(len(places))
    clients = {place: client(server.address) for place in places}

    def meet(place):
        here = clients[place]
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


def test_topics_and_runs_are_apart(server):
    here = client(server.address)
    here.announce("store", 0, 0, {"port": 1})
    here.announce("links", 0, 0, {"port": 2})
    here.announce("links", 1, 3, {"port": 3})
    assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 1}}
    assert here.wait_for("links", [(1, 3)]) == {(1, 3): {"port": 3}}
    assert here.wait_for("store", []) == {}
    there = client(server.address, run="other")
    with pytest.raises(RendezvousTimeout):
        there.wait_for("store", [(0, 0)], timeout_seconds=0.2)
    there.announce("store", 0, 0, {"port": 9})
    assert there.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 9}}
    assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 1}}


def test_who_is_missing_is_named_with_the_server_and_the_time(server):
    here = client(server.address)
    here.announce("store", 1, 0, {})
    with pytest.raises(RendezvousTimeout) as caught:
        here.wait_for("store", [(1, 0), (0, 0), (2, 5)], timeout_seconds=0.3)
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


def test_one_place_can_not_be_taken_twice_while_its_holder_lives(server):
    first, second = client(server.address), client(server.address, timeout_seconds=0.5)
    first.announce("store", 0, 0, {"port": 1})
    first.announce("store", 0, 0, {"port": 1})  # saying it twice changes nothing
    with pytest.raises(ValueError, match=r"replica 0 rank 0 has announced 'store' already.*runs twice"):
        second.announce("store", 0, 0, {"port": 1})
    second.announce("store", 1, 0, {"port": 2})
    assert second.wait_for("store", [(0, 0), (1, 0)]) == {(0, 0): {"port": 1}, (1, 0): {"port": 2}}


def test_closing_a_client_forgets_its_records_and_no_others(server):
    first, other, second = client(server.address), client(server.address), client(server.address)
    first.announce("store", 0, 0, {"port": 1})
    first.announce("rank", 0, 0, {"port": 11})
    other.announce("store", 1, 0, {"port": 2})
    first.close()
    second.announce("store", 0, 0, {"port": 3})
    assert second.wait_for("store", [(0, 0), (1, 0)]) == {(0, 0): {"port": 3}, (1, 0): {"port": 2}}
    with pytest.raises(RendezvousTimeout, match="1 of 1 have not announced 'rank' .*: replica 0 rank 0$"):
        second.wait_for("rank", [(0, 0)], timeout_seconds=0.3)
    first.announce("rank", 0, 0, {"port": 12})
    assert second.wait_for("rank", [(0, 0)]) == {(0, 0): {"port": 12}}


def _announce_and_stay(rank, directory, address):
    here = client(address)
    here.announce("store", rank, 0, {"address": ["127.0.0.1", os.getpid()]})
    (directory / f"announced_{rank}").touch()
    time.sleep(LIMIT_SECONDS)


def test_a_killed_process_leaves_its_place_to_the_next_start(tmp_path, server):
    ranks = Ranks(_announce_and_stay, [0], tmp_path, (server.address,))
    soon((tmp_path / "announced_0").exists)
    here = client(server.address)
    assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"address": ["127.0.0.1", ranks.processes[0].pid]}}
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    here.announce("store", 0, 0, {"address": ["127.0.0.1", 0]})
    assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"address": ["127.0.0.1", 0]}}
    ranks.stop()


def test_a_lease_that_broke_is_made_again_while_its_client_waits(server):
    early, late = client(server.address), client(server.address)
    early.announce("store", 0, 0, {"port": 1})
    early._lease.interrupt()  # as a network fault does: the client has not closed it
    soon(lambda: not server._directory._entries)
    with pytest.raises(RendezvousTimeout):
        early.wait_for("store", [(2, 0)], timeout_seconds=0.3)
    assert late.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 1}}


def test_a_client_takes_over_from_its_own_lease_that_the_server_still_believes_in(server):
    here, other = client(server.address), client(server.address)
    here.announce("store", 0, 0, {"port": 1})
    silent, here._lease = here._lease, None  # open, and nobody's any more: a host that lost its network looks like that
    here.announce("rank", 0, 0, {"port": 2})
    silent.close()
    soon(lambda: len(server._watch._quiet) == 1)
    assert other.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 1}}


def test_a_failure_ends_every_wait_of_the_run_at_once(server):
    waiting, others = client(server.address), client(server.address, timeout_seconds=0.3, run="other")
    failing = client(server.address, place=(1, 3))
    threading.Timer(0.2, failing.fail, (1, 3, "no GPU here")).start()
    with pytest.raises(StartFailed, match="replica 1, rank 3 failed at its start: no GPU here"):
        waiting.wait_for("store", [(0, 0)])
    failing.close()
    with pytest.raises(StartFailed, match="no GPU here"):
        waiting.wait_for("rank", [(0, 0)])
    with pytest.raises(RendezvousTimeout):
        others.wait_for("store", [(0, 0)])
    assert issubclass(StartFailed, ValueError)
    waiting.announce("store", 0, 0, {})
    assert waiting.wait_for("store", [(0, 0)]) == {(0, 0): {}}, "what is there is found"


def test_a_failure_of_an_earlier_start_is_over_when_its_place_starts_again(server, monkeypatch):
    monkeypatch.setattr(directory, "RESTART_SECONDS", 0.4)
    failed = client(server.address, place=(1, 0))
    assert failed.fail(1, 0, "no GPU here")
    failed.close()
    early, hopeful = client(server.address, place=(0, 0)), client(server.address, place=(0, 0))
    with pytest.raises(RendezvousTimeout):
        early.wait_for("store", [(1, 0)], timeout_seconds=0.1)  # that place may be starting again as well
    with pytest.raises(StartFailed):
        hopeful.wait_for("store", [(1, 0)])  # it did not
    again = client(server.address, place=(1, 0))
    again.wait_for("store", [])
    with pytest.raises(RendezvousTimeout):
        hopeful.wait_for("store", [(1, 0)], timeout_seconds=0.1)


def test_a_failure_that_others_can_do_without_is_its_own_replicas_alone(server):
    other, sibling = client(server.address, place=(0, 0)), client(server.address, place=(1, 1))
    client(server.address, place=(1, 0)).fail(1, 0, "no GPU here", of_run=False)
    with pytest.raises(StartFailed, match="no GPU here"):
        sibling.wait_for("muster", [(1, 0)])
    with pytest.raises(RendezvousTimeout):
        other.wait_for("store", [(1, 0)], timeout_seconds=0.2)


@pytest.mark.parametrize("lasting", [True, False])
def test_only_the_replica_that_would_fail_again_is_not_to_be_started_again(server, lasting):
    """All ranks of a replica end with one status: a launcher that sees several goes by the highest."""
    other, sibling, failing = (client(server.address, place=place) for place in ((0, 0), (1, 1), (1, 0)))
    failing.fail(1, 0, "no such folder", lasting=lasting)
    assert guarded(lambda _: other.wait_for("muster", [(1, 0)]), None) == TRY_AGAIN
    ends = guarded(lambda _: sibling.wait_for("muster", [(1, 0)]), None)
    assert ends == (USER_MUST_ACT if lasting else TRY_AGAIN)


def muster(server, replica, enough, replicas=3, timeout_seconds=10.0):
    asking = client(server.address, place=(replica, 0))
    asking.announce("start", replica, 0, {})
    return asking, Muster(
        asking, replica=replica, replicas=replicas, ranks=1, enough=enough, settle_seconds=0.3, timeout_seconds=timeout_seconds
    )


def test_those_that_are_there_begin_and_the_others_join(server):
    founders = [muster(server, replica, 2) for replica in (1, 2)]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(each.wait) for _, each in founders]
        assert [future.result(20) for future in waiting] == [((1, 2), False)] * 2
        late, of_late = muster(server, 0, 2)  # lower than the one that has spoken
        joining = pool.submit(of_late.wait)
        founders[0][0].announce("running", 1, 0, {})
        assert joining.result(20) == ((1,), True)


def test_the_first_one_to_say_who_begins_is_right(server, monkeypatch):
    """Replica 1 has said it while replica 0, which came at the same time, was about to."""
    monkeypatch.setattr(rendezvous, "TAKEN_SECONDS", 0.2)
    (one, _), _, (_, of_zero) = (muster(server, replica, 2) for replica in (1, 2, 0))
    one.announce("founders", 0, 0, {"members": [1, 2]})
    founders, seen = of_zero._founders, []

    def too_early_once():
        seen.append(founders())
        return () if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(of_zero, "_founders", too_early_once)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(of_zero.wait)
        soon(lambda: len(seen) > 1 or joining.done())
        one.announce("running", 1, 0, {})
        assert joining.result(20) == ((1,), True)


def test_who_joins_and_finds_that_the_others_are_gone_may_try_again(server):
    config = configs.load(CONFIG, ["topology.replicas=2", "topology.stages=1", "noloco.rendezvous_timeout_seconds=10"])
    place = Place(replica=1, data=0, stage=0, tensor=0)
    here, other = (client(server.address, timeout, place=(replica, 0)) for replica, timeout in ((1, 1.0), (0, 10.0)))
    joiner = Gathering(config, place, here, ("127.0.0.1", 1))
    same = {"versions": versions.here(), "config": run_id(config)}
    other.announce("start", 0, 0, {"address": ["127.0.0.1", 2], "settings": "", **same})
    other.announce("running", 0, 0, {"members": [0, 1]})
    joiner.start()
    assert joiner.joins and joiner.members == (0,)
    assert guarded(lambda _: joiner.meet("theta0", "data"), None) == TRY_AGAIN


def test_siblings_of_a_leader_that_waits_in_vain_say_the_same(server, monkeypatch):
    """They have started before it, and so would give up before it: they must not say that it is missing."""
    monkeypatch.setattr(mustering, "LOOK_SECONDS", 0.1)
    config = configs.load(CONFIG, ["topology.replicas=2", "topology.stages=2", "noloco.rendezvous_timeout_seconds=1"])

    def start(stage):
        asking = client(server.address, 1.0, place=(0, stage))
        Gathering(config, Place(0, 0, stage, 0), asking, ("127.0.0.1", 1)).start()

    with ThreadPoolExecutor() as pool:
        sibling = pool.submit(start, 1)
        time.sleep(0.5)
        leader = client(server.address, 1.0, place=(0, 0))
        gathering = Gathering(config, Place(0, 0, 0, 0), leader, ("127.0.0.1", 1))
        with pytest.raises(RendezvousTimeout, match="not all ranks have come of replica 1") as in_vain:
            gathering.start()
        gathering.failed(in_vain.value)
        with pytest.raises(StartFailed, match="not all ranks have come of replica 1"):
            sibling.result(20)


def test_waiting_in_vain_says_for_whom(server, monkeypatch):
    monkeypatch.setattr(mustering, "LOOK_SECONDS", 0.1)
    _, alone = muster(server, 0, 2, timeout_seconds=0.3)
    with pytest.raises(RendezvousTimeout, match="begins when 2 replicas are there, and only 1 came .*replica 1, 2"):
        alone.wait()
    one, _ = muster(server, 1, 2)
    one.announce("founders", 0, 0, {"members": [1, 2]})
    with pytest.raises(RendezvousTimeout, match="begins with replicas 1, 2, and they did not get under way"):
        alone.wait()


def test_a_failure_is_forgotten_after_a_while(server, monkeypatch):
    monkeypatch.setattr(directory, "FAILED_SECONDS", 0.1)
    here = client(server.address)
    here.fail(1, 0, "no GPU here")
    time.sleep(0.2)
    with pytest.raises(RendezvousTimeout):
        here.wait_for("store", [(1, 0)], timeout_seconds=0.1)


def test_failing_where_nobody_listens_is_no_second_failure(monkeypatch):
    monkeypatch.setattr(rendezvous, "TELL_SECONDS", 0.2)
    assert not client(("127.0.0.1", free_port())).fail(0, 0, "whatever")


def test_hundreds_of_leases_cost_no_thread_each(server):
    clients = [client(server.address) for _ in range(300)]
    before = threading.active_count()
    for replica, each in enumerate(clients):
        each.announce("store", replica, 0, {"port": replica})
    soon(lambda: threading.active_count() <= before)
    expected = {(replica, 0): {"port": replica} for replica in range(300)}
    assert clients[0].wait_for("store", list(expected)) == expected
    for each in clients:
        each.close()
    soon(lambda: not server._directory._entries)


def test_a_wrong_secret_says_so_at_once(server):
    with pytest.raises(ValueError, match="different secret"):
        client(server.address, secret=b"another secret entirely").announce("store", 0, 0, {})


@pytest.mark.parametrize(
    ("topic", "replica", "record", "message"),
    [
        ("store", -1, {}, "belongs to"),
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

    for request in ({}, {"hold": [1], "failed": [], "seconds": 1}, {"hold": [], "failed": 3}, {"find": 3}, {"find": []}):
        channel = dial(server.address, SECRET, {"kind": "rendezvous"}, LIMIT_SECONDS)
        channel.expire_in(LIMIT_SECONDS)
        channel.send(request)
        assert channel.receive()["kind"] == "refused"
    dial(server.address, SECRET, {"kind": "rendezvous", "place": [1, "x"]}, LIMIT_SECONDS).close()
    client(server.address).announce("store", 0, 0, {})


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_every_address_until_it_is_interrupted(tmp_path, how):
    words = ["--host", "0.0.0.0", "--public-host", "localhost", "--address-file", str(tmp_path / "address")]
    process = subprocess.Popen(
        [sys.executable, "-m", "noloco_mega", "rendezvous", *words],
        env={**os.environ, "NOLOCO_SECRET": SECRET.decode()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        soon((tmp_path / "address").exists)
        host, port = (tmp_path / "address").read_text().split(":")
        assert host == "localhost"
        here = client((host, int(port)))
        here.announce("store", 0, 0, {"port": 1})
        assert here.wait_for("store", [(0, 0)]) == {(0, 0): {"port": 1}}
        process.send_signal(how)
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0 and output == "", output


def test_listening_on_every_address_needs_a_name_for_others():
    with pytest.raises(ValueError, match="public_host"):
        RendezvousServer(SECRET, "0.0.0.0")
