"""Which replicas take part, where are this rank's twins, and what do a replica's own ranks agree on?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from noloco_mega import versions
from noloco_mega.comm.collective import Collective
from noloco_mega.comm.wire import Address
from noloco_mega.plan import pairing, views

if TYPE_CHECKING:
    from noloco_mega.comm.exchange import Exchange
    from noloco_mega.config import Noloco


class Closable(Protocol):
    def close(self) -> None: ...


COMPLAINTS = {
    "config": "another configuration (compare their config files: only paths and logging may differ)",
    "data": "other token files (the last stage reads a sample that another replica's first stage has read)",
    "theta0": "other initial weights (same versions of torch and noloco_mega everywhere?)",
}


def refuse_differences(replica: int, own: Mapping[str, Any], twins: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError naming the replicas whose versions, configuration, data or initial weights differ."""
    for other, twin in twins.items():
        if different := versions.differences(own.get("versions", {}), twin.get("versions", {})):
            raise ValueError(
                f"replica {replica} and replica {other} run different versions: {different}. Install the same ones in "
                "both places"
            )
    complaints = {key: text for key, text in COMPLAINTS.items() if key in own}
    for key, complaint in complaints.items():
        others = [other for other, twin in twins.items() if twin[key] != own[key]]
        if others:
            names = ", ".join(map(str, others))
            raise ValueError(f"replica {replica} and replica {names} do not belong together: {complaint}")


def addresses_of(replica: int, twins: Mapping[int, Mapping[str, Any]]) -> dict[int, Address]:
    """Where the twins of a rank of `replica` listen, from the records that they announced at their start."""
    return {
        other: (str(record["address"][0]), int(record["address"][1]))
        for other, record in twins.items()
        if other != replica
    }


def agree(group: dist.ProcessGroup, device: torch.device, *flags: int) -> tuple[int, ...]:
    """The elementwise minimum of each flag over the ranks of `group`: one all-reduce for all flags.

    With 0/1 flags it is "all of us": my links were good, nobody asked to stop, all of us hold this partner's data.
    Every rank must pass equally many flags; no flags cost nothing.
    """
    if not flags:
        return ()
    values = torch.tensor(flags, dtype=torch.int64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    return tuple(int(value) for value in values.tolist())


def _nobody(timeout: timedelta) -> Collective:
    raise ValueError("these peers were connected without a way to gather the twins of all replicas")


@dataclass
class Peers:
    """One rank's view of the run around its replica.

    All ranks of a replica must hold the same `present` when they take an outer step: the partners follow from it.
    """

    replica: int
    """This rank's own replica."""
    view_log: list[views.View]
    """Which replicas the run has, from which inner step on: routes aside, what each one reads follows from it."""
    addresses: dict[int, Address]
    """Where the rank that holds the same slice of the model listens, in each other replica."""
    exchange: Exchange
    """How buffers are swapped with those twins."""
    group: dist.ProcessGroup
    """All ranks of this replica."""
    device: torch.device
    """Where tensors of `group`'s collectives live."""

    resources: tuple[Closable, ...] = ()
    """What else ends with the exchange: the listener that it was reached by, the place in the rendezvous."""
    present: list[views.View] = field(default_factory=list)
    """Which replicas are paired, from which inner step on: those that live, as far as it is known here. By default all
    of the view log's."""

    gather: Callable[[timedelta], Collective] = _nobody
    """How the group with the twins of all replicas forms, whose sums must be done within the given time."""
    _everybody: Collective | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.present = self.present or list(self.view_log)

    def everybody(self, settings: Noloco) -> Collective:
        """The group with the twins of all replicas. The first call forms it, collective over them: only an outer
        optimizer that waits for everybody may ask for it. Raises as `open_collective` does."""
        if self._everybody is None:
            self._everybody = self.gather(timedelta(seconds=settings.link_timeout_seconds))
        return self._everybody

    def close(self) -> None:
        """Leave: exchanges in flight end, and nobody finds this rank any more."""
        self.exchange.close()
        if self._everybody is not None:
            self._everybody.close()
        for resource in self.resources:
            resource.close()

    def members(self, outer_step: int, settings: Noloco) -> tuple[int, ...]:
        """The replicas present in outer step `outer_step`, counted from the start of its inner phase."""
        return views.at(self.present, outer_step * settings.inner_steps).members

    def follow(self, members: Sequence[int], from_step: int, addresses: Mapping[int, Address]) -> None:
        """From inner step `from_step` on these replicas are present; their twins of this rank listen there."""
        kept = [view for view in self.present if view.from_step < from_step]
        self.present[:] = [*kept, views.View(from_step, tuple(sorted(members)))]
        self.addresses.update((replica, where) for replica, where in addresses.items() if replica != self.replica)

    def partners(self, outer_step: int, settings: Noloco) -> tuple[int, ...]:
        """Who averages with this replica at an outer step, ascending; nobody while it is outside the view."""
        members = self.members(outer_step, settings)
        if self.replica not in members:
            return ()
        return pairing.partners(settings.seed, outer_step, members, settings.group_size, self.replica, settings.pairing)

    def agree(self, *flags: int) -> tuple[int, ...]:
        """`agree` over this replica's ranks."""
        return agree(self.group, self.device, *flags)

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sum of `values` over this replica's ranks, in float64."""
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed, group=self.group)
        return summed.tolist()
