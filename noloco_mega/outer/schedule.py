"""Which settings has an outer step? Those of the config; only γ may follow the inner learning rate.

With γ₀ = `gamma_at_zero_lr` and the learning rate lr of the phase's last inner step,

    γ_t = γ₀ + (γ − γ₀)·lr / max lr

where max lr is the highest of the run's inner steps. The rate is taken from the schedule and not from the engine, so
that two partners have the same γ whatever either has skipped. Every γ_t lies between γ and γ₀, for which the stability
was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from noloco_mega.config import Config, Noloco
from noloco_mega.engine.rates import LearningRates


def settings_after(config: Config | Noloco) -> Callable[[int], Noloco]:
    """The settings of the outer step that follows when so many inner steps of the run are done.

    Raises ValueError where γ follows the learning rate and there is no whole config to know it from.
    """
    settings = config if isinstance(config, Noloco) else config.noloco
    at_zero = settings.gamma_at_zero_lr
    if at_zero is None:
        return lambda steps_done: settings
    if isinstance(config, Noloco):
        raise ValueError(
            "noloco.gamma_at_zero_lr follows the learning rate of a whole config: give the Config, not its noloco part"
        )
    rates = LearningRates(config.deepspeed)
    highest = max(rates.at(step) for step in range(config.run.steps))

    def follow(steps_done: int) -> Noloco:
        share = rates.at(steps_done - 1) / highest if highest else 0.0
        return replace(settings, gamma=at_zero + (settings.gamma - at_zero) * share)

    return follow
