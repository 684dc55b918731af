"""Who averages with whom at outer step t: a pure function of (seed, outer step, set of replicas)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from noloco_mega.plan import keys


def groups(seed: int, outer_step: int, members: Iterable[int], group_size: int) -> list[tuple[int, ...]]:
    """The groups of one outer step: a random partition of `members` into groups of `group_size`.

    Replicas left over form one smaller group; who they are is drawn afresh each time, so over time every replica is
    left over equally often. Groups and their members come in ascending order.
    """
    ordered = np.array(sorted(set(members)))
    names = ",".join(map(str, ordered.tolist()))
    shuffled = ordered[keys.permutation(keys.key(seed, "pair", names, outer_step), len(ordered))].tolist()
    return sorted(tuple(sorted(shuffled[i : i + group_size])) for i in range(0, len(shuffled), group_size))


def partners(seed: int, outer_step: int, members: Iterable[int], group_size: int, replica: int) -> tuple[int, ...]:
    """The other members of `replica`'s group, ascending; empty for a replica left over alone."""
    for group in groups(seed, outer_step, members, group_size):
        if replica in group:
            return tuple(other for other in group if other != replica)
    raise AssertionError(f"replica {replica} asked for its group but is no member of outer step {outer_step}")
