"""Which replicas take part from which inner step on: the view log that routing, pairing and sampling read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class View(NamedTuple):
    """From inner step `from_step` on, `members` (ascending) are the run."""

    from_step: int
    members: tuple[int, ...]


ViewLog = Sequence[View]


def initial(replicas: int) -> list[View]:
    """The log of an undisturbed run: all replicas, from the start."""
    return [View(0, tuple(range(replicas)))]


def at(view_log: ViewLog, step: int) -> View:
    """The view in force at an inner step."""
    return next(view for view in reversed(view_log) if view.from_step <= step)
