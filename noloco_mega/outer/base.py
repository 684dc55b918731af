"""What is an outer optimizer? What follows the last inner step of a phase, in two halves: launch, then apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from noloco_mega.comm.collective import Collective
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.engine.weights import Masters


CHUNK_ELEMENTS = 1 << 20
"""Elements that one pass of an update works on: bounds its temporaries, which are of this size."""


def parts(tensors: Sequence[torch.Tensor], elements: int | None = None) -> Iterator[tuple[int, slice]]:
    """All of some flat tensors in pieces of `elements`, or CHUNK_ELEMENTS: (index of the tensor, elements of it)."""
    size = elements or CHUNK_ELEMENTS
    for index, tensor in enumerate(tensors):
        for start in range(0, tensor.numel(), size):
            yield index, slice(start, start + size)


@dataclass(frozen=True, kw_only=True)
class OuterReport:
    """What one outer step did, as this rank saw it; `received` and `spread` are equal on all ranks of a replica.

    An optimizer that averages over everybody counts as bytes what each rank hands to the all-reduce, once, and cannot
    tell the spread.
    """

    outer_step: int
    asked: tuple[int, ...] = ()
    """The partners that the plan named, ascending; all other replicas where the optimizer waits for everybody."""
    received: tuple[int, ...] = ()
    """The partners whose data every rank of this replica holds whole; the group was these and the replica itself."""
    missed: Mapping[int, str] = field(default_factory=dict)
    """The other partners, each with the reason."""
    unacknowledged: tuple[int, ...] = ()
    """Received partners that did not confirm to this rank that they have its data: they may have stepped without it."""
    exchange_seconds: float = 0.0
    """From launch until the last partner answered or was given up."""
    sent_bytes: int = 0
    """Payload that this rank wrote to its partners, unfinished exchanges included."""
    received_bytes: int = 0
    """Payload that this rank read from its partners, unfinished exchanges included."""
    spread: float | None = None
    """‖c_i − c_j‖ / ‖c_i‖ of the exchanged tensors c over the whole replica, the mean over received partners j;
    None where nobody was received, or c is all zeros. A parameter that each of the T tensor ranks holds whole counts T
    times."""
    wrap_rate: float | None = None
    """Share of the received partners' weights that their codes could not tell apart (codec.wrap_rate), over the whole
    replica; most of them were mended. None where nothing can wrap, or nobody was received."""


class OuterOptimizer(Protocol):
    """Moves the masters between inner phases. Between `launch` and `apply` nobody else may touch the masters.

    All methods are called alike on all ranks of a replica.
    """

    settings: Noloco
    """Those of the next outer step: between outer steps others may take their place that differ in γ."""
    catches_up: bool
    """Whether a replica that is slower than the others may skip inner steps in order to meet them."""

    def __init__(self, masters: Masters, settings: Noloco, peers: Peers) -> None: ...

    def due(self, step: int) -> bool:
        """Whether an outer step follows once `step` inner steps have been taken."""
        return step > 0 and step % self.settings.inner_steps == 0

    def before_inner_step(self) -> None:
        """An inner step is about to use the gradients that Masters.gradients holds: reduced over the replica's own
        ranks, and not clipped yet. Most outer optimizers leave them alone."""
        return

    def launch(self, outer_step: int) -> None:
        """Begin outer step `outer_step` (counted from 0): whatever can travel starts to."""
        ...

    def apply(self) -> OuterReport:
        """Finish what `launch` began; the next inner step starts from what it leaves in the model. Collective over the
        replica, and bounded whatever the partners do: by settings.exchange_deadline_seconds for meeting them and
        settings.transfer_cap_seconds for their data. Where everybody is averaged with, bounded by
        settings.link_timeout_seconds; then CollectiveBroken is raised."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer's state: tensors are the live ones, flat as the masters are."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of the same shapes. Raises ValueError if it belongs to another layout."""
        ...


def report_of_all(everybody: Collective, outer_step: int, seconds: float, payload_bytes: int) -> OuterReport:
    """The report of an optimizer that has averaged with all other replicas."""
    return OuterReport(
        outer_step=outer_step,
        asked=everybody.others,
        received=everybody.others,
        exchange_seconds=seconds,
        sent_bytes=payload_bytes,
        received_bytes=payload_bytes,
    )


def refuse_state(name: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError where something is loaded into the optimizer `name`, which keeps nothing."""
    if state:
        raise ValueError(f'the outer optimizer "{name}" has no state, but the one to load holds {sorted(state)}')
