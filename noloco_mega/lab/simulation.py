"""What would a run compute? All its replicas in one process, from the same plan, samples and formulas.

A simulation takes a run's own config. Tensor and data parallelism change nothing in what is computed, so T and D only
matter through the batch size; S only through where random routes cross.

Letters: N replicas, P parameters of the model, M microbatches per inner step (over all D), S stages, B samples of a
microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_mega import device
from noloco_mega.config import Config
from noloco_mega.data.loader import Batch, Loader
from noloco_mega.lab import outer, stacked
from noloco_mega.lab.inner import InnerOptimizer
from noloco_mega.lab.inner_steps import Rule
from noloco_mega.lab.model import StackedModel, joined
from noloco_mega.outer.schedule import settings_after
from noloco_mega.plan.routing import IdentityRoutes, RandomRoutes, Routes

PROBED = 256
"""Weights of each replica that are written down at outer steps, as a rank of a run does (engine/weights.py)."""


@dataclass(frozen=True, kw_only=True)
class InnerReport:
    """One inner step of all replicas."""

    lr: float
    losses: list[float]
    """Mean over the microbatches that each replica's last stage saw, nats per token."""
    gradient_norms: list[float]
    """Before clipping."""
    sent_bytes: list[int]
    """By an optimizer that averages gradients; 0 otherwise. Routed activations are not counted."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far the replicas are from each other, exactly."""

    relative: float
    """sqrt(mean_i ‖θ_i − θ̄‖²) / ‖θ̄‖, as merging.deviation has it."""
    std: float
    """sqrt of the mean over parameters of the unbiased variance over replicas."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Validation losses in nats per token."""

    replicas: list[float]
    merged: float
    """Of the mean of the replicas' weights."""

    @property
    def mean(self) -> float:
        return sum(self.replicas) / len(self.replicas)


@dataclass(kw_only=True)
class Counters:
    """Where a simulation is."""

    step: int = 0
    """Inner steps done."""
    outer_step: int = 0
    """Outer steps done."""
    phase_began: int = 0
    """Inner steps done at the last outer step."""
    inner_steps: int
    """H of the present phase."""
    spread: float = 0.0
    """Relative deviation right after the last outer step."""


class Simulation:
    """N replicas, between two inner steps."""

    def __init__(self, config: Config, loader: Loader) -> None:
        """Raises ValueError for settings that are not simulated."""
        if config.bf16:
            raise ValueError("the simulator computes in fp32; simulate with --set bf16.enabled=false")
        if config.noloco.inner_phase != "steps":
            raise ValueError('phases of a simulation are counted in steps; set noloco.inner_phase to "steps"')
        self.config = config
        self.counters = Counters(inner_steps=config.noloco.inner_steps)
        self._loader, self.replicas = loader, config.topology.replicas
        self._device = device.select(0, config.run.device).device
        self._model = StackedModel(config.model, config.topology.stages, self._device)
        self.theta = stacked.initial(config).to(self._device).repeat(self.replicas, 1)
        """Fast weights [N, P]."""
        self._gradients = torch.zeros_like(self.theta)
        self._leaves = self._leaf_views()
        self.inner = InnerOptimizer(self.theta, self._gradients, config.deepspeed)
        self.outer = outer.OPTIMIZERS[config.noloco.optimizer](self.theta, config.noloco)
        self._settings_after = settings_after(config)
        self._routes = self._routes_of_sites()

    def inner_step(self) -> InnerReport:
        """One inner step of every replica: M microbatches along their routes, then Adam.

        Nothing changes where a gradient is not finite: the norms in the report say so.
        """
        lr = self.inner.set_learning_rate(self.step)
        losses = self._forward_backward()
        sent = self.outer.average_gradients(self._gradients)
        norms = self.inner.step()
        self.counters.step += 1
        return InnerReport(lr=lr, losses=losses.tolist(), gradient_norms=norms.tolist(), sent_bytes=sent)

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self.counters.step

    @property
    def outer_step(self) -> int:
        """Outer steps done."""
        return self.counters.outer_step

    def due(self) -> bool:
        """Whether an outer step follows."""
        return self.step == self.counters.phase_began + self.counters.inner_steps

    def take_outer_step(self, rule: Rule) -> outer.Exchanged:
        """The outer step that is due; `rule` says how long the next phase is."""
        counters, before = self.counters, self.deviation().relative
        self.outer.settings = self._settings_after(self.step)
        exchanged = self.outer.step(self.outer_step)
        counters.outer_step += 1
        counters.phase_began = self.step
        counters.inner_steps = rule.recommend(counters.inner_steps, before, counters.spread)
        counters.spread = self.deviation().relative
        return exchanged

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """The loss on the validation samples, without routes."""
        merged = stacked.views(self.theta.mean(0, keepdim=True), self.config.model)
        total, of_merged = torch.zeros(self.replicas, dtype=torch.float64), 0.0
        for microbatch in range(self.config.run.eval_microbatches):
            batch = self._loader.valid(microbatch)
            total += self._model.losses(self._leaves, *self._same(batch, self.replicas)).double().cpu()
            of_merged += float(self._model.losses(merged, *self._same(batch, 1)))
        count = self.config.run.eval_microbatches
        return Evaluation(replicas=(total / count).tolist(), merged=of_merged / count)

    @torch.no_grad()
    def deviation(self) -> Deviation:
        mean = self.theta.mean(0)
        squares = sum(float((row - mean).square().sum(dtype=torch.float64)) for row in self.theta)
        norm = float(mean.square().sum(dtype=torch.float64))
        unbiased = squares / max(self.replicas - 1, 1) / len(mean)
        return Deviation(relative=(squares / self.replicas / norm) ** 0.5, std=unbiased**0.5)

    def probe(self) -> Tensor:
        """At most PROBED evenly spaced weights of every replica: fp32 [N, count]."""
        size = self.theta.shape[1]
        count = min(PROBED, size)
        return self.theta[:, torch.arange(count, device=self._device) * size // count].cpu()

    def state(self) -> dict[str, Tensor]:
        """All that a simulation goes on from, beside its counters; live tensors."""
        named = {"theta": {"": self.theta}, "inner": self.inner.state(), "outer": self.outer.state()}
        return {f"{part}.{name}": value for part, values in named.items() for name, value in values.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor], counters: Counters) -> None:
        """Go on from a `state` of the same config."""
        self.counters = counters
        self.theta.copy_(state["theta."])
        for name, value in self.outer.state().items():
            value.copy_(state[f"outer.{name}"])
        prefix = "inner."
        moments = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if moments:
            self.inner.load_state(moments)

    def _leaf_views(self) -> dict[str, Tensor]:
        """The parameters as leaves in θ's memory, whose gradients accumulate in the gradients' memory."""
        leaves = {}
        gradients = stacked.views(self._gradients, self.config.model)
        for name, view in stacked.views(self.theta, self.config.model).items():
            leaves[name] = view.detach().requires_grad_()
            leaves[name].grad = gradients[name]
        return leaves

    def _routes_of_sites(self) -> list[Routes]:
        """Of each replica, its site's."""
        topology, noloco = self.config.topology, self.config.noloco
        if noloco.routing == "fixed" or topology.stages == 1:
            return [IdentityRoutes()] * self.replicas
        sites = {replica: topology.site_of(replica) for replica in range(self.replicas)}
        drawn = {site: RandomRoutes(noloco.seed, site) for site in set(sites.values())}
        return [drawn[sites[replica]] for replica in range(self.replicas)]

    def _forward_backward(self) -> Tensor:
        """Accumulate every replica's gradient of its mean loss; the losses, float64 [N]."""
        microbatches = self.config.microbatches * self.config.topology.data
        total = torch.zeros(self.replicas, dtype=torch.float64, device=self._device)
        everybody = range(self.replicas)
        routed = not isinstance(self._routes[0], IdentityRoutes)
        for number in range(microbatches):
            batches = [self._loader.train(self.step, number, replica) for replica in everybody]
            tokens, labels, mask = joined(batches, self._device)
            sources: list[Tensor] = []
            if routed:
                last = self.config.topology.stages - 1
                origins = self._index(r.origin(self.step, number, last, i) for i, r in enumerate(self._routes))
                labels, mask = labels[origins], mask[origins]
                sources = [
                    self._index(r.backward(self.step, number, boundary, i) for i, r in enumerate(self._routes))
                    for boundary in range(last)
                ]
            losses = self._model.losses(self._leaves, tokens, labels, mask, sources)
            torch.autograd.backward(losses.sum() / microbatches)
            total += losses.detach()
        return total / microbatches

    def _index(self, replicas: Iterable[int]) -> Tensor:
        return torch.tensor(list(replicas), device=self._device)

    def _same(self, batch: Batch, replicas: int) -> tuple[Tensor, Tensor, Tensor]:
        return joined([batch] * replicas, self._device)
