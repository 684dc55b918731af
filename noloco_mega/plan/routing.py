"""Which replica carries microbatch m over boundary s, and its inverse and origin.

A route is a permutation of a site's replicas, drawn per (inner step, microbatch, boundary): the replica at stage s
sends its output to π(replica) at stage s + 1, and the gradient comes back over π⁻¹. Boundary s lies between stages s
and s + 1. A microbatch is counted over the whole replica, m·D + d for data coordinate d, so the plan does not depend
on D.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from noloco_mega.plan import keys


class Routes(Protocol):
    """All routes of a run, for one site."""

    def forward(self, step: int, microbatch: int, boundary: int, replica: int) -> int:
        """π: the replica whose stage `boundary` + 1 takes what `replica`'s stage `boundary` computed."""

    def backward(self, step: int, microbatch: int, boundary: int, replica: int) -> int:
        """π⁻¹: the replica whose stage `boundary` computed what `replica`'s stage `boundary` + 1 took."""

    def origin(self, step: int, microbatch: int, stage: int, replica: int) -> int:
        """The replica whose first stage read the sample that `replica` works on at `stage`."""


def carriers(routes: Routes, step: int, microbatch: int, last_stage: int, replica: int) -> tuple[int, ...]:
    """The replicas that carried a microbatch, by stage: the last stage's is `replica`."""
    path = [replica]
    for boundary in range(last_stage - 1, -1, -1):
        path.append(routes.backward(step, microbatch, boundary, path[-1]))
    return tuple(reversed(path))


class IdentityRoutes:
    """The ordinary pipeline: every microbatch stays in its replica."""

    def forward(self, step: int, microbatch: int, boundary: int, replica: int) -> int:
        return replica

    def backward(self, step: int, microbatch: int, boundary: int, replica: int) -> int:
        return replica

    def origin(self, step: int, microbatch: int, stage: int, replica: int) -> int:
        return replica


class RandomRoutes:
    """Independent uniformly random permutations of `members`, a function of (seed, step, microbatch, boundary)."""

    def __init__(self, seed: int, members: Sequence[int]) -> None:
        self.seed = seed
        self.members = np.array(sorted(members))
        self._position = {int(replica): i for i, replica in enumerate(self.members)}
        # The schedule asks for each route up to 2·(stage + 1) times within a step; plans of older steps are dead.
        self._tables = lru_cache(maxsize=4096)(self._draw)

    def _draw(self, step: int, microbatch: int, boundary: int) -> tuple[np.ndarray, np.ndarray]:
        members = ",".join(map(str, self.members.tolist()))
        order = keys.permutation(keys.key(self.seed, "route", members, step, microbatch, boundary), len(self.members))
        return self.members[order], self.members[np.argsort(order)]

    def forward(self, step: int, microbatch: int, boundary: int, replica: int) -> int:
        return int(self._tables(step, microbatch, boundary)[0][self._position[replica]])

    def backward(self, step: int, microbatch: int, boundary: int, replica: int) -> int:
        return int(self._tables(step, microbatch, boundary)[1][self._position[replica]])

    def origin(self, step: int, microbatch: int, stage: int, replica: int) -> int:
        for boundary in range(stage - 1, -1, -1):
            replica = self.backward(step, microbatch, boundary, replica)
        return replica
