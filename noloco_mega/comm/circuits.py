"""Which circuit does this rank route on, and from which step?

A circuit is routes with the links that carry them. Every rank has its replica's own pipeline (`local`), which needs
nobody else, and may be on the circuit of its site. Circuits are numbered: each has links of its own, and a number whose
links have failed never comes back. A new one is formed beside training and entered at the start of an agreed step.

NCCL would connect on the GPU that is training; there the links are formed where they are entered.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from noloco_mega.comm.links import LinkBroken, Links, open_links
from noloco_mega.comm.routed_p2p import local_circuit, site_circuit
from noloco_mega.comm.wire import Address
from noloco_mega.device import Device
from noloco_mega.grid import Grid, Place
from noloco_mega.plan.routing import RandomRoutes

LOCAL = 0
"""The number of the replica's own pipeline."""


@dataclass(frozen=True)
class Formed:
    """A circuit that this rank could enter."""

    number: int
    members: tuple[int, ...]
    open: Callable[[], Links]
    """Gives the links: at once where they are formed already. Raises LinkBroken."""
    close: Callable[[], None]

    @classmethod
    def with_links(cls, number: int, members: Sequence[int], links: Links) -> Formed:
        """One whose links are there."""
        return cls(number, tuple(members), lambda: links, links.close)


class Circuits:
    """One rank's circuits. `form` and `break_off` are safe to call from any thread; the loop's own calls the rest."""

    def __init__(self, grid: Grid, place: Place, device: Device, host: str, seed: int, timeout: timedelta) -> None:
        """`timeout` is how long a link waits; `host` is this rank's address towards the others."""
        self._grid, self._place, self._device, self._host = grid, place, device, host
        self._seed, self._timeout = seed, timeout
        self._lock = threading.Lock()
        self._formed: dict[int, Formed] = {}
        self._broken: set[int] = set()
        self._due: list[tuple[int, int]] = []
        self.number = LOCAL
        """Of the circuit in use."""

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas of the circuit in use; none for the own pipeline."""
        return () if self.number == LOCAL else self._formed[self.number].members

    def start(self, local_store: dist.Store) -> None:
        """Connect to the replica's own pipeline. Raises LinkBroken."""
        beside, stages = self._beside(), self._grid.stages
        links = open_links(self._device, local_store, self._place.stage, stages, self._timeout, self._host, beside)
        self.local = self.current = local_circuit(links)

    def join(self, number: int, members: Sequence[int], store: dist.Store) -> None:
        """Form a circuit now and enter it. Collective over its members. Raises LinkBroken."""
        self._formed[number] = Formed.with_links(number, members, self._links(members, store))
        self._take(number)

    def form(self, number: int, members: Sequence[int], store: Address, done: Callable[[str | None], None]) -> None:
        """Form a circuit in a thread of its own; `done` gets None, or the reason why it can't be."""
        arguments = (number, tuple(members), store, done)
        threading.Thread(target=self._form, args=arguments, name=f"circuit {number}", daemon=True).start()

    def schedule(self, number: int, step: int) -> None:
        """Enter this circuit at the start of inner step `step`."""
        self._due.append((step, number))

    def cancel(self, number: int) -> None:
        """Do not enter this circuit, which has ended before it began."""
        self._due = [due for due in self._due if due[1] != number]

    @property
    def due(self) -> int | None:
        """The next step at which another circuit is to be entered, if any."""
        return min(self._due)[0] if self._due else None

    def enter(self, step: int) -> None:
        """At the start of an inner step: change over to what was scheduled for it. Raises LinkBroken."""
        while self._due and min(self._due)[0] <= step:
            due = min(self._due)
            self._due.remove(due)
            self.number = due[1]
            if due[0] < step:
                raise LinkBroken(f"circuit {due[1]} began at inner step {due[0]}, which this replica has passed")
            self._take(due[1])

    def leave(self) -> int:
        """Go on along the replica's own pipeline; the number of the circuit that was left.

        Raises LinkBroken where that pipeline is what broke: then a rank of the replica is gone, and so is the replica.
        """
        if self.number == LOCAL:
            raise LinkBroken("a link between stages of the same replica broke")
        number = self.number
        self.break_off(number)
        self.current, self.number = self.local, LOCAL
        return number

    def withdraw(self) -> list[int]:
        """Go on along the own pipeline, and enter no circuit that was agreed on; the numbers of those given up."""
        numbers = [number for _, number in self._due]
        self._due.clear()
        if self.number != LOCAL:
            numbers.append(self.leave())
        return numbers

    def break_off(self, number: int) -> None:
        """Break a circuit's links, now or once they are formed: whoever waits for them raises LinkBroken."""
        with self._lock:
            self._broken.add(number)
            formed = self._formed.get(number)
        if formed is not None:
            formed.close()

    def tidy(self) -> None:
        """Give up the circuits before the one in use. Whoever shared them has finished the steps that ran on them."""
        for number in [number for number in self._formed if number < self.number]:
            self.break_off(number)
            del self._formed[number]

    def close(self) -> None:
        for formed in list(self._formed.values()):
            formed.close()
        self.local.links.close()

    def _take(self, number: int) -> None:
        self.number = number
        formed = self._formed.get(number)
        if formed is None:
            raise LinkBroken(f"circuit {number} was not formed here")
        links = formed.open()
        self._keep(Formed.with_links(number, formed.members, links))
        self.current = site_circuit(RandomRoutes(self._seed, formed.members), links, formed.members, self._grid.stages)

    def _keep(self, formed: Formed) -> bool:
        """Know a circuit from now on; whether it has not been called off meanwhile."""
        with self._lock:
            self._formed[formed.number] = formed
            broken = formed.number in self._broken
        if broken:
            formed.close()
        return not broken

    def _form(
        self, number: int, members: tuple[int, ...], address: Address, done: Callable[[str | None], None]
    ) -> None:
        try:
            # The store's own client would knock on a closed port, of a circuit that was called off, until its timeout.
            socket.create_connection(address, self._timeout.total_seconds()).close()
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=self._timeout)
            if self._device.is_cuda:
                formed = Formed(number, members, lambda: self._links(members, store), lambda: None)
            else:
                formed = Formed.with_links(number, members, self._links(members, store))
        except (OSError, RuntimeError, LinkBroken) as error:  # what a store raises is a RuntimeError
            done(str(error).splitlines()[0])
            return
        done(None if self._keep(formed) else "it was called off")

    def _links(self, members: Sequence[int], store: dist.Store) -> Links:
        stages, place = self._grid.stages, self._place
        ordered = sorted(members)
        rank = ordered.index(place.replica) * stages + place.stage
        peers = [position * stages + stage for position in range(len(ordered)) for stage in self._beside()]
        return open_links(self._device, store, rank, len(ordered) * stages, self._timeout, self._host, peers)

    def _beside(self) -> list[int]:
        stage = self._place.stage
        return [other for other in (stage - 1, stage + 1) if 0 <= other < self._grid.stages]
