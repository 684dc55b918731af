"""How long may a transfer between two ranks take, once they have met?

Two limits hold. One follows from the speed of earlier transfers: FACTOR times what these bytes took then. The other one
is silence: when no byte moves in either direction, the partner has frozen or is cut off. A link may be quiet for
`patience_seconds`, or as long as the transfer has run so far, whichever is more: on a slow link the kernel's buffers
drain in long intervals, and ends are given up sooner the faster things went.
"""

from __future__ import annotations

import threading
import time

from noloco_mega.comm.wire import Channel

FACTOR = 4.0
"""A transfer may take so many times longer than the last one with this partner."""


class Speeds:
    """What the links to partners have carried: bytes per second, both directions together. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_second: dict[int, float] = {}

    def allowance(self, partner: int, size_bytes: int, floor_seconds: float, cap_seconds: float) -> float:
        """Seconds for a transfer with this partner: FACTOR · size / speed, inside the bounds.

        The speed is the last one with it, else the slowest of the other partners'; before the first, the cap.
        """
        with self._lock:
            speeds = self._bytes_per_second
            speed = speeds.get(partner) or min(speeds.values(), default=0.0)
        if not speed:
            return cap_seconds
        return min(cap_seconds, max(floor_seconds, FACTOR * size_bytes / speed))

    def measured(self, partner: int, size_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes has come to its end."""
        with self._lock:
            self._bytes_per_second[partner] = size_bytes / max(seconds, 1e-6)

    def overran(self, partner: int, size_bytes: int, allowed_seconds: float) -> None:
        """A transfer did not end in what it was allowed, though bytes moved: the next one gets twice that."""
        with self._lock:
            self._bytes_per_second[partner] = FACTOR * size_bytes / (2 * allowed_seconds)


class Pace:
    """Keeps a channel's deadline while a transfer runs on it, from now on."""

    def __init__(self, channel: Channel, allowed_seconds: float, patience_seconds: float) -> None:
        self.allowed_seconds = allowed_seconds
        self._channel, self._patience_seconds = channel, patience_seconds
        self._began = time.monotonic()
        channel.on_moved = self._moved
        self._moved()

    @property
    def ends(self) -> float:
        """When (time.monotonic()) the transfer is given up at the latest."""
        return self._began + self.allowed_seconds

    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def overran(self) -> bool:
        """Whether all that was allowed has been used up."""
        return self.seconds() >= self.allowed_seconds

    def _moved(self) -> None:
        now = time.monotonic()
        self._channel.deadline = min(self.ends, now + max(self._patience_seconds, now - self._began))
