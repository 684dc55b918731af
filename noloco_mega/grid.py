"""Which (replica, data, stage, tensor) is rank r? Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where one rank sits: its coordinate on each of the four axes."""

    replica: int
    data: int
    stage: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks of a run, laid out with the replica axis slowest and the tensor axis fastest:

        rank in run = ((replica·D + data)·S + stage)·T + tensor

    Inside a replica this is megatron-core's order "tp-cp-ep-pp-dp".
    """

    replicas: int
    data: int = 1
    stages: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes().items():
            if size < 1:
                raise ValueError(f"the {axis} axis has size {size}: every axis needs at least 1")

    def sizes(self) -> dict[str, int]:
        return {"replicas": self.replicas, "data": self.data, "stages": self.stages, "tensor": self.tensor}

    @property
    def replica_size(self) -> int:
        """Ranks of one replica, which is one torch.distributed world: D·S·T."""
        return self.data * self.stages * self.tensor

    @property
    def size(self) -> int:
        """Ranks of the whole run: N·D·S·T."""
        return self.replicas * self.replica_size

    def place(self, rank: int) -> Place:
        """The place of a rank in the run. Raises ValueError outside [0, size)."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a run of {self.size} ranks ({self.sizes()})")
        rest, tensor = divmod(rank, self.tensor)
        rest, stage = divmod(rest, self.stages)
        replica, data = divmod(rest, self.data)
        return Place(replica, data, stage, tensor)

    def rank(self, place: Place) -> int:
        """The rank in the run of a place; the inverse of `place`."""
        return place.replica * self.replica_size + self.replica_rank(place)

    def replica_rank(self, place: Place) -> int:
        """The rank of a place inside its replica's own world."""
        return (place.data * self.stages + place.stage) * self.tensor + place.tensor

    def places(self) -> Iterator[Place]:
        """All places, in rank order."""
        return (self.place(rank) for rank in range(self.size))
