"""Which samples: the place of every sample in the run, a pure function of (seed, view log, step, replica).

All replicas draw from one endless sequence of positions: epoch after epoch, each a keyed permutation of the data set.
An inner step takes B·M·D consecutive positions per member of its view, members in ascending order, so every sample is
used once per epoch over the whole run, however many replicas there are and whenever that number changes. Nothing
here depends on how a replica is cut (D, S, T).
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from noloco_mega.plan import keys
from noloco_mega.plan.views import ViewLog

ROUNDS = 8


def position(view_log: ViewLog, step: int, replica: int, replica_batch: int) -> int:
    """Samples that the run consumes before the first one of `replica` at inner step `step`.

    `replica_batch` is B·M·D, what one replica consumes per inner step.
    """
    assert view_log[0].from_step == 0 and all(a.from_step <= b.from_step for a, b in pairwise(view_log)), view_log
    before, now = 0, view_log[0]
    for view in view_log[1:]:
        if view.from_step > step:
            break
        before += (view.from_step - now.from_step) * len(now.members)
        now = view
    assert replica in now.members, f"replica {replica} takes no part in inner step {step}: {now}"
    before += (step - now.from_step) * len(now.members) + sorted(now.members).index(replica)
    return before * replica_batch


def samples(
    view_log: ViewLog,
    step: int,
    replica: int,
    first: int,
    count: int,
    replica_batch: int,
    length: int,
    seed: int,
) -> np.ndarray:
    """Indices into a data set of `length` samples: the `first` .. `first + count` of a replica's inner step.

    int64 [count]. A step that crosses the end of an epoch goes on in the next epoch's order.
    """
    assert first >= 0 and first + count <= replica_batch, f"samples {first} + {count} of {replica_batch}"
    start = position(view_log, step, replica, replica_batch) + first
    chosen = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, offset = divmod(start + done, length)
        taken = min(count - done, length - offset)
        places = np.arange(offset, offset + taken)
        chosen[done : done + taken] = shuffled(keys.key(seed, "epoch", epoch), places, length)
        done += taken
    return chosen


def shuffled(key: int, places: np.ndarray, length: int) -> np.ndarray:
    """The elements at `places` of the random permutation of range(length) that `key` names: int64, shape of `places`.

    O(1) memory and time per element, any length up to 2^62. A Feistel network over pairs (left, right) below `side`,
    the smallest even number with side² >= length: each round adds a keyed hash of one half to the other, modulo
    `side`, which can be undone, so the whole is a bijection of range(side²). An image beyond `length` is mapped again
    until it falls inside (cycle walking); range(length) is thereby mapped onto itself, and walks are rare because
    side² exceeds the length by about 4·√length at most.
    """
    assert 1 <= length <= 1 << 62
    assert places.size == 0 or (places.min() >= 0 and places.max() < length), (places, length)
    side = _even_side(length)
    round_keys = keys.raw(key, ROUNDS)
    image = _feistel(places.astype(np.uint64), side, round_keys)
    while (outside := image >= length).any():
        image[outside] = _feistel(image[outside], side, round_keys)
    return image.astype(np.int64)


def _feistel(values: np.ndarray, side: int, round_keys: np.ndarray) -> np.ndarray:
    modulus = np.uint64(side)
    left: np.ndarray = values // modulus
    right: np.ndarray = values % modulus
    for round_key in round_keys:
        left, right = right, (left + _mixed(right, round_key) % modulus) % modulus
    return left * modulus + right


def _mixed(values: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """A 64-bit hash of each value: the finaliser of SplitMix64 (Steele, Lea, Flood 2014) on a keyed counter."""
    # NumPy's unsigned arrays wrap silently modulo 2^64, which is what a hash wants.
    z = values * np.uint64(0x9E3779B97F4A7C15) + round_key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _even_side(length: int) -> int:
    side = math.isqrt(length - 1) + 1
    # Adding modulo an odd side permutes in cycles of odd length only, so it would never draw an odd permutation.
    return side + side % 2
