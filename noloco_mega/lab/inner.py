"""How do N replicas take an inner step at once? torch's Adam on stacked weights, clipped replica by replica.

Adam works element by element, so that torch's own optimizer on [N, P] is N independent ones; only the clipping by each
replica's own gradient norm has to know where a replica ends. Learning rates are those of DeepSpeed's schedulers.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor

from noloco_mega.deepspeed_keys import object_at

CLIP_EPSILON = 1e-6
"""Added to the norm before the clip factor is formed, as DeepSpeed does."""


class InnerOptimizer:
    """AdamW (or Adam) as a config's DeepSpeed part describes it, on weights and gradients [N, P]."""

    def __init__(self, theta: Tensor, gradients: Tensor, deepspeed: dict[str, Any]) -> None:
        """`gradients` is where the backward passes accumulate; both tensors are kept and changed in place."""
        assert theta.shape == gradients.shape and not theta.requires_grad
        self._parameter = theta.detach().requires_grad_()
        self._parameter.grad = gradients
        self._clip = float(deepspeed["gradient_clipping"])
        params = dict(object_at(deepspeed, "optimizer", "params"))
        decoupled = deepspeed["optimizer"]["type"].lower() == "adamw"
        for key in ("adam_w_mode", "torch_adam"):
            params.pop(key, None)
        if "betas" in params:
            params["betas"] = tuple(params["betas"])
        # One pass over the weights: a tenth of the time of torch's default on CPU, a third of a small simulation's.
        params["fused"] = True
        self._optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([self._parameter], **params)
        self._scheduler = None
        scheduler = object_at(deepspeed, "scheduler")
        if scheduler:
            self._scheduler = getattr(lr_schedules, scheduler["type"])(self._optimizer, **scheduler["params"])

    def set_learning_rate(self, step: int) -> float:
        """Set and return the rate of inner step `step`, counted from 0; see engine.deepspeed.set_learning_rate."""
        if self._scheduler is not None:
            self._scheduler.step(step - 1)
        return float(self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip each replica's gradient to the config's norm, step, and set the gradients to zero.

        Returns the norms before clipping, float32 [N]. Where one of them is not finite, nothing is changed.
        """
        gradients = self._parameter.grad
        assert gradients is not None
        norms = torch.linalg.vector_norm(gradients, dim=1)
        if bool(norms.isfinite().all()):
            if self._clip > 0:
                gradients.mul_((self._clip / (norms + CLIP_EPSILON)).clamp(max=1.0)[:, None])
            self._optimizer.step()
        gradients.zero_()
        return norms

    def state(self) -> dict[str, Tensor]:
        """Adam's moments, [N, P] each and live, and its step count; empty before the first step."""
        return dict(self._optimizer.state[self._parameter])

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._optimizer.state[self._parameter] = {name: value.clone() for name, value in state.items()}
