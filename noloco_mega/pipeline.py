"""How does one inner step's work run through the stages? megatron-core's 1F1B schedule along the plan's routes.

Letters: B microbatch, S sequence; M microbatches per pipeline and inner step, D data size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.comm.routed_p2p import Circuit, RoutedP2PCommunicator
from noloco_mega.config import Config
from noloco_mega.data.loader import Batch, Loader
from noloco_mega.plan.routing import IdentityRoutes, carriers


@dataclass(frozen=True)
class StepLoss:
    """What one pipeline's last stage computed; all zero on the other stages, so that sums over a replica are right."""

    total: Tensor
    """Float64 [], on the device: sum over microbatches of each one's mean loss per token, in nats."""
    microbatches: int
    """How many were summed."""
    each: Tensor | None = None
    """Float32 [microbatches], on the device: the summands, in the order of the pipeline's microbatches."""


class Pipeline:
    """Runs the schedule on one rank's stage. Gradients accumulate in the model as its own hooks have it."""

    def __init__(self, model: GPTModel, config: Config, world: ReplicaWorld, loader: Loader) -> None:
        """`model` is the raw module: where an engine wraps it, the engine's `module`."""
        self._model, self._config, self._world, self._loader = model, config, world, loader
        self._communicator = RoutedP2PCommunicator(world, model.config)
        self._schedule = get_forward_backward_func(pp_size=world.grid.stages, vp_size=None)

    def forward_backward(self, step: int, circuit: Circuit) -> StepLoss:
        """Add the gradient of an inner step's mean loss over this pipeline's M microbatches to the parameters.

        The first stage reads this replica's own samples, the last one the labels of the replica where the microbatch's
        route began. Raises LinkBroken; the accumulated gradients are then worthless, and after dropping them the
        step can be run again along another circuit.
        """

        def read(microbatch: int) -> Batch:
            place = self._world.place
            origin = circuit.routes.origin(step, microbatch, place.stage, place.replica)
            return self._loader.train(step, microbatch, origin)

        numbers = self._numbers(self._config.microbatches * self._world.grid.data)
        return self._run(step, circuit, read, numbers, forward_only=False)

    def bad_routes(self, step: int, circuit: Circuit, loss: StepLoss | None) -> list[tuple[int, ...]]:
        """The replicas that carried each microbatch whose loss, in this inner step, was not finite; by stage.

        Known on the last stage; none elsewhere.
        """
        place, data = self._world.place, self._world.grid.data
        if loss is None or loss.each is None or place.tensor != 0:
            return []
        bad = (~torch.isfinite(loss.each)).nonzero().flatten().tolist()
        return [carriers(circuit.routes, step, n * data + place.data, place.stage, place.replica) for n in bad]

    def evaluate(self, circuit: Circuit, domain: str | None = None) -> StepLoss:
        """The loss on the validation microbatches, or on those of a domain, shared out over the D pipelines, without
        gradients.

        Every replica reads the same samples, so `circuit` is the replica's own. Raises LinkBroken.
        """
        assert isinstance(circuit.routes, IdentityRoutes), "an evaluation stays inside its replica"

        def read(microbatch: int) -> Batch:
            return self._loader.valid(microbatch, domain)

        numbers = self._numbers(self._config.run.eval_microbatches)
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                return self._run(0, circuit, read, numbers, forward_only=True)
        finally:
            self._model.train(training)

    def _numbers(self, total: int) -> range:
        """The replica-wide numbers of this pipeline's microbatches."""
        return range(self._world.place.data, total, self._world.grid.data)

    def _run(
        self, step: int, circuit: Circuit, read: Callable[[int], Batch], numbers: range, forward_only: bool
    ) -> StepLoss:
        losses: list[Tensor] = []
        device = self._world.device.device

        def forward_step(number: Iterator[int], model: GPTModel) -> tuple[Tensor, Callable]:
            microbatch = next(number)
            batch = read(microbatch) if model.pre_process or model.post_process else None
            inputs = batch.tokens.to(device, non_blocking=True) if batch and model.pre_process else None
            labels = batch.labels.to(device, non_blocking=True) if batch and model.post_process else None
            output = model(inputs, None, None, labels=labels)

            def loss_function(loss_of_token: Tensor) -> tuple[Tensor, dict]:
                assert batch is not None
                mask = batch.loss_mask.to(device, non_blocking=True)
                loss = (loss_of_token * mask).sum() / mask.sum().clamp(min=1)
                # The schedule divides `loss` by M in place.
                losses.append(loss.detach().clone())
                return loss, {}

            return output, loss_function

        self._communicator.begin(step, circuit)
        if numbers:
            self._schedule(
                forward_step_func=forward_step,
                data_iterator=iter(numbers),
                model=self._model,
                num_microbatches=len(numbers),
                seq_length=self._config.model.seq_length,
                micro_batch_size=self._config.micro_batch_size,
                forward_only=forward_only,
                p2p_communicator=self._communicator,
                pg_collection=self._world.mcore,
            )
        if self._communicator.failure is not None:
            raise self._communicator.failure
        if not losses:
            return StepLoss(torch.zeros((), dtype=torch.float64, device=device), 0)
        each = torch.stack(losses)
        return StepLoss(each.double().sum(), len(losses), each)
