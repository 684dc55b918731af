"""When does a replica that is slower than the others end its inner phase early?

Pairs meet once per outer step. A replica that comes too late would miss its partner every time and drift away. So it
ends its phase before the partner gives up: it goes on as if it had taken the inner steps in between (the run's
counters: learning rate and place in the data), and takes the outer step that it is wanted at.
"""

from __future__ import annotations

from collections.abc import Callable

STAY = -1
"""No reason to hurry."""


def hurry_to(outer_step: int, furthest: int, waited: Callable[[int], float | None], patience_seconds: float) -> int:
    """The outer step to end the inner phase for now, or STAY.

    `outer_step` is the one that this replica works towards, `furthest` the highest that another one has begun.
    `waited(t)` tells for how long a partner of outer step t has been waiting there: 0 if it has not come yet, None if
    nobody can be met there any more. There is patience with a partner's waiting, so that replicas of nearly equal speed
    take all their inner steps.
    """
    if furthest < outer_step:
        return STAY
    now = waited(outer_step)
    if now is not None:
        return outer_step if now >= patience_seconds else STAY
    # Too late for this one. The next at which somebody waits, or else the last before one that is still to come.
    passed = outer_step
    while passed < furthest:
        there = waited(passed + 1)
        if there is not None:
            return passed + 1 if there > 0 else passed
        passed += 1
    return passed
