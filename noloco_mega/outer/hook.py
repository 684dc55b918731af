"""How does an ordinary DeepSpeed loop take outer steps? `attach` wraps engine.step; the loop stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from noloco_mega.config import Config, Noloco
from noloco_mega.engine.weights import Masters
from noloco_mega.outer import registry
from noloco_mega.outer.base import OuterOptimizer, OuterReport
from noloco_mega.outer.schedule import settings_after

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine

    from noloco_mega.comm.membership import Peers


def attach(engine: DeepSpeedEngine, config: Config | Noloco, peers: Peers) -> Hook:
    """Let every `inner_steps`-th inner step of `engine` be followed by the outer step that the config names.

    The engine runs ZeRO stage 1, every replica starts from the same weights, the loop is any that calls engine.step:

        hook = noloco_mega.attach(engine, config, peers)
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()

    Raises ValueError for an engine without ZeRO stage 1's fp32 masters, or one that has a hook already, and for a γ
    that follows the learning rate where only a Noloco block is given.
    """
    if isinstance(getattr(engine.step, "__self__", None), Hook):
        raise ValueError("this engine has an outer optimizer already; call detach() on its hook first")
    settings = config if isinstance(config, Noloco) else config.noloco
    masters = Masters(engine)
    return Hook(engine, masters, registry.build(masters, settings, peers), settings_after(config))


class Hook:
    """An outer optimizer that drives itself by an engine's steps."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        masters: Masters,
        optimizer: OuterOptimizer,
        settings_after: Callable[[int], Noloco],
    ) -> None:
        self.step = 0
        """Inner steps taken: one that DeepSpeed skipped for an overflow counts, an accumulating microbatch doesn't."""
        self.outer_step = 0
        """Outer steps of the run that are behind this replica."""
        self.skipped = 0
        """Inner steps that the run counts and this replica did not take, to catch up with others."""
        self.last_report: OuterReport | None = None
        """What the last outer step did."""
        self.last_probe: tuple[torch.Tensor, torch.Tensor] | None = None
        """A few of this rank's masters right before and right after the last outer step (see Masters.probe)."""
        self.optimizer = optimizer
        self._settings_after = settings_after
        self._masters = masters
        self._engine = engine
        self._engine_step = engine.step
        engine.step = self._step

    def state_dict(self) -> dict[str, Any]:
        """Counters and this rank's part of the optimizer's state; the masters themselves are not in it."""
        return {
            "step": self.step,
            "outer_step": self.outer_step,
            "skipped": self.skipped,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError if it belongs to another layout."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.outer_step = state["step"], state["outer_step"]
        self.skipped = state.get("skipped", 0)

    def hurry(self, outer_step: int) -> int:
        """Let the next inner step be the last one before outer step `outer_step`; returns the step to go on from.

        The run's counters stay what they are for everybody: learning rate and place in the data follow from the step.
        """
        last = (outer_step + 1) * self.optimizer.settings.inner_steps - 1
        if last > self.step:
            self.skipped += last - self.step
            self.step = last
        self.outer_step = max(self.outer_step, outer_step)
        return self.step

    def detach(self) -> None:
        """Give the engine its own step back."""
        self._engine.step = self._engine_step

    def _step(self, *args: Any, **kwargs: Any) -> None:
        steps_before = self._engine.global_steps
        if self._engine.is_gradient_accumulation_boundary():
            self.optimizer.before_inner_step()
        self._engine_step(*args, **kwargs)
        if self._engine.global_steps == steps_before:
            return
        self.step += 1
        if self.optimizer.due(self.step):
            before = self._masters.probe()
            self.optimizer.settings = self._settings_after(self.step)
            self.optimizer.launch(self.outer_step)
            self.last_report = self.optimizer.apply()
            self.last_probe = before, self._masters.probe()
            self.outer_step += 1
