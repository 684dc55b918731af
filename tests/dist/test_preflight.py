"""The live check: its plan of meetings, its verdicts on plain data, and real ranks, healthy and not."""

import copy
import os
import time

import pytest

from noloco_mega import config as configs
from noloco_mega import findings, preflight
from noloco_mega.comm.rendezvous import RendezvousServer
from tests.harness import Ranks
from tests.unit.test_config import changed

SECRET = "a secret for these tests only"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 15, 32])
def test_a_tournament_lets_every_pair_meet_once(size):
    plans = [list(preflight.rounds(rank, size)) for rank in range(size)]
    met = []
    for partners in zip(*plans, strict=True):
        assert all(partners[partner] == rank for rank, partner in enumerate(partners))
        met += [(rank, partner) for rank, partner in enumerate(partners) if rank < partner]
    assert sorted(met) == [(a, b) for a in range(size) for b in range(a + 1, size)]


def test_the_links_that_training_uses():
    fixed = configs.parse(changed(topology={"replicas": 3, "stages": 2}, noloco__routing="fixed"))
    # Ranks are 2·replica + stage: twins, and the two stages of each replica.
    assert preflight.edges(fixed) == {(0, 2), (0, 4), (2, 4), (1, 3), (1, 5), (3, 5), (0, 1), (2, 3), (4, 5)}
    routed = configs.parse(changed(topology={"replicas": 3, "stages": 2}))
    assert preflight.edges(routed) - preflight.edges(fixed) == {(0, 3), (0, 5), (1, 2), (2, 5), (1, 4), (3, 4)}
    sites = configs.parse(changed(topology={"replicas": 3, "stages": 2, "sites": [[0, 2], [1]]}))
    assert preflight.edges(sites) - preflight.edges(fixed) == {(0, 5), (1, 4)}


def _check(rank, directory, raw, address, variables, late):
    """One rank of a check; what it printed and whether it failed."""
    import contextlib
    import io

    from noloco_mega import launcher

    config = configs.parse(raw)
    grid = config.topology.grid()
    replica, local = divmod(rank, grid.replica_size)
    os.environ.update(
        RANK=str(local), WORLD_SIZE=str(grid.replica_size), LOCAL_RANK=str(local), NOLOCO_REPLICA=str(replica),
        NOLOCO_RENDEZVOUS=address, NOLOCO_SECRET=SECRET, **variables.get(rank, {}),
    )  # fmt: skip
    if rank in late:
        return None, None
    if os.environ.get("PRETEND_TORCH"):
        from noloco_mega import versions

        real = versions.here()
        versions.here = lambda: {**real, "torch": os.environ["PRETEND_TORCH"]}
    launch = launcher.read()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            preflight.check(config, launch, launcher.place(launch, grid), float(os.environ.get("WAIT", "40")))
        except (preflight.CheckFailed, OSError) as error:
            return output.getvalue(), str(error)
    return output.getvalue(), None


def run_check(tmp_path, raw, variables=None, late=(), limit_seconds=150):
    server = RendezvousServer(SECRET.encode())
    ranks = list(range(configs.parse(raw).topology.grid().size))
    try:
        workers = Ranks(_check, ranks, tmp_path, (raw, "{}:{}".format(*server.address), variables or {}, late))
        return workers.wait(limit_seconds)
    finally:
        server.close()


def raw_run(tmp_path, **changes):
    return changed(topology={"replicas": 2, "stages": 2}, run__directory=str(tmp_path / "runs"), **changes)


def test_a_launch_that_works(tmp_path):
    found = run_check(tmp_path, raw_run(tmp_path))
    text, failure = found[0]
    assert failure is None and text.rstrip().endswith(
        "VERDICT: this launch works: all 4 ranks are here, equal, and reach each other."
    )
    assert "6 links that training would use" in text and "Slowest link: rank " in text and "127.0.0.1" in text
    assert all(other == ("", None) for other in (found[1], found[2], found[3]))


@pytest.mark.slow  # its waits have to run out
def test_a_launch_that_does_not(tmp_path):
    """One rank never comes and one runs another torch: each is named, and all ranks say no."""
    raw = raw_run(tmp_path)
    waits = {rank: {"WAIT": "12"} for rank in range(4)}
    waits[1] |= {"PRETEND_TORCH": "1.0"}
    found = run_check(tmp_path, raw, waits, late=(3,))
    text, failure = found[0]
    assert "would not work" in failure and "VERDICT: this launch would NOT work" in text
    assert "rank 3 (replica 1, stage 1) did not report in 12 s" in text
    assert "rank 0 and rank 1" in text and "run different versions: torch 2" in text and "against 1.0" in text
    assert "rank 1 and rank 3: rank 3 was not reached in 12 s: it has not announced itself" in text
    assert found[1][1] is not None and found[2][1] is not None


FACTS = {
    "host": "n1", "address": "10.0.0.1", "interface": "eth0", "interface_mbit": 10_000, "versions": {"torch": "2"},
    "config": "c", "device": "cuda:0", "device_problem": "", "visible_gpus": "0,1",
    "disk": {"free": 10**12, "bytes_per_second": 1e9, "problem": ""},
}  # fmt: skip


def reports(**changes):
    """Healthy reports of 2 replicas of one stage, with one fact of rank 1, or one figure of their link, changed."""
    link = {
        "from": 0, "to": 1, "latency_seconds": 1e-4, "clock_seconds": 0.0, "there_gbit": 9.0, "back_gbit": 8.0,
    }  # fmt: skip
    facts = copy.deepcopy(FACTS)
    for key, value in changes.items():
        (facts if key in facts else link)[key] = value
    return {0: {"facts": FACTS, "links": [link]}, 1: {"facts": facts, "links": []}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, "Slowest link: rank 0 - rank 1, 8 Gbit/s"),
        ({"config": "d"}, "another configuration than rank 0"),
        ({"device_problem": "sees no GPU"}, "rank 1: sees no GPU"),
        ({"disk": {"free": 10, "bytes_per_second": 1.0, "problem": ""}}, "10 B free; the weights of all replicas need"),
        ({"disk": {"free": 0, "bytes_per_second": 0.0, "problem": "cannot write to runs"}}, "cannot write to runs"),
        ({"back_gbit": 1e-5}, "longer than the 180 s that noloco.link_timeout_seconds"),
        ({"problem": "silent"}, "rank 0 and rank 1: silent"),
        ({"versions": {"torch": "3"}}, "torch 2 against 3"),
    ],
)
def test_findings(change, message):
    config = configs.parse(changed(topology={"replicas": 2}))
    text, good = findings.judge(config, reports(**change), 60)
    assert message in text and good == (not change)


def test_clocks_that_differ_are_worth_a_warning_only():
    config = configs.parse(changed(topology={"replicas": 2}))
    text, good = findings.judge(config, reports(clock_seconds=-3.5), 60)
    assert good and "warning: the clocks of rank 0 and rank 1 differ by -3.5 s" in text


def test_clock_differences_have_the_right_sign(tmp_path, monkeypatch):
    """A partner whose clock is ahead: its answers carry later times than ours."""
    ahead = 5.0
    answers = iter(lambda: {"time": time.time() + ahead}, None)

    class Echo:
        expire_in = send = send_view = receive_into = close = staticmethod(lambda *_: None)
        receive = staticmethod(lambda: next(answers))

    visit = preflight._Visit.__new__(preflight._Visit)
    monkeypatch.setattr(visit, "_dial", lambda kind, rank: Echo(), raising=False)
    assert visit._call(1)["clock_seconds"] == pytest.approx(ahead, abs=0.1)
