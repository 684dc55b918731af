"""Which replica should look at its own weights, because losses that it had a part in were not finite?

The last stage knows which replicas carried a microbatch whose loss was not finite, and its leader tells all others:

    kind "bad"   {"step", "routes": [[replica of stage 0, of stage 1, ...], ...]}

One such microbatch may be the data's fault, or another replica's on its way. A replica on two of them in one step is
suspected.
"""

from __future__ import annotations

from collections.abc import Sequence

from noloco_mega.comm.control import Leaders
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.terms import Terms
from noloco_mega.comm.wire import Message

SUSPICIOUS_ROUTES = 2
"""Of microbatches with a loss that is not finite, in one inner step."""
MOST_ROUTES = 1000
"""That one message tells of."""
STEPS_KEPT = 10


class BadNumbers:
    """One leader's count of the bad microbatches that its replica carried."""

    def __init__(self, terms: Terms, leaders: Leaders, orders: Orders) -> None:
        self._terms, self._leaders, self._orders = terms, leaders, orders
        self._carried: dict[int, int] = {}
        """By inner step."""

    def seen(self, step: int, routes: Sequence[Sequence[int]]) -> None:
        """Microbatches along these routes had a loss that is not finite, as this replica's last stage saw."""
        message = {"step": step, "routes": [list(route) for route in routes][:MOST_ROUTES]}
        self._leaders.broadcast("bad", message)
        self.heard(self._terms.replica, message)

    def heard(self, sender: int, message: Message) -> None:
        """A leader tells of bad microbatches, this one included."""
        step, routes = int(message["step"]), message["routes"]
        before = self._carried.get(step, 0)
        now = before + sum(self._terms.replica in route for route in routes)
        self._carried = {**{s: n for s, n in self._carried.items() if s > step - STEPS_KEPT}, step: now}
        if self._terms.heals and before < SUSPICIOUS_ROUTES <= now:
            self._orders.give({"check": step})
