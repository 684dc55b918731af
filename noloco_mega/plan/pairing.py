"""Who averages with whom at outer step t: a pure function of (seed, outer step, set of replicas).

Three schemes:

- "random": a random partition into groups of n, drawn afresh for every outer step.
- "hypercube": pairs whose labels differ in one bit, in each bit once per cycle of log2 N outer steps. Full averaging
  would make all replicas equal within a cycle.
- "tournament": a round robin. In a cycle of N − 1 outer steps (N for odd N) everybody meets everybody once.

The last two give the replicas new random labels in every cycle. With the same ones for ever, whatever the labels have
in common would be pulled in the same rhythm for ever, and momentum could resonate with it: the hypercube's range of
stable γ would shrink with N (α = 0.9, N = 256: to 0.17 instead of 0.38), and a tournament's would depend on its draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from noloco_mega.plan import keys

Groups = list[tuple[int, ...]]


def groups(seed: int, outer_step: int, members: Iterable[int], group_size: int, scheme: str = "random") -> Groups:
    """The groups of one outer step, a partition of `members`. Groups and their members come in ascending order.

    Raises ValueError for groups of more than two in a scheme that pairs.
    """
    if scheme != "random" and group_size != 2:
        raise ValueError(f'pairing "{scheme}" makes pairs, and groups of {group_size} are asked for')
    return sorted(tuple(sorted(group)) for group in SCHEMES[scheme](seed, outer_step, sorted(set(members)), group_size))


def partners(
    seed: int, outer_step: int, members: Iterable[int], group_size: int, replica: int, scheme: str = "random"
) -> tuple[int, ...]:
    """The other members of `replica`'s group, ascending; empty for a replica left over alone."""
    for group in groups(seed, outer_step, members, group_size, scheme):
        if replica in group:
            return tuple(other for other in group if other != replica)
    raise AssertionError(f"replica {replica} asked for its group but is no member of outer step {outer_step}")


def period(replicas: int, scheme: str) -> int:
    """Outer steps of a cycle among so many replicas, all of them present."""
    match scheme:
        case "hypercube":
            return max(_dimensions(replicas), 1)
        case "tournament":
            return max(replicas - 1 + replicas % 2, 1)
        case _:
            return 1


def tournament_round(players: int, number: int) -> Groups:
    """The pairs of round `number` of a cycle, by label: the circle method.

    Labels 0..m − 1 with odd m lie on a circle, and in each round are mirrored at one of them, which is left over; with
    an even number of players it meets the last label. Mirrors that follow each other in order would only shift what
    has been averaged along the circle, so that they come in an order that was drawn once for each m (not for each run:
    the stable range depends on it).
    """
    circle = players - 1 + players % 2
    mirror = int(keys.permutation(keys.key("tournament", circle), circle)[number])
    found = {tuple(sorted((label, (2 * mirror - label) % circle))) for label in range(circle) if label != mirror}
    return [*sorted(found), (mirror,) if players % 2 else (mirror, circle)]


def _random(seed: int, outer_step: int, members: list[int], group_size: int) -> Groups:
    """Replicas left over form one smaller group; who they are is drawn afresh each time, so over time every replica is
    left over equally often."""
    shuffled = _labelled(seed, "pair", members, outer_step)
    return [tuple(shuffled[i : i + group_size]) for i in range(0, len(shuffled), group_size)]


def _hypercube(seed: int, outer_step: int, members: list[int], group_size: int) -> Groups:
    """The cube is the smallest that has a corner for every replica up to the highest one present. Members whose partner
    is absent pair at random among each other, so that at most one is left over."""
    corners = 1 << _dimensions(max(members) + 1)
    cycle, bit = divmod(outer_step, period(corners, "hypercube"))
    present = set(members)
    holders = keys.permutation(keys.key(seed, "hypercube", corners, cycle), corners).tolist()
    edges = [(holders[a], holders[a | 1 << bit]) for a in range(corners) if not a & 1 << bit and a | 1 << bit < corners]
    pairs: Groups = [edge for edge in edges if present.issuperset(edge)]
    widowed = sorted(present.difference(*pairs))
    return pairs + (_random(seed, outer_step, widowed, group_size) if widowed else [])


def _tournament(seed: int, outer_step: int, members: list[int], group_size: int) -> Groups:
    """Among those present: where that set changes, another tournament begins."""
    cycle, number = divmod(outer_step, period(len(members), "tournament"))
    holders = _labelled(seed, "tournament", members, cycle)
    return [tuple(holders[label] for label in group) for group in tournament_round(len(members), number)]


SCHEMES: dict[str, Callable[[int, int, list[int], int], Groups]] = {
    "random": _random,
    "hypercube": _hypercube,
    "tournament": _tournament,
}


def _labelled(seed: int, purpose: str, members: list[int], number: int) -> list[int]:
    """The members in a random order."""
    names = ",".join(map(str, members))
    order = keys.permutation(keys.key(seed, purpose, names, number), len(members))
    return [members[index] for index in order.tolist()]


def _dimensions(replicas: int) -> int:
    """Of the smallest hypercube with so many corners."""
    return (replicas - 1).bit_length()
