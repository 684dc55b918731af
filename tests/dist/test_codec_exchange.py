"""Outer steps in few bits over real connections, in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from noloco_mega import costs
from noloco_mega.config import Noloco
from noloco_mega.outer import registry
from tests.dist.test_exchange import Member, members  # noqa: F401 - a fixture

SIZES = (5000, 70)


def optimizer_of(member: Member, other: Member, settings: Noloco, seed: int):
    """A replica whose masters have moved since the start by what `seed` draws."""
    start, moves = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=start) for size in SIZES]
    peers = SimpleNamespace(
        replica=member.exchange.replica,
        addresses={other.exchange.replica: other.address},
        exchange=member.exchange,
        partners=lambda outer_step, settings: (other.exchange.replica,),
        agree=lambda *flags: flags,
        total=lambda values: values,
    )
    built = registry.build(SimpleNamespace(tensors=tensors, publish=lambda: None), settings, peers)
    for tensor in tensors:
        tensor.add_(torch.randn(tensor.shape, generator=moves), alpha=0.01)
    return built, tensors


def step(members, first: Noloco, second: Noloco):  # noqa: F811
    low, high = members(0), members(1)
    (one, mine), (two, theirs) = optimizer_of(low, high, first, 1), optimizer_of(high, low, second, 2)
    one.launch(0)
    two.launch(0)
    return one.apply(), two.apply(), mine, theirs


@pytest.mark.parametrize("optimizer", ["noloco", "gossip"])
@pytest.mark.parametrize("bits", [3, 4])
def test_bytes_at_the_sockets_are_those_of_the_codes(members, optimizer, bits):  # noqa: F811
    settings = Noloco(optimizer=optimizer, codec="modulo", codec_bits=bits)
    ours, their, mine, theirs = step(members, settings, settings)
    expected = sum(costs.message_bytes(settings, size) for size in SIZES)
    assert expected == (40 + 1) * (2 + 16 * bits)
    for report in (ours, their):
        assert report.sent_bytes == report.received_bytes == expected and report.received and not report.missed
        assert 0 <= report.wrap_rate < 1e-3
    # From one start both have come nearly to the same: each keeps its own rounding error, of less than half a step.
    for a, b in zip(mine, theirs, strict=True):
        assert 0 < (a - b).abs().max() < 0.05


@pytest.mark.parametrize(
    "different", [{"codec": "modulo", "codec_bits": 5}, {"codec": "none", "codec_bits": 4}], ids=["5 bits", "fp32"]
)
def test_partners_with_other_codecs_miss_each_other(members, different):  # noqa: F811
    ours, their, _, _ = step(members, Noloco(codec="modulo"), Noloco(**different))
    for report, other in ((ours, 1), (their, 0)):
        assert report.received == () and "tensors" in report.missed[other] and report.wrap_rate is None
