"""A whole distributed run against one process that computes it from the formulas in float64.

Plain torch layers on unsharded weights (tests/dist/reference.py), torch's AdamW, and the outer step as the paper
writes it; from the package come only θ0, the plan and the data.
"""

import numpy as np
import torch

from noloco_mega import config as configs
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import open_loader
from noloco_mega.model import parameters
from noloco_mega.plan import pairing, views
from noloco_mega.plan.routing import RandomRoutes
from tests.dist import reference
from tests.e2e.runs import run, values


def initial_weights(config, shapes):
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.empty(shape)
        where = parameters.slices_of(name, shape, 0, 1)
        parameters.fill(weights[name], where, config.run.seed, config.model.init_method_std, config.model.num_layers)
    return weights


def expected_run(config, shapes):
    """Losses [N, steps] and the final weights of each replica."""
    replicas, settings = config.topology.replicas, config.noloco
    loader = open_loader(config, views.initial(replicas))
    routes = RandomRoutes(settings.seed, range(replicas))
    theta = [{n: w.double() for n, w in initial_weights(config, shapes).items()} for _ in range(replicas)]
    phi = [{n: w.clone() for n, w in weights.items()} for weights in theta]
    delta = [{n: torch.zeros_like(w) for n, w in weights.items()} for weights in theta]
    adam = config.deepspeed["optimizer"]["params"]
    inner = [
        torch.optim.AdamW(list(weights.values()), lr=adam["lr"], betas=adam["betas"], weight_decay=0.0)
        for weights in theta
    ]
    losses = []
    for step in range(config.run.steps):
        leaves = [{name: weight.detach().clone() for name, weight in weights.items()} for weights in theta]
        result = reference.run(
            leaves, config.model, config.topology.stages, routes, step, list(range(config.microbatches)), loader.train
        )
        losses.append([np.mean(of_replica) for of_replica in result.losses])
        if settings.optimizer == "allreduce":
            means = {name: sum(own[name] for own in result.gradients) / replicas for name in shapes}
            result.gradients[:] = [means] * replicas
        for weights, gradients, optimizer in zip(theta, result.gradients, inner, strict=True):
            norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
            clip = min(1.0, config.deepspeed["gradient_clipping"] / (float(norm) + 1e-6))
            for name, weight in weights.items():
                weight.grad = gradients[name] * clip
            optimizer.step()
        if (step + 1) % settings.inner_steps == 0:
            outer_step = (step + 1) // settings.inner_steps - 1
            groups = pairing.groups(settings.seed, outer_step, range(replicas), settings.group_size)
            for group in [range(replicas)] if settings.optimizer == "diloco" else groups:
                OUTER_STEPS[settings.optimizer](group, theta, phi, delta, settings)
    return np.array(losses).T, theta


def take_outer_step(group, theta, phi, delta, settings):
    """δ ← αδ + (β/n)ΣΔ_j − γ(φ − mean φ_j); φ ← φ + δ; θ ← φ (arXiv 2506.10911, Eq. 1-3, with the sign of Eq. 32)."""
    n = len(group)
    for name in theta[group[0]]:
        progress = sum(theta[j][name] - phi[j][name] for j in group)
        mean = sum(phi[j][name] for j in group) / n
        for i in group:
            delta[i][name] = (
                settings.outer_momentum * delta[i][name]
                + settings.outer_lr / n * progress
                - settings.gamma * (phi[i][name] - mean)
            )
        for i in group:
            phi[i][name] = phi[i][name] + delta[i][name]
            theta[i][name].copy_(phi[i][name])


def take_nesterov_step(group, theta, phi, delta, settings):
    """torch.optim.SGD's formulas with nesterov=True, on the gradient −mean Δ; its momentum buffer is kept in δ."""
    for name in theta[group[0]]:
        gradient = -sum(theta[j][name] - phi[j][name] for j in group) / len(group)
        for i in group:
            delta[i][name] = settings.outer_momentum * delta[i][name] + gradient
            look_ahead = gradient + settings.outer_momentum * delta[i][name]
            phi[i][name] = phi[i][name] - settings.outer_lr * look_ahead
            theta[i][name].copy_(phi[i][name])


def average_weights(group, theta, phi, delta, settings):
    for name in theta[group[0]]:
        mean = sum(theta[j][name] for j in group) / len(group)
        for i in group:
            theta[i][name].copy_(mean)


def change_nothing(group, theta, phi, delta, settings):
    pass


OUTER_STEPS = {
    "noloco": take_outer_step,
    "diloco": take_nesterov_step,
    "gossip": average_weights,
    "allreduce": change_nothing,
}


def compare(config, rows):
    """A finished run against the formulas."""
    replicas = config.topology.replicas
    saved = [SavedReplica(config.replica_folder(replica) / "weights") for replica in range(replicas)]
    shapes = {name: tuple(saved[0].tensor(name).shape) for name in saved[0].names}
    losses, theta = expected_run(config, shapes)
    for replica in range(replicas):
        np.testing.assert_allclose(values(rows, "loss", replica), losses[replica], rtol=2e-5)
        for name in shapes:
            difference = (saved[replica].tensor(name).double() - theta[replica][name]).norm()
            assert difference < 2e-4 * theta[replica][name].norm(), name


def test_a_run_computes_what_the_formulas_say(tiny, tmp_path):
    raw = tiny(
        topology={"replicas": 3, "stages": 2}, run__steps=12, noloco__inner_steps=3, gradient_accumulation_steps=2
    )
    compare(configs.parse(raw), run(raw, tmp_path))
