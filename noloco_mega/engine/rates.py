"""What is the learning rate of an inner step? A pure function of the step, by DeepSpeed's own schedulers."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime import lr_schedules

from noloco_mega.deepspeed_keys import object_at


class LearningRates:
    """The rates that a config's DeepSpeed part gives, whatever a run has skipped or redone before."""

    def __init__(self, deepspeed: dict[str, Any]) -> None:
        rate = object_at(deepspeed, "optimizer", "params")["lr"]
        # Schedulers act on an optimizer; some read the momenta that only Adam has.
        self._optimizer = torch.optim.Adam([torch.zeros(1)], lr=rate)
        scheduler = object_at(deepspeed, "scheduler")
        self._scheduler = (
            getattr(lr_schedules, scheduler["type"])(self._optimizer, **scheduler["params"]) if scheduler else None
        )

    def at(self, step: int) -> float:
        """Of inner step `step`, counted from 0: what engine.deepspeed.set_learning_rate sets for it."""
        if self._scheduler is not None:
            self._scheduler.step(step - 1)
        return float(self._optimizer.param_groups[0]["lr"])
