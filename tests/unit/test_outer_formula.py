"""NoLoCo's outer step against the paper's two-tensor form in NumPy, and what it does to the mean and the spread.

Replicas are simulated in one process: Ring gives each of them masters, peers, an exchange that swaps in memory and a
collective that adds up there.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from noloco_mega import checks
from noloco_mega.comm.exchange import Missed, Received
from noloco_mega.comm.membership import Peers
from noloco_mega.config import Noloco
from noloco_mega.outer import base, registry
from noloco_mega.plan import pairing, views

SIZE = 1000


class MemoryExchange:
    """The exchange's contract in memory. `lost` holds the (from, to) replicas whose data does not arrive this step."""

    def __init__(self, replica, mail, lost):
        self.replica, self.mail, self.lost = replica, mail, lost
        self.rank = self.sent_bytes = self.received_bytes = 0

    def launch(self, outer_step, send, receive, addresses, deadline_seconds, transfer_cap_seconds):
        self.mail[outer_step, self.replica] = [tensor.detach().clone() for tensor in send]
        self.sent_bytes += sum(tensor.nbytes for tensor in send) * len(receive)
        return SimpleNamespace(
            wait=lambda: {p: self._receive(outer_step, p, buffers) for p, buffers in receive.items()}
        )

    def _receive(self, outer_step, partner, buffers):
        if (partner, self.replica) in self.lost:
            for buffer in buffers:  # a half-filled buffer must never be read
                buffer.fill_(float("nan") if buffer.is_floating_point() else 0x5A)
            return Missed(partner, "lost", 0.0)
        for buffer, sent in zip(buffers, self.mail[outer_step, partner], strict=True):
            buffer.copy_(sent)
        payload_bytes = sum(buffer.nbytes for buffer in buffers)
        self.received_bytes += payload_bytes
        return Received(partner, 0.0, payload_bytes, (self.replica, partner) not in self.lost)


class MemoryCollective:
    """The collective's contract in memory: the first replica to ask takes the mean of what all masters hold then."""

    def __init__(self, masters):
        self.masters, self.means, self.answered = masters, None, 0

    def of(self, replica, replicas):
        """What one replica's optimizer sees of it."""
        return SimpleNamespace(mean_=self.mean_, others=tuple(r for r in range(replicas) if r != replica))

    def mean_(self, tensors):
        if self.means is None:
            self.means = [torch.stack(twins).mean(0) for twins in zip(*self.masters, strict=True)]
        for tensor, mean in zip(tensors, self.means, strict=True):
            tensor.copy_(mean)
        self.answered += 1
        if self.answered == len(self.masters):
            self.means, self.answered = None, 0
        return sum(4 * tensor.numel() for tensor in tensors)


class Ring:
    """N replicas of flat masters, two each unless other `sizes` are given, with outer optimizers and no processes."""

    def __init__(self, replicas, settings, seed=0, sizes=(SIZE, 7)):
        self.random = np.random.default_rng(seed)
        start = [self.random.standard_normal(size) for size in sizes]
        self.mail, self.lost, self.published = {}, set(), 0
        self.masters, self.optimizers, self.exchanges = [], [], []
        everybody = MemoryCollective(self.masters)
        for replica in range(replicas):
            tensors = [torch.tensor(part, dtype=torch.float32) for part in start]
            self.masters.append(tensors)
            self.exchanges.append(MemoryExchange(replica, self.mail, self.lost))
            peers = SimpleNamespace(
                replica=replica,
                addresses=dict.fromkeys(range(replicas), ("", 0)),
                exchange=self.exchanges[-1],
                partners=lambda t, s, replica=replica: pairing.partners(
                    s.seed, t, range(replicas), s.group_size, replica, s.pairing
                ),
                everybody=lambda s, replica=replica: everybody.of(replica, replicas),
                agree=lambda *flags: flags,
                total=lambda values: values,
            )
            masters = SimpleNamespace(tensors=tensors, publish=self._count)
            self.optimizers.append(registry.build(masters, settings, peers))

    def _count(self):
        self.published += 1

    def walk(self, size=0.1):
        """An inner phase: every replica moves its masters by a random amount; returns the moves, [N][2]."""
        moves = []
        for tensors in self.masters:
            moves.append([size * self.random.standard_normal(t.numel()) for t in tensors])
            for tensor, move in zip(tensors, moves[-1], strict=True):
                tensor.add_(torch.tensor(move, dtype=torch.float32))
        return moves

    def step(self, outer_step):
        for optimizer in self.optimizers:
            optimizer.launch(outer_step)
        return [optimizer.apply() for optimizer in self.optimizers]

    def weights(self):
        """float64 [N, P]."""
        return np.stack([torch.cat(tensors).double().numpy() for tensors in self.masters])


def printed_step(theta, phi, delta, groups, settings):
    """The paper's Eq. 1 to 3 with two tensors and the appendix's sign, in float64: all of [N, P]."""
    outer_gradient = theta - phi
    new_phi, new_delta = phi.copy(), delta.copy()
    if settings.combine == "after":
        return adapt_then_combine(theta, phi, delta, groups, settings)
    for i, group in groups.items():
        consensus = phi[i] - np.mean([phi[j] for j in group], axis=0)
        move = settings.outer_lr / len(group) * np.sum([outer_gradient[j] for j in group], axis=0)
        move -= settings.gamma * consensus
        new_delta[i] = settings.outer_momentum * delta[i] + move
        step = settings.outer_momentum * new_delta[i] + move if settings.nesterov else new_delta[i]
        new_phi[i] = phi[i] + step - settings.outer_lr * settings.weight_decay * phi[i]
    return new_phi, new_delta


def adapt_then_combine(theta, phi, delta, groups, settings):
    """The same for combine "after": everybody's own step, and then what the groups make of it."""
    alpha, beta = settings.outer_momentum, settings.outer_lr
    new_delta = alpha * delta + beta * (theta - phi)
    psi = phi - beta * settings.weight_decay * phi
    psi += alpha * new_delta + beta * (theta - phi) if settings.nesterov else new_delta
    means = {i: np.mean([psi[j] for j in group], axis=0) for i, group in groups.items()}
    return np.stack([psi[i] - settings.gamma * (psi[i] - means[i]) for i in range(len(phi))]), new_delta


@pytest.mark.parametrize(
    ("replicas", "settings"),
    [
        (2, Noloco()),
        (3, Noloco(gamma=1.0)),  # one is left over each time
        (5, Noloco(group_size=3, outer_momentum=0.3, outer_lr=0.9, weight_decay=0.01)),
        (4, Noloco(group_size=4, gamma=0.0)),
        (1, Noloco()),
        (5, Noloco(nesterov=True, outer_momentum=0.8, weight_decay=0.01)),
        (5, Noloco(combine="after", gamma=0.9, group_size=3, weight_decay=0.01)),
        (4, Noloco(combine="after", gamma=1.0, nesterov=True, pairing="hypercube")),
        (5, Noloco(pairing="tournament")),
    ],
)
@pytest.mark.parametrize("chunk", [base.CHUNK_ELEMENTS, 64])
def test_three_steps_equal_the_printed_formula(replicas, settings, chunk, monkeypatch):
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", chunk)
    ring = Ring(replicas, settings)
    phi = ring.weights()
    delta = np.zeros_like(phi)
    alone = dataclasses.replace(settings, gamma=0.0)
    for outer_step in range(3):
        ring.walk()
        theta = ring.weights()
        partners = {
            i: pairing.partners(settings.seed, outer_step, range(replicas), settings.group_size, i, settings.pairing)
            for i in range(replicas)
        }
        old_phi, old_delta = phi, delta
        phi, delta = printed_step(theta, phi, delta, {i: (i, *partners[i]) for i in range(replicas)}, settings)
        reports = ring.step(outer_step)
        np.testing.assert_allclose(ring.weights(), phi, atol=2e-6)
        for i, report in enumerate(reports):
            assert report.outer_step == outer_step
            assert report.asked == report.received == partners[i] and not report.missed
            assert report.received_bytes == report.sent_bytes == 4 * (SIZE + 7) * len(partners[i])
            c = settings.outer_lr * (theta - old_phi) + settings.gamma * old_phi
            if settings.combine == "after":
                c, _ = adapt_then_combine(theta, old_phi, old_delta, dict.fromkeys(range(replicas), (0,)), alone)
            ratios = [np.linalg.norm(c[i] - c[j]) / np.linalg.norm(c[i]) for j in partners[i]]
            assert report.spread == (pytest.approx(np.mean(ratios), rel=1e-4) if ratios else None)
    assert ring.published == 3 * replicas
    assert [d.shape for d in ring.optimizers[0].delta] == [(SIZE,), (7,)]
    np.testing.assert_allclose(torch.cat(ring.optimizers[0].delta).numpy(), delta[0], atol=2e-6)


def test_all_members_of_a_group_add_the_bitwise_same_mean():
    settings = Noloco(group_size=3, outer_momentum=0.0, gamma=0.7)
    ring = Ring(3, settings)
    ring.walk()
    ring.step(0)
    ring.walk()
    before = [optimizer.phi[0].clone() for optimizer in ring.optimizers]
    assert all(torch.equal(before[0], other) for other in before), "equal starts and one mean: φ is equal after a step"
    ring.step(1)
    for optimizer in ring.optimizers[1:]:
        assert torch.equal(optimizer.phi[0], ring.optimizers[0].phi[0])


@pytest.mark.parametrize("combine", ["step", "after"])
def test_a_missed_partner_leaves_a_group_of_one(combine):
    settings = Noloco(combine=combine)
    ring = Ring(2, settings)
    ring.lost |= {(0, 1), (1, 0)}
    phi = ring.weights()
    delta = np.zeros_like(phi)
    for outer_step in range(3):
        ring.walk()
        phi, delta = printed_step(ring.weights(), phi, delta, {0: (0,), 1: (1,)}, settings)
        for replica, report in enumerate(ring.step(outer_step)):
            assert report.asked == (1 - replica,) and report.received == ()
            assert report.missed == {1 - replica: "lost"} and report.spread is None
        np.testing.assert_allclose(ring.weights(), phi, atol=2e-6)


def test_a_partner_without_an_address_is_missed():
    ring = Ring(2, Noloco())
    ring.optimizers[0]._peers.addresses.clear()
    ring.walk()
    ring.optimizers[0].launch(0)
    report = ring.optimizers[0].apply()
    assert report.asked == (1,) and report.received == () and "address" in report.missed[1]


def test_a_partner_that_another_rank_missed_is_left_out():
    ring = Ring(2, Noloco())
    phi = ring.weights()
    ring.walk()
    expected, _ = printed_step(ring.weights(), phi, np.zeros_like(phi), {0: (0,), 1: (1,)}, Noloco())
    ring.optimizers[0]._peers.agree = lambda *flags: (0,) * len(flags)
    reports = ring.step(0)
    assert reports[0].received == () and "another rank" in reports[0].missed[1]
    np.testing.assert_allclose(ring.weights()[0], expected[0], atol=2e-6)


@pytest.mark.parametrize("settings", [Noloco(), Noloco(codec="modulo")], ids=["fp32", "modulo"])
def test_a_partner_whose_weights_are_not_finite_is_left_out(settings):
    ring = Ring(2, settings)
    phi = ring.weights()
    ring.walk()
    expected, _ = printed_step(ring.weights(), phi, np.zeros_like(phi), {0: (0,), 1: (1,)}, settings)
    ring.masters[1][0][3] = float("nan")
    reports = ring.step(0)
    assert reports[0].received == () and "not finite" in reports[0].missed[1]
    np.testing.assert_allclose(ring.weights()[0], expected[0], atol=2e-6)


def test_look_ahead_is_torchs_sgd_on_outer_gradients_and_the_pull():
    """Of every replica by itself: with the gradient −mean Δ_j + γ/β·(φ_i − mean φ_j) over its group."""
    settings = Noloco(nesterov=True, outer_momentum=0.6, outer_lr=0.5, gamma=0.8)
    ring = Ring(4, settings)
    phis = [torch.tensor(row, requires_grad=True) for row in ring.weights()]
    sgds = [torch.optim.SGD([phi], lr=0.5, momentum=0.6, nesterov=True) for phi in phis]
    for outer_step in range(4):
        moves = [torch.tensor(np.concatenate(move)) for move in ring.walk()]
        for group in pairing.groups(settings.seed, outer_step, range(4), 2):
            means = [sum(t[j].detach() for j in group) / 2 for t in (moves, phis)]
            for i in group:
                phis[i].grad = -means[0] + settings.gamma / settings.outer_lr * (phis[i].detach() - means[1])
        for sgd in sgds:
            sgd.step()
        ring.step(outer_step)
        np.testing.assert_allclose(ring.weights(), [phi.detach().numpy() for phi in phis], atol=2e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", [{}, {"combine": "after", "gamma": 1.0}])
def test_one_group_of_everybody_is_diloco(nesterov, form):
    settings = {"nesterov": nesterov, "outer_momentum": 0.7, "weight_decay": 0.02}
    noloco = Ring(3, Noloco(group_size=3, **form, **settings))
    diloco = Ring(3, Noloco(optimizer="diloco", **settings))
    for outer_step in range(4):
        for ring in (noloco, diloco):
            ring.walk()
            ring.step(outer_step)
        np.testing.assert_allclose(noloco.weights(), diloco.weights(), atol=2e-6)


@pytest.mark.parametrize(
    ("replicas", "group_size", "combine"), [(8, 2, "step"), (7, 3, "step"), (8, 2, "after"), (7, 3, "after")]
)
def test_symmetric_success_keeps_the_mean_on_dilocos_trajectory(replicas, group_size, combine):
    """Whoever pairs with whom, the replicas' mean takes DiLoCo's step with the mean of all outer gradients."""
    settings = Noloco(group_size=group_size, combine=combine)
    ring = Ring(replicas, settings)
    phi = ring.weights()[0]
    delta = np.zeros_like(phi)
    for outer_step in range(20):
        mean_move = np.mean([np.concatenate(moves) for moves in ring.walk(0.01)], axis=0)
        delta = settings.outer_momentum * delta + settings.outer_lr * mean_move
        phi = phi + delta
        failing = outer_step % 3
        ring.lost.clear()
        ring.lost |= {(i, j) for i in range(replicas) for j in range(replicas) if {i, j} & {failing}}
        ring.step(outer_step)
        np.testing.assert_allclose(ring.weights().mean(axis=0), phi, atol=1e-6)


def test_one_sided_misses_stay_bounded():
    """A fifth of all deliveries fail, each direction by itself: the spread stays near the one without failures, and
    the mean leaves DiLoCo's trajectory as a random walk of the predicted size, no faster."""
    replicas, steps, settings = 8, 200, Noloco()
    spreads, one_sided = {}, 0
    for failure_rate in (0.0, 0.2):
        ring, failures = Ring(replicas, settings), np.random.default_rng(1)
        phi = ring.weights()[0]
        delta, spread = np.zeros_like(phi), []
        for outer_step in range(steps):
            mean_move = np.mean([np.concatenate(moves) for moves in ring.walk(0.01)], axis=0)
            delta = settings.outer_momentum * delta + settings.outer_lr * mean_move
            phi = phi + delta
            ring.lost.clear()
            ring.lost |= {(i, j) for i in range(replicas) for j in range(replicas) if failures.random() < failure_rate}
            reports = ring.step(outer_step)
            one_sided += sum(len(report.unacknowledged) for report in reports)
            spread.append(ring.weights().std(axis=0).mean())
        spreads[failure_rate] = np.mean(spread[steps // 2 :])
        assert max(spread[steps // 2 :]) < 1.5 * max(spread[: steps // 2]), "the spread grows"
        drift = np.sqrt(np.mean((ring.weights().mean(axis=0) - phi) ** 2))
    assert one_sided > 0.1 * steps * replicas / 2, "too few one-sided misses to show anything"
    assert spreads[0.2] < 2 * spreads[0.0]
    # Who steps with j unseen by j moves the mean by (γ·(φ_j − φ_i) + β·(Δ_j − Δ_i)) / 2N, which momentum carries on to
    # 1/(1 − α) of that; the directions are random, so n such events move it √n times as far.
    distance = np.sqrt(2 * (settings.gamma * spreads[0.2]) ** 2 + 2 * (settings.outer_lr * 0.01) ** 2)
    expected = np.sqrt(one_sided) * distance / (2 * replicas) / (1 - settings.outer_momentum)
    assert 0.7 * expected < drift < 1.5 * expected


def test_partners_follow_the_view_in_which_the_inner_phase_began():
    log = [views.View(0, (0, 1, 2)), views.View(6, (0, 2)), views.View(10, (0, 1, 2))]
    settings = Noloco(inner_steps=3, group_size=3)
    partners = [
        [
            Peers(replica=r, view_log=log, addresses={}, exchange=None, group=None, device=None).partners(t, settings)
            for r in range(3)
        ]
        for t in range(5)
    ]
    everybody, without_1 = [(1, 2), (0, 2), (0, 1)], [(2,), (), (0,)]
    assert partners == [everybody, everybody, without_1, without_1, everybody]


@pytest.mark.parametrize("scheme", ["hypercube", "tournament"])
def test_partners_follow_the_scheme_of_pairing(scheme):
    settings, log = Noloco(pairing=scheme), [views.View(0, (0, 1, 2, 3))]
    peers = [Peers(replica=r, view_log=log, addresses={}, exchange=None, group=None, device=None) for r in range(4)]
    for outer_step in range(6):
        groups = pairing.groups(settings.seed, outer_step, range(4), 2, scheme)
        assert all(peers[a].partners(outer_step, settings) == (b,) for a, b in groups)


@pytest.mark.parametrize(
    "settings",
    [Noloco(), Noloco(codec="modulo"), Noloco(codec="modulo", optimizer="gossip")],
    ids=["fp32", "modulo", "gossip"],
)
def test_state_survives_a_round_trip_and_refuses_another_layout(settings):
    first, second = Ring(2, settings, seed=3), Ring(2, settings, seed=3)
    first.walk()
    first.step(0)
    for source, target, own, twin in zip(
        first.optimizers, second.optimizers, first.masters, second.masters, strict=True
    ):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        for a, b in zip(own, twin, strict=True):
            b.copy_(a)
    second.random = np.random.default_rng(9)
    first.random = np.random.default_rng(9)
    for ring in (first, second):
        ring.walk()
        ring.step(1)
    assert np.array_equal(first.weights(), second.weights())
    with pytest.raises(ValueError, match="topology that saved it"):
        first.optimizers[0].load_state_dict({"phi": [torch.zeros(3)], "delta": [torch.zeros(3)]})


def test_local_counts_and_changes_nothing():
    ring = Ring(2, Noloco(optimizer="local"))
    ring.walk()
    before = ring.weights()
    reports = ring.step(0)
    assert np.array_equal(ring.weights(), before) and ring.mail == {} and ring.published == 0
    assert reports[0].outer_step == 0 and reports[0].asked == () and reports[0].spread is None
    assert ring.optimizers[0].state_dict() == {}


def test_due_after_every_inner_steps_th_step():
    optimizer = Ring(1, Noloco(inner_steps=3)).optimizers[0]
    assert [step for step in range(10) if optimizer.due(step)] == [3, 6, 9]


def test_the_registry_knows_what_the_checks_allow():
    assert sorted(registry.OUTER_OPTIMIZERS) == sorted(checks.OUTER_OPTIMIZERS)
    with pytest.raises(ValueError, match="known: allreduce, diloco, gossip, local, noloco"):
        registry.build(None, Noloco(optimizer="best"), None)
