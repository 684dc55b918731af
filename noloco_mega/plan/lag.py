"""When does a replica that is slower than the others end its inner phase early?

Pairs meet once per outer step. A replica whose outer step others have begun long ago would miss its partner every time
and drift away. It goes on as if it had taken the inner steps in between (the run's counters: learning rate and place in
the data), takes one last inner step, and joins the outer step that the others are at.
"""

from __future__ import annotations

STAY = -1
"""No reason to hurry."""


def outer_step_to_join(outer_step: int, furthest: int, waiting_seconds: float, patience_seconds: float) -> int:
    """The outer step to end the inner phase for, or STAY.

    `outer_step` is the one that this replica works towards, `furthest` the highest that another one has begun, for
    `waiting_seconds` as far as is known. While it is the same one, there is patience: replicas of nearly equal speed
    take all their inner steps. A replica behind by more has missed its partner already.
    """
    if furthest > outer_step or (furthest == outer_step and waiting_seconds >= patience_seconds):
        return furthest
    return STAY
