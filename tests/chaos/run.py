"""One run that is struck by a plan's events, and its verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.chaos.fleet import Fleet
from tests.chaos.network import Network
from tests.chaos.plan import Event
from tests.chaos.strike import Striker
from tests.chaos.verdict import Verdict

SETTINGS = {
    "noloco__heartbeat_seconds": 1.5,
    "noloco__exchange_deadline_seconds": 10.0,
    "noloco__link_timeout_seconds": 30.0,
    "noloco__rendezvous_timeout_seconds": 120.0,
}
ENDLESS = 100_000
"""Inner steps of a run that ends when it is told to."""
LAST_OUTER_STEPS = 6
"""That all replicas take together after the last event."""


def strike(raw: dict[str, Any], events: list[Event], folder: Path) -> Verdict:
    """Run a config under these events, check what must hold of any such run, and print what it cost."""
    link_timeout = raw["noloco"]["link_timeout_seconds"]
    with Network(raw["topology"]["replicas"]) as network, Fleet(raw, network, folder) as fleet:
        striker = Striker(fleet)
        striker.play(events)
        striker.recover(LAST_OUTER_STEPS)
        striker.stop()
        verdict = Verdict(fleet.rows, striker.log)
        report(verdict)
        for replica in range(fleet.replicas):
            assert fleet.statuses(replica) == [0] * fleet.ranks, fleet.outputs()
    assert len(verdict.log) == len(events)
    assert max(verdict.stalls().values()) <= link_timeout, verdict.stalls()
    outcomes = [good for _, good in verdict.exchanges()]
    assert outcomes and sum(outcomes) >= 0.9 * len(outcomes), f"{sum(outcomes)} of {len(outcomes)} exchanges"
    for struck in verdict.log:
        if struck.event.kind == "kill":
            assert all(redone <= 1 for redone in verdict.redone_after(struck).values()), struck
        if struck.event.kind == "restart":
            met = verdict.met_after(struck)
            assert len(met) < 3 or any(met), struck
    return verdict


def report(verdict: Verdict) -> None:
    outcomes = [good for _, good in verdict.exchanges()]
    redone, skipped = (
        sum(stamped.row[key] or 0 for stamped in verdict.rows) for key in ("redone_steps", "skipped_steps")
    )
    stalls = verdict.stalls()
    longest = max(stalls, key=lambda replica: stalls[replica])
    print(
        f"{len(verdict.log)} events survived; longest stall {stalls[longest]:.1f} s (replica {longest}); steps lost: "
        f"{redone} redone, {skipped} skipped, of {verdict.steps_trained()}; exchanges of live pairs: {sum(outcomes)} "
        f"of {len(outcomes)}; final spread {verdict.spread(3):.4f}, validation loss {verdict.validation_loss():.4f}",
        file=sys.stderr,
        flush=True,
    )


def undisturbed(raw: dict[str, Any], folder: Path) -> Verdict:
    """The verdict of a run of `run.steps` that nothing happens to."""
    with Network(raw["topology"]["replicas"]) as network, Fleet(raw, network, folder) as fleet:
        striker = Striker(fleet)
        striker.recover(0)
        fleet.wait(lambda: all(map(fleet.ended, range(fleet.replicas))), "the run's end", 1200.0, lambda: None)
        return Verdict(fleet.rows, [])
