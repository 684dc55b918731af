"""Random streams: every draw of the plan is a pure function of a seed and the place that asks.

Keys come from SHA-256 and bits from Philox-4x64 read raw, so that a plan is the same in every process, on every
platform and for every NumPy release (NumPy promises stability for a bit generator's raw output, not for the methods
of `Generator`).
"""

from __future__ import annotations

import hashlib

import numpy as np


def key(*words: int | str) -> int:
    """A 128-bit key for a stream, e.g. ``key(seed, "route", step, microbatch, boundary)``.

    Every word is hashed with its type and length, so ("a", "bc") and ("ab", "c") differ.
    """
    digest = hashlib.sha256()
    for word in words:
        # bool is refused because True == 1 would alias two streams.
        assert isinstance(word, (int, str)) and not isinstance(word, bool), f"a key takes ints and strings: {word!r}"
        text = f"{type(word).__name__}:{word}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest()[:16], "little")


def raw(key_: int, count: int) -> np.ndarray:
    """`count` independent uniform 64-bit words of the stream: uint64 [count]."""
    return np.random.Philox(key=key_).random_raw(count)


def permutation(key_: int, size: int) -> np.ndarray:
    """A uniformly random permutation of range(size): int64 [size].

    Sorting 64-bit words; two equal words (probability below size²/2^65) fall back to index order.
    """
    return np.argsort(raw(key_, size), kind="stable")
