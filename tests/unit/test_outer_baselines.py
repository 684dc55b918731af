"""DiLoCo, gossip and all-reduce against formulas in NumPy and torch's own optimizers, all replicas in one process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from noloco_mega.config import ConfigError, Noloco, parse
from noloco_mega.outer import base, registry
from noloco_mega.plan import pairing
from tests.unit.test_config import changed
from tests.unit.test_outer_formula import SIZE, MemoryCollective, Ring, printed_step


@pytest.mark.parametrize("chunk", [base.CHUNK_ELEMENTS, 64])
def test_diloco_is_nolocos_step_with_one_group_of_everybody(chunk, monkeypatch):
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", chunk)
    replicas, settings = 3, Noloco(optimizer="diloco", outer_momentum=0.3, outer_lr=0.8, weight_decay=0.01)
    ring = Ring(replicas, settings)
    phi = ring.weights()
    delta = np.zeros_like(phi)
    everybody = tuple(range(replicas))
    for outer_step in range(3):
        ring.walk()
        phi, delta = printed_step(ring.weights(), phi, delta, dict.fromkeys(everybody, everybody), settings)
        for replica, report in enumerate(ring.step(outer_step)):
            others = tuple(other for other in everybody if other != replica)
            assert (report.outer_step, report.asked, report.received) == (outer_step, others, others)
            assert report.sent_bytes == report.received_bytes == 4 * (SIZE + 7)
            assert not report.missed and report.spread is None
        np.testing.assert_allclose(ring.weights(), phi, atol=2e-6)
    for optimizer in ring.optimizers:
        np.testing.assert_allclose(torch.cat(optimizer.delta).numpy(), delta[0], atol=2e-6)
        for tensor, theta in zip(optimizer.phi, ring.masters[0], strict=True):
            assert torch.equal(tensor, theta)
    assert ring.published == 3 * replicas


@pytest.mark.parametrize("nesterov", [False, True])
def test_diloco_is_torchs_sgd_on_the_mean_outer_gradient(nesterov):
    settings = Noloco(optimizer="diloco", outer_momentum=0.9, outer_lr=0.7, nesterov=nesterov)
    ring = Ring(2, settings)
    phi = torch.nn.Parameter(torch.tensor(ring.weights()[0]))
    sgd = torch.optim.SGD([phi], lr=0.7, momentum=0.9, nesterov=nesterov)
    for outer_step in range(4):
        ring.walk()
        phi.grad = phi.detach() - torch.tensor(ring.weights().mean(axis=0))
        sgd.step()
        ring.step(outer_step)
        for weights in ring.weights():
            np.testing.assert_allclose(weights, phi.detach().numpy(), atol=3e-6)


def test_diloco_refuses_to_hand_on_what_is_not_finite():
    ring = Ring(3, Noloco(optimizer="diloco"))
    ring.masters[1][0][5] = float("nan")
    for optimizer in ring.optimizers:
        optimizer.launch(0)
    for optimizer in ring.optimizers:
        with pytest.raises(ValueError, match=r"outer step 1: .* not finite.*earlier checkpoint"):
            optimizer.apply()


@pytest.mark.parametrize(("replicas", "group_size"), [(2, 2), (5, 2), (5, 3)])
def test_gossip_averages_the_weights_of_a_group(replicas, group_size):
    settings = Noloco(optimizer="gossip", group_size=group_size)
    ring = Ring(replicas, settings)
    for outer_step in range(3):
        ring.walk()
        theta = ring.weights()
        groups = pairing.groups(settings.seed, outer_step, range(replicas), group_size)
        reports = ring.step(outer_step)
        for group in groups:
            for i in group:
                np.testing.assert_allclose(ring.weights()[i], theta[list(group)].mean(axis=0), atol=1e-6)
                assert np.array_equal(ring.weights()[i], ring.weights()[group[0]]), "one group, bitwise one mean"
                assert reports[i].received == tuple(j for j in group if j != i)
                ratios = [np.linalg.norm(theta[i] - theta[j]) / np.linalg.norm(theta[i]) for j in reports[i].received]
                assert reports[i].spread == (pytest.approx(np.mean(ratios), rel=1e-4) if ratios else None)
    assert ring.optimizers[0].state_dict() == {}


def test_gossip_keeps_its_weights_where_a_partner_is_missed():
    ring = Ring(2, Noloco(optimizer="gossip"))
    ring.lost.add((1, 0))
    ring.walk()
    theta = ring.weights()
    reports = ring.step(0)
    assert np.array_equal(ring.weights()[0], theta[0]) and reports[0].missed == {1: "lost"}
    np.testing.assert_allclose(ring.weights()[1], theta.mean(axis=0), atol=1e-6)


def test_allreduce_averages_gradients_and_counts_what_it_moved():
    settings = Noloco(optimizer="allreduce", inner_steps=3)
    gradients = [[torch.randn(SIZE), torch.randn(3, 4)] for _ in range(2)]
    ring = Ring(2, settings)
    ring.optimizers.clear()
    published, collective = [], MemoryCollective(gradients)
    for replica in range(2):
        masters = SimpleNamespace(gradients=gradients[replica], publish_gradients=lambda: published.append(1))
        peers = SimpleNamespace(everybody=lambda s, replica=replica: collective.of(replica, 2))
        ring.optimizers.append(registry.build(masters, settings, peers))
    expected = [torch.stack(twins).double().mean(0) for twins in zip(*gradients, strict=True)]
    state = {}
    for step in range(3):
        for optimizer in ring.optimizers:
            optimizer.before_inner_step()
            state[step] = optimizer.state_dict()
    for own in gradients:
        for tensor, mean in zip(own, expected, strict=True):
            np.testing.assert_allclose(tensor.numpy(), mean.numpy(), atol=1e-6)
    assert len(published) == 6 and state == {0: {"inner_steps": 1}, 1: {"inner_steps": 2}, 2: {"inner_steps": 3}}
    for replica, report in enumerate(ring.step(0)):
        assert report.asked == report.received == (1 - replica,)
        assert report.sent_bytes == 3 * 4 * (SIZE + 12)
    # A resumed run reports the steps before its checkpoint, too.
    for optimizer in ring.optimizers:
        optimizer.load_state_dict(state[1])
        optimizer.before_inner_step()
    ring.optimizers[0].launch(1)
    assert ring.optimizers[0].apply().sent_bytes == 3 * 4 * (SIZE + 12)
    with pytest.raises(ValueError, match="another outer optimizer"):
        ring.optimizers[0].load_state_dict({"phi": []})


@pytest.mark.parametrize("optimizer", ["gossip", "local"])
def test_an_optimizer_without_state_refuses_one(optimizer):
    with pytest.raises(ValueError, match=f'"{optimizer}" has no state'):
        Ring(1, Noloco(optimizer=optimizer)).optimizers[0].load_state_dict({"phi": []})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"optimizer": "diloco", "gamma": 0.3}, r"noloco\.gamma = 0\.3 has no effect .* \"diloco\".*its default, 0\.7"),
        ({"optimizer": "diloco", "group_size": 3}, r"noloco\.group_size = 3 has no effect"),
        ({"optimizer": "diloco", "allow_unstable": True}, r"noloco\.allow_unstable = true has no effect"),
        ({"optimizer": "allreduce", "outer_lr": 1.0}, r"noloco\.outer_lr = 1\.0 has no effect"),
        ({"optimizer": "local", "outer_momentum": 0.3}, r"noloco\.outer_momentum = 0\.3 has no effect"),
        ({"optimizer": "gossip", "weight_decay": 0.1}, r"noloco\.weight_decay = 0\.1 has no effect"),
        ({"optimizer": "gossip", "group_size": 9}, r"group_size = 9 is larger than topology\.replicas = 4"),
        ({"optimizer": "diloco", "inner_phase": "seconds"}, r"noloco\.inner_phase = \"seconds\" has no effect"),
        ({"optimizer": "gossip", "nesterov": True}, r"noloco\.nesterov = true has no effect"),
        ({"optimizer": "diloco", "combine": "after"}, r"noloco\.combine = \"after\" has no effect"),
        ({"optimizer": "diloco", "pairing": "tournament"}, r"noloco\.pairing = \"tournament\" has no effect"),
        ({"optimizer": "gossip", "gamma_at_zero_lr": 1.0}, r"noloco\.gamma_at_zero_lr = 1\.0 has no effect"),
    ],
)
def test_settings_that_an_optimizer_would_ignore_are_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(changed(**{f"noloco__{key}": value for key, value in changes.items()}))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "diloco", "outer_momentum": 0.9, "outer_lr": 1.0, "nesterov": True, "weight_decay": 0.1},
        {"optimizer": "gossip", "group_size": 4},
        {"optimizer": "allreduce", "gamma": 0.7, "group_size": 2},
    ],
)
def test_settings_that_an_optimizer_uses_are_taken(changes):
    config = parse(changed(**{f"noloco__{key}": value for key, value in changes.items()}))
    assert config.noloco.optimizer == changes["optimizer"]


@pytest.mark.parametrize("optimizer", ["diloco", "allreduce"])
def test_who_waits_for_everybody_does_not_begin_without_them(optimizer):
    topology = {"replicas": 4, "stages": 2, "start_replicas": 3}
    with pytest.raises(ConfigError, match=r"needs all replicas from the start: leave topology\.start_replicas out"):
        parse(changed(noloco__optimizer=optimizer, topology=topology))
    parse(changed(noloco__optimizer=optimizer, topology={**topology, "start_replicas": 4}))
