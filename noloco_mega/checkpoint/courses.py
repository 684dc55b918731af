"""To which course of its run does a checkpoint belong?

Whenever replicas begin a run together, anew or from a checkpoint, a course begins; who joins later takes part in it. A
replica that was absent when the others went on from an older step still has newer ones, of the course that they gave
up, and a step must never be a mixture of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Course(NamedTuple):
    from_step: int
    """Inner steps done when it began."""
    began: int
    """Milliseconds since 1970: its name, and which of two is newer."""


def read(pairs: Iterable[Sequence[int]]) -> list[Course]:
    """Courses as JSON has them."""
    return [Course(int(from_step), int(began)) for from_step, began in pairs]


def of(manifest: Mapping[str, Any]) -> list[Course]:
    """The courses that led to what a manifest describes, the last its own. Older versions did not tell them apart."""
    return read(manifest.get("courses", [(0, 0)]))


def holds(courses: Sequence[Course], manifest: Mapping[str, Any]) -> bool:
    """Whether what a manifest describes is part of the way that these courses took."""
    ends: dict[int, float] = {before.began: after.from_step for before, after in pairwise(courses)}
    ends |= {last.began: math.inf for last in courses[-1:]}
    return manifest["step"] <= ends.get(of(manifest)[-1].began, -1)
