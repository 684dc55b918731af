"""The outer optimizers on stacked weights against NumPy and torch.optim."""

import numpy as np
import pytest
import torch

from noloco_mega.config import Noloco
from noloco_mega.lab import outer
from noloco_mega.outer import registry
from noloco_mega.plan import pairing
from tests.unit.test_outer_formula import printed_step

REPLICAS, SIZE, STEPS = 7, 50, 6


def walk(optimizer, settings, seed=0):
    """Outer steps with random inner phases between them: the phases [STEPS][N, P], and θ after each outer step."""
    random = np.random.default_rng(seed)
    theta = torch.tensor(random.standard_normal(SIZE), dtype=torch.float32).repeat(REPLICAS, 1)
    start, moves, after, exchanges = theta.double().numpy().copy(), [], [], []
    stepper = outer.OPTIMIZERS[optimizer](theta, settings)
    for outer_step in range(STEPS):
        move = random.standard_normal((REPLICAS, SIZE)).astype(np.float32)
        theta += torch.tensor(move)
        exchanges.append(stepper.step(outer_step))
        moves.append(move.astype(float))
        after.append(theta.double().numpy().copy())
    return start, moves, after, exchanges


@pytest.mark.parametrize("group_size", [2, 3])
def test_noloco_is_the_papers_formula(group_size):
    settings = Noloco(outer_momentum=0.4, outer_lr=0.6, gamma=0.8, group_size=group_size, weight_decay=0.1)
    phi, moves, after, exchanges = walk("noloco", settings)
    delta = np.zeros_like(phi)
    for step, move in enumerate(moves):
        new = np.empty_like(phi)
        for group in pairing.groups(settings.seed, step, range(REPLICAS), group_size):
            members = list(group)
            for i in members:
                pull = phi[i] - phi[members].mean(0)
                delta[i] = 0.4 * delta[i] + 0.6 * move[members].mean(0) - 0.8 * pull
                new[i] = (1 - 0.6 * 0.1) * phi[i] + delta[i]
                others = tuple(j for j in members if j != i)
                assert exchanges[step].partners[i] == others
                assert exchanges[step].sent_bytes[i] == 4 * SIZE * len(others)
        phi = new
        np.testing.assert_allclose(after[step], phi, atol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        Noloco(nesterov=True, outer_momentum=0.8),
        Noloco(combine="after", gamma=0.9, weight_decay=0.1),
        Noloco(combine="after", nesterov=True, pairing="tournament"),
        Noloco(pairing="hypercube"),
    ],
    ids=str,
)
def test_the_options_of_noloco_are_their_formulas(settings):
    phi, moves, after, exchanges = walk("noloco", settings)
    delta = np.zeros_like(phi)
    for step, move in enumerate(moves):
        groups = pairing.groups(settings.seed, step, range(REPLICAS), 2, settings.pairing)
        of = {i: group for group in groups for i in group}
        phi, delta = printed_step(phi + move, phi, delta, of, settings)
        np.testing.assert_allclose(after[step], phi, atol=2e-5)
        assert exchanges[step].partners == [tuple(j for j in of[i] if j != i) for i in range(REPLICAS)]


def test_diloco_is_heavy_ball_on_the_mean():
    settings = Noloco(outer_momentum=0.3, outer_lr=0.7)
    phi, moves, after, exchanges = walk("diloco", settings)
    delta = np.zeros_like(phi)
    for step, move in enumerate(moves):
        delta = 0.3 * delta + 0.7 * move.mean(0)
        phi = phi + delta
        np.testing.assert_allclose(after[step], phi, atol=1e-5)
        assert exchanges[step].sent_bytes == [round(2 * 6 / 7 * 4 * SIZE)] * REPLICAS


def test_diloco_nesterov_is_torchs_sgd():
    settings = Noloco(outer_momentum=0.9, outer_lr=0.7, nesterov=True)
    start, moves, after, _ = walk("diloco", settings)
    phi = torch.tensor(start[0], requires_grad=True)
    sgd = torch.optim.SGD([phi], lr=0.7, momentum=0.9, nesterov=True)
    for move, theta in zip(moves, after, strict=True):
        phi.grad = -torch.tensor(move.mean(0))
        sgd.step()
        np.testing.assert_allclose(theta, phi.detach().numpy()[None].repeat(REPLICAS, 0), atol=1e-5)


def test_gossip_averages_groups_and_local_nothing():
    settings = Noloco()
    for optimizer in ("gossip", "local"):
        theta, moves, after, exchanges = walk(optimizer, settings)
        for step, move in enumerate(moves):
            theta = theta + move
            if optimizer == "gossip":
                for group in pairing.groups(settings.seed, step, range(REPLICAS), 2):
                    theta[list(group)] = theta[list(group)].mean(0)
            np.testing.assert_allclose(after[step], theta, atol=1e-5)
        assert (sum(exchanges[0].sent_bytes) > 0) == (optimizer == "gossip")


def test_allreduce_averages_gradients():
    gradients = torch.arange(6.0).reshape(3, 2)
    sent = outer.OPTIMIZERS["allreduce"](torch.zeros(3, 2), Noloco()).average_gradients(gradients)
    assert gradients.tolist() == [[2.0, 3.0]] * 3
    assert sent == [round(2 * 2 / 3 * 8)] * 3


def test_every_outer_optimizer_is_simulated():
    assert outer.OPTIMIZERS.keys() == registry.OUTER_OPTIMIZERS.keys()
