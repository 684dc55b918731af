"""Which rank does a stage's output go to? A megatron-core communicator that follows the plan's routes.

The schedule knows only "next" and "previous"; here those are stages, and the route of each microbatch names the
replica. Letters: S_t sequence on one tensor rank, B microbatch, H hidden; M microbatches of one pipeline, D data size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.comm.links import LinkBroken, Links
from noloco_mega.plan.routing import IdentityRoutes, Routes


@dataclass(frozen=True)
class Circuit:
    """Routes together with the links that carry them."""

    routes: Routes
    links: Links
    link_rank: Callable[[int, int], int]
    """(replica, stage) -> rank in the link group; all its ranks have the same data and tensor coordinates."""


def local_circuit(links: Links) -> Circuit:
    """The ordinary pipeline; `links` joins the S stages of one replica (rank = stage)."""
    return Circuit(IdentityRoutes(), links, lambda replica, stage: stage)


def site_circuit(routes: Routes, links: Links, members: Sequence[int], stages: int) -> Circuit:
    """Routes among the replicas `members`, whose |members|·S ranks `links` joins in order of (replica, stage)."""
    position = {replica: i for i, replica in enumerate(sorted(members))}
    return Circuit(routes, links, lambda replica, stage: position[replica] * stages + stage)


class RoutedP2PCommunicator(P2PCommunicator):
    """Sends the n-th forward (backward) tensor of a schedule run along the route of microbatch n.

    megatron-core's schedule without interleaving handles microbatches in order in each of its four kinds of transfer,
    so that counting the calls of a kind tells which microbatch it is about.
    """

    def __init__(self, world: ReplicaWorld, settings: TransformerConfig) -> None:
        super().__init__(world.pipeline, settings)
        self._place, self._data_size, self._device = world.place, world.grid.data, world.device.device
        # A tensor rank that left the schedule would let its siblings wait in a tensor-parallel collective for ever.
        # With variable lengths nobody can know which shapes would have come, so that leaving is all that remains.
        self._stays_after_failure = world.grid.tensor > 1 and not settings.variable_seq_lengths
        self.failure: LinkBroken | None = None

    def begin(self, step: int, circuit: Circuit) -> None:
        """Start counting for a run of the schedule in inner step `step`; to be called before each."""
        self._step, self._circuit = step, circuit
        self._sent_next = self._received_next = self._sent_previous = self._received_previous = 0
        self.failure = None

    def _next_peer(self, count: int) -> int:
        routes, stage = self._circuit.routes, self._place.stage
        replica = routes.forward(self._step, self._microbatch(count), stage, self._place.replica)
        return self._circuit.link_rank(replica, stage + 1)

    def _previous_peer(self, count: int) -> int:
        routes, stage = self._circuit.routes, self._place.stage
        replica = routes.backward(self._step, self._microbatch(count), stage - 1, self._place.replica)
        return self._circuit.link_rank(replica, stage - 1)

    def _microbatch(self, count: int) -> int:
        return count * self._data_size + self._place.data

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Tensors [S_t, B, H] to and from the neighbouring stages, as the stock method; returns (from previous, from
        next, no requests). Raises LinkBroken, or on a stage with tensor-parallel siblings notes it in `failure` and
        goes on with zeros, so that the schedule comes to its end on all of them."""
        assert wait_on_reqs, "overlapped transfers belong to the interleaved schedule"
        sends: list[tuple[Tensor, int]] = []
        sources: list[int] = []
        if tensor_send_prev is not None:
            sends.append((tensor_send_prev.contiguous(), self._previous_peer(self._sent_previous)))
            self._sent_previous += 1
        if recv_prev:
            sources.append(self._previous_peer(self._received_previous))
            self._received_previous += 1
        if tensor_send_next is not None:
            sends.append((tensor_send_next.contiguous(), self._next_peer(self._sent_next)))
            self._sent_next += 1
        if recv_next:
            sources.append(self._next_peer(self._received_next))
            self._received_next += 1
        received = iter(self._transfer(sends, sources, tensor_shape))
        from_previous = next(received) if recv_prev else None
        from_next = next(received) if recv_next else None
        return from_previous, from_next, None

    def _transfer(self, sends: list[tuple[Tensor, int]], sources: list[int], shape: Any) -> list[Tensor]:
        """Exchange activations; the tensors received, one for each source rank."""
        shapes = [tuple(shape)] * len(sources) if sources else []
        if self.failure is None:
            try:
                if self.config.variable_seq_lengths:
                    shapes = self._exchange_shapes(sends, sources)
                received = [self._empty(each) for each in shapes]
                self._circuit.links.exchange(sends, list(zip(received, sources, strict=True)))
                return received
            except LinkBroken as error:
                if not self._stays_after_failure:
                    raise
                self.failure = error
        return [self._empty(each).detach().zero_().requires_grad_() for each in shapes]

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=self._device, requires_grad=True)

    def _exchange_shapes(self, sends: list[tuple[Tensor, int]], sources: list[int]) -> list[tuple[int, ...]]:
        shapes = [torch.empty(3, dtype=torch.int64, device=self._device) for _ in sources]
        mine = [(torch.tensor(tensor.shape, dtype=torch.int64, device=self._device), peer) for tensor, peer in sends]
        self._circuit.links.exchange(mine, list(zip(shapes, sources, strict=True)))
        return [tuple(each.tolist()) for each in shapes]
