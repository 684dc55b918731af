"""A model of NCCL's rules for point-to-point operations, and of the order in which 1F1B issues them.

Rules: a rank's calls on one communicator run one after another in the order issued; a call (one operation, or a group
of them) begins when the one before has ended and ends when all its operations have met their peers; the n-th send from
one rank to another meets the n-th receive of that pair. There are no tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

KINDS = ("send_prev", "recv_prev", "send_next", "recv_next")


class Transfer(NamedTuple):
    """One operation: `kind` says in which direction of the pipeline."""

    kind: str
    microbatch: int


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[list[Transfer]]:
    """The calls of one stage in megatron-core's schedule without interleaving, as groups of operations."""
    first, last = stage == 0, stage == stages - 1
    warmup = min(stages - stage - 1, microbatches)
    steady = microbatches - warmup
    calls: list[list[Transfer]] = []

    def call(*transfers: Transfer) -> None:
        wanted = [t for t in transfers if not (first if t.kind.endswith("prev") else last)]
        if wanted:
            calls.append(sorted(wanted, key=lambda t: KINDS.index(t.kind)))

    for m in range(warmup):
        call(Transfer("recv_prev", m))
        call(Transfer("send_next", m))
    if steady:
        call(Transfer("recv_prev", warmup))
    for i in range(steady):
        call(Transfer("send_next", warmup + i), Transfer("recv_next", i))
        if i < steady - 1:
            call(Transfer("send_prev", i), Transfer("recv_prev", warmup + i + 1))
        else:
            call(Transfer("send_prev", i))
    for i in range(steady, microbatches):
        call(Transfer("recv_next", i))
        call(Transfer("send_prev", i))
    return calls


Operation = tuple[str, int, tuple]
"""("send" or "recv", peer, label): the label says what travels, and both sides must mean the same."""


def along_routes(calls: list[list[Transfer]], stage: int, replica: int, stages: int, routes) -> list[list[Operation]]:
    """The calls of one stage of one replica with the peers that the routes give; rank = replica·S + stage."""

    def operation(transfer: Transfer) -> Operation:
        side, where = transfer.kind.split("_")
        if where == "next":
            other, peer_stage = routes.forward(0, transfer.microbatch, stage, replica), stage + 1
        else:
            other, peer_stage = routes.backward(0, transfer.microbatch, stage - 1, replica), stage - 1
        forward = transfer.kind in ("send_next", "recv_prev")
        return side, other * stages + peer_stage, (transfer.microbatch, "forward" if forward else "backward")

    return [[operation(transfer) for transfer in call] for call in calls]


def unbatched(calls: list[list[Operation]], order: Callable[[list[Operation]], list[Operation]]):
    """Each operation a call of its own, in the given order within what was a group."""
    return [[operation] for call in calls for operation in order(call)]


def stuck(ranks: list[list[list[Operation]]]) -> list[int]:
    """Run all ranks' calls under the rules; the ranks that never finish, ascending. Asserts that labels match."""
    position = [0] * len(ranks)
    open_operations = [0] * len(ranks)
    waiting: dict[tuple[int, int, int], tuple[int, tuple, str]] = {}
    counts: dict[tuple[str, int, int], int] = defaultdict(int)
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        if position[rank] == len(ranks[rank]):
            continue
        call = ranks[rank][position[rank]]
        open_operations[rank] = len(call)
        for side, peer, label in call:
            pair = (rank, peer) if side == "send" else (peer, rank)
            number = counts[side, *pair]
            counts[side, *pair] += 1
            met = waiting.pop((*pair, number), None)
            if met is None:
                waiting[*pair, number] = (rank, label, side)
                continue
            assert met[1:] == (label, "recv" if side == "send" else "send"), f"{pair} mixed up {met} and {label}"
            for party in (rank, met[0]):
                open_operations[party] -= 1
                if open_operations[party] == 0:
                    position[party] += 1
                    ready.append(party)
    return [rank for rank, calls in enumerate(ranks) if position[rank] < len(calls)]
