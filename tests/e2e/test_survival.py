"""Replicas die, hang and lag in whole runs, and the others go on: what the rows say of it."""

from itertools import pairwise

from tests.e2e.runs import launched, rows_of, wait_for_step, weights

QUICK = {
    "noloco__heartbeat_seconds": 0.5,
    "noloco__exchange_deadline_seconds": 10.0,
    "noloco__link_timeout_seconds": 30.0,
}


def mine(rows, replica):
    return [row for row in rows if row["replica"] == replica and row["loss"] is not None]


def everybody_took_every_step_once(rows, replicas, last):
    for replica in replicas:
        assert [row["step"] for row in mine(rows, replica)] == list(range(1, last + 1))


def test_a_killed_replica_costs_one_step_and_random_routes_return(tiny, tmp_path):
    raw = tiny(run__steps=80, **QUICK)
    with launched(raw, tmp_path) as ranks:
        wait_for_step(raw, 6, ranks)
        ranks.processes[3].kill()  # one rank of replica 1; its sibling gives up by itself
        ranks.wait(200, expect_missing=frozenset({2, 3}))
        assert not ranks.processes[2].is_alive(), "the sibling of a dead rank ends"
    rows = rows_of(raw)
    everybody_took_every_step_once(rows, (0, 2, 3), 80)
    for replica in (0, 2, 3):
        own = mine(rows, replica)
        routed = [tuple(row["routed"] or ()) for row in own]
        assert routed[0] == (0, 1, 2, 3) and routed[-1] == (0, 2, 3), routed
        changes = [now for before, now in pairwise(routed) if before != now]
        assert changes == [(), (0, 2, 3)], "from all, over the own pipeline, to the survivors"
        assert sum(row["redone_steps"] or 0 for row in own) == 1
        outer = [row for row in own if row["outer_step"] is not None]
        assert outer[-1]["present"] == [0, 2, 3]
        assert all(row["missed"] == 0 for row in outer if row["present"] == [0, 2, 3])


def test_a_restarted_replica_joins_from_a_live_one(tiny, tmp_path):
    """Though its own folder holds what it wrote before; it is paired and routed again, on the run's step."""
    raw = tiny(run__steps=150, **QUICK)
    with launched(raw, tmp_path) as ranks:
        wait_for_step(raw, 12, ranks)
        for process in ranks.processes[2:4]:
            process.kill()
        wait_for_step(raw, 22, ranks)
        again = ranks.restart(1)
        ranks.wait(200, expect_missing=frozenset({2, 3}))
        again.wait(60)
    rows = rows_of(raw)
    everybody_took_every_step_once(rows, (0, 2, 3), 150)
    own = mine(rows, 1)
    joined = next(row["step"] for before, row in pairwise(own) if row["step"] > before["step"] + 5)
    assert joined > 22 and own[-1]["step"] == 150
    outer = [row for row in own if row["outer_step"] is not None and row["step"] >= joined]
    met = [row["partner"] is not None and row["missed"] == 0 for row in outer]
    assert any(met[:3]), "it exchanges within three outer steps"
    assert all(met[3:]), met
    assert own[-1]["routed"] == [0, 1, 2, 3] and own[-1]["present"] == [0, 1, 2, 3]
    assert {w.manifest["step"] for w in weights(raw)} == {150} and len(weights(raw)) == 4
