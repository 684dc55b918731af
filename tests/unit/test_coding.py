"""Outer steps whose tensors travel in a few bits: the mean of the replicas, what rounding adds, what ranges follow."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from noloco_mega import costs
from noloco_mega.comm import codec
from noloco_mega.config import Noloco
from noloco_mega.lab import outer
from noloco_mega.outer import coding, registry
from noloco_mega.plan import keys, stability
from tests.unit.test_outer_formula import Ring

SIZES = (6400, 70)


def coded(**changes):
    return Noloco(codec="modulo", **changes)


@pytest.mark.parametrize(
    "replicas, settings",
    [
        (8, coded()),
        (7, coded(group_size=3, codec_bits=5, weight_decay=0.01)),
        (4, coded(codec_bits=3, codec_range=7.0, outer_momentum=0.3)),
    ],
)
def test_the_mean_of_the_replicas_takes_the_uncompressed_step(replicas, settings, monkeypatch):
    monkeypatch.setattr(coding, "PIECE_ELEMENTS", 1 << 12)  # two pieces and a rest
    ring = Ring(replicas, settings, sizes=SIZES)
    phi = ring.weights()[0]
    delta = np.zeros_like(phi)
    for outer_step in range(8):
        mean_move = np.mean([np.concatenate(moves) for moves in ring.walk(0.01)], axis=0)
        delta = settings.outer_momentum * delta + settings.outer_lr * mean_move
        phi = phi + delta - settings.outer_lr * settings.weight_decay * phi
        reports = ring.step(outer_step)
        sent = sum(costs.message_bytes(settings, size) for size in SIZES)
        for report in reports:
            assert report.sent_bytes == report.received_bytes == sent * len(report.received)
            assert report.received == report.asked
            assert (report.wrap_rate is None) == (not report.received)
            assert (report.wrap_rate or 0.0) < 3e-4
        # A block in which two weights wrap at once is left out by the one that reads it.
        assert np.quantile(np.abs(ring.weights().mean(axis=0) - phi), 0.999) < 3e-6


def test_a_replica_takes_its_partners_code_with_its_own_rounding_error():
    """x̂_j + (x_i − x̂_i), from the codes themselves; and the spread, without what rounding adds to it."""
    settings = coded(gamma=0.9, seed=4)
    ring = Ring(2, settings, sizes=(6400,))
    for outer_step in range(2):  # in the second one φ differ
        ring.walk()
        start = [optimizer.phi[0].clone() for optimizer in ring.optimizers]
        theta = [tensors[0].clone() for tensors in ring.masters]
        momentum = [optimizer.delta[0].clone() for optimizer in ring.optimizers]
        reports = ring.step(outer_step)
    x = [0.7 * theta[i] + (0.9 - 0.7) * start[i] for i in range(2)]
    meant = []
    for i in range(2):
        heads, packed = ring.mail[1, i]
        u = codec.dither(keys.key(4, "dither", 1, i, 0, 0, 0), 6400, torch.device("cpu"))
        meant.append(codec.decode(heads, packed, x[i], u, 4).x)
        steps = codec.steps_of(heads).repeat_interleave(128)
        assert ((meant[i] - x[i]).abs() <= steps / 2 * 1.001).all()
    for i in range(2):
        mean = x[i] + (meant[0] + meant[1]) / 2 - meant[i]
        expected = start[i] + 0.5 * momentum[i] + mean - 0.9 * start[i]
        torch.testing.assert_close(ring.masters[i][0], expected, rtol=0, atol=3e-6)
        true_spread = float((x[0] - x[1]).norm() / x[i].norm())
        assert reports[i].spread == pytest.approx(true_spread, rel=0.02)
        assert float((meant[0] - meant[1]).norm() / x[i].norm()) > 1.03 * true_spread, "rounding adds nothing?"


@pytest.mark.parametrize("optimizer", ["noloco", "gossip"])
@pytest.mark.parametrize("group_size", [2, 3])
def test_the_simulator_takes_a_runs_steps(optimizer, group_size):
    settings = coded(optimizer=optimizer, group_size=group_size)
    ring = Ring(5, settings, sizes=(1000,))
    theta = torch.stack([tensors[0] for tensors in ring.masters]).clone()
    simulated = outer.OPTIMIZERS[optimizer](theta, settings)
    for outer_step in range(4):
        moves = ring.walk()
        theta += torch.stack([torch.tensor(move[0], dtype=torch.float32) for move in moves])
        reports, exchanged = ring.step(outer_step), simulated.step(outer_step)
        assert torch.equal(theta, torch.stack([tensors[0] for tensors in ring.masters]))
        for replica, report in enumerate(reports):
            assert exchanged.sent_bytes[replica] == exchanged.payload_bytes[replica] == report.sent_bytes
            assert exchanged.wrap_rate[replica] == report.wrap_rate
            alone = report.spread is None
            assert (exchanged.spread[replica] is None) == alone == (not report.received)
            assert alone or exchanged.spread[replica] == pytest.approx(report.spread, rel=1e-4)


@pytest.mark.parametrize("optimizer, alpha, gamma", [("gossip", 0.0, 1.0), ("noloco", 0.5, 0.7)])
@pytest.mark.parametrize("group_size, bits", [(2, 4), (4, 2)])
def test_rounding_adds_to_the_spread_what_the_stability_check_expects(optimizer, alpha, gamma, group_size, bits):
    """One step of replicas that differ by independent normal numbers, all of which the codec knows: δ of the deviations
    has the variance γ²·k·(1 + ν)·a afterwards, of which gossip's own are φ + δ."""
    replicas, weights, half_range = 8, 64_000, 6.0
    settings = coded(optimizer=optimizer, outer_momentum=alpha, gamma=gamma, group_size=group_size, codec_bits=bits)
    noise = stability.rounding_noise(bits, half_range)
    step = 2.0**-6
    scale = step * 2**bits / (2 * half_range) / math.sqrt(2) / gamma  # the rms of a pair's difference is on the grid
    generator = torch.Generator().manual_seed(3)
    theta = torch.zeros(replicas, weights)
    simulated = outer.OPTIMIZERS[optimizer](theta, settings)
    theta.copy_(scale * torch.randn(replicas, weights, generator=generator))
    simulated._phi.copy_(theta)
    for each in simulated._swap._codings:
        each.estimate.squares[0].fill_(2 * (gamma * scale) ** 2)
        each.estimate.numbers[0] = 1.0
    before = theta.clone()
    exchanged = simulated.step(0)
    deviation = theta - theta.mean(0)
    moved = deviation - (before - before.mean(0))
    a = (before - before.mean(0)).double().square().mean()
    k = stability.consensus_fraction(group_size, replicas)
    assert moved.double().square().mean() / a == pytest.approx(gamma**2 * k * (1 + noise), rel=0.02)
    assert torch.allclose(theta.mean(0), before.mean(0), atol=1e-5) and max(exchanged.wrap_rate) < 1e-5
    if optimizer == "gossip":
        radius = stability.spectral_radius(0.0, 1.0, group_size, replicas, noise=noise)
        assert deviation.double().square().mean() / a == pytest.approx(radius, rel=0.03)


def shown(squares, least=0.0):
    squares = torch.tensor(squares)
    return coding.Shown(square=squares, least=torch.full_like(squares, least))


def estimate_of(squares=(4.0,), movement=1.0):
    estimate = coding.Estimate([torch.zeros(128 * len(squares))])
    estimate.learn([torch.full((len(squares),), 99.0)], [shown(squares)], movement)
    return estimate


def expected_of(estimate, movement, moved=None, blocks=1):
    (found,) = estimate.expected([torch.full((blocks,), movement if moved is None else moved)], movement)
    return found.tolist()


def test_what_is_expected():
    fresh = coding.Estimate([torch.zeros(128)])
    assert expected_of(fresh, 3.0) == [4 * 3.0], "twice the own movement"
    assert expected_of(estimate_of(), 1.0) == [4.0], "what the last exchange has shown"
    assert expected_of(estimate_of(), 2.0) == [8.0], "with the movement"
    assert expected_of(estimate_of(), 0.01) == [4.0], "a phase that was cut short"
    assert expected_of(estimate_of(), 1.0, moved=9.0) == [9.0], "a block that has moved more than it differed"
    lonely = estimate_of()
    lonely.alone()
    lonely.alone()
    assert expected_of(lonely, 1.0) == [36.0], "three phases since the last partner"
    assert expected_of(estimate_of([32.0, 0.0]), 1.0, moved=0.0, blocks=2) == [32.0, 0.25], "1/8 of the rms of all"


def test_what_is_learned():
    estimate = estimate_of()
    estimate.learn([torch.tensor([4.0])], [shown([1.0])], 1.0)
    assert expected_of(estimate, 1.0) == [2.5]
    estimate.learn([torch.tensor([2.5])], [shown([1.5], least=10.0)], 1.0)
    assert expected_of(estimate, 1.0) == [10.0], "one weight needs more"
    estimate.forget()
    assert expected_of(estimate, 1.0) == [4.0]


def test_a_lone_weight_that_differs_much_is_covered_and_then_brought_home():
    """Whichever of the ranges is too narrow for it; and nobody's range grows beyond what is there."""
    own = torch.zeros(128)
    for first, second in ((1e-6, 1e-6), (1e-2, 1e-6), (1e-6, 1e-2)):
        pair = [own + 1e-3, own - 1e-3]
        pair[0][17] = 0.5
        codings = [coding.build(coded(), [x], replica, [x - 1e-4], 1.0) for replica, x in enumerate(pair)]
        for each, square in zip(codings, (first, second), strict=True):
            each.estimate.squares[0].fill_(square)
            each.estimate.numbers[0] = 1e-8
        for outer_step in range(12):
            messages = [each.write(outer_step, 0) for each in codings]
            for replica, each in enumerate(codings):
                other = 1 - replica
                read = each.read(outer_step, 0, {other: messages[other]})[other].tensors[0]
                each.learn([other])
        assert abs(float(read[17]) - 0.5) < 0.1
        for each in codings:
            assert 0.5 < 6 * math.sqrt(float(each.estimate.squares[0])) < 1.5


def test_a_range_that_is_too_narrow_does_no_harm_and_is_widened():
    """Blocks that differ a hundred times as much as was expected: they are taken for the own, and a few exchanges later
    they are read."""
    random = torch.Generator().manual_seed(0)
    rest = torch.randn(6400, generator=random)
    x = [rest + torch.randn(6400, generator=random) for _ in range(2)]
    codings = [coding.build(coded(), [own], replica, [rest], 1.0) for replica, own in enumerate(x)]
    for each in codings:
        each.estimate.squares[0].fill_(2e-4)
        each.estimate.numbers[0] = 1.0
    errors, rates = [], []
    for outer_step in range(5):
        for own, each in zip(x, codings, strict=True):
            each._rest = [own - 0.01]  # hardly a movement in the last phase
        messages = [each.write(outer_step, 0) for each in codings]
        for replica, each in enumerate(codings):
            other = 1 - replica
            found = each.read(outer_step, 0, {other: messages[other]})[other]
            errors.append(float((found.tensors[0] - x[other]).square().mean().sqrt()))
            rates.append(codec.wrap_rate(found.wrapped_blocks, found.blocks))
            each.learn([other])
    difference = float((x[0] - x[1]).square().mean().sqrt())
    assert max(errors) < 1.001 * difference and rates[0] > 0.02
    assert max(errors[-2:]) < 0.4 * difference and max(rates[-2:]) < 1e-4


def test_alone_and_back_again():
    """Lost exchanges leave the partners alone for three steps; the one after that is read well."""
    settings = coded()
    ring = Ring(2, settings, sizes=(6400,))
    for outer_step in range(8):
        ring.walk(0.01)
        ring.lost.clear()
        ring.lost |= {(0, 1), (1, 0)} if outer_step in (3, 4, 5) else set()
        reports = ring.step(outer_step)
        assert all((report.wrap_rate is None) == (outer_step in (3, 4, 5)) for report in reports)
        assert all((report.wrap_rate or 0.0) < 1e-4 for report in reports), outer_step
    assert ring.optimizers[0].state_dict()["pair_numbers"][1] == 0


def test_without_the_blocks_a_state_begins_anew():
    """What a joining replica gets, and one that is resumed with another topology."""
    first, second = Ring(2, coded()), Ring(2, coded())
    first.walk()
    first.step(0)
    state = first.optimizers[0].state_dict()
    second.optimizers[0].load_state_dict({key: value for key, value in state.items() if key != "pair_squares"})
    assert second.optimizers[0].state_dict()["pair_numbers"] == [0.0, 0.0]
    plain = Ring(2, Noloco()).optimizers[0]
    plain.load_state_dict(state)
    assert set(plain.state_dict()) == {"phi", "delta"}
    second.optimizers[0].load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="was saved without"):
        Ring(2, coded(optimizer="gossip")).optimizers[0].load_state_dict({})
    with pytest.raises(ValueError, match="has no state"):
        Ring(2, Noloco(optimizer="gossip")).optimizers[0].load_state_dict({"phi": []})


def test_only_the_simulator_has_diloco_in_few_bits():
    peers = SimpleNamespace(everybody=lambda settings: pytest.fail("it got so far"))
    with pytest.raises(ValueError, match="only simulated"):
        registry.build(SimpleNamespace(tensors=[]), Noloco(optimizer="diloco", codec="absmax"), peers)
    with pytest.raises(ValueError, match="none of a small group"):
        coding.build(Noloco(codec="absmax"), [torch.zeros(3)], 0, [torch.zeros(3)], 1.0)


def test_simulated_diloco_in_few_bits():
    """Rounded without bias, no error is lost, and the bytes are those of the codes."""
    settings = Noloco(optimizer="diloco", codec="absmax", outer_momentum=0.0, outer_lr=1.0)
    replicas, size = 4, 640
    random = np.random.default_rng(0)
    theta = torch.zeros(replicas, size)
    stepper = outer.OPTIMIZERS["diloco"](theta, settings)
    total = np.zeros(size)
    for outer_step in range(30):
        moves = random.standard_normal((replicas, size)).astype(np.float32)
        theta += torch.tensor(moves)
        exchanged = stepper.step(outer_step)
        total += moves.mean(0)
        # What has been applied and what is still left over is all that was to be applied.
        np.testing.assert_allclose(theta[0].numpy() + stepper.state()["left"].mean(0).numpy(), total, atol=1e-4)
        message = 5 * (128 * 4 // 8 + 2)
        assert exchanged.payload_bytes == [message] * 4 and exchanged.sent_bytes == [round(1.5 * message)] * 4
    values = torch.tensor(random.standard_normal(128), dtype=torch.float32).repeat(4000)
    rounded = outer.absmax_rounded(values, codec.dither(1, len(values), values.device), 4).view(4000, 128)
    step = 2 * float(values.abs().max()) / 15
    assert (rounded - values.view(4000, 128)).abs().max() < 1.001 * step
    places = np.unique(np.round(rounded.numpy() / step * 2, 3))
    assert set(places) <= set(range(-15, 16, 2)) and len(places) > 8
    assert (rounded.mean(0) - values[:128]).abs().max() < 4.5 * step / 2 / math.sqrt(4000) + step / 512
