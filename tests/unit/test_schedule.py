"""γ that follows the learning rate, against the schedule's formula; learning rates against torch's own optimizer."""

import math

import pytest
import torch

from noloco_mega.config import ConfigError, Noloco, parse
from noloco_mega.engine.rates import LearningRates
from noloco_mega.lab.inner import InnerOptimizer
from noloco_mega.outer.schedule import settings_after
from tests.unit.test_config import changed

COSINE = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 40, "warmup_num_steps": 8, "cos_min_ratio": 0.1, "warmup_type": "linear"},
}


def config(**changes):
    changes = {"scheduler": COSINE, "run__steps": 40, "noloco__inner_steps": 4} | changes
    return parse(changed(**changes))


@pytest.mark.parametrize("at_zero", [0.0, 1.2])
def test_gamma_is_linear_in_the_rate_of_the_last_inner_step(at_zero):
    def share(done):
        """Of the configured rate after so many inner steps, which DeepSpeed's schedulers ask for."""
        return done / 8 if done < 8 else 0.1 + 0.9 * (1 + math.cos(math.pi * (done - 8 + 1) / 32)) / 2

    after = settings_after(config(noloco__gamma_at_zero_lr=at_zero))
    for outer_step in range(10):
        found = after(4 * outer_step + 4)
        expected = at_zero + (0.7 - at_zero) * share(4 * outer_step + 2) / share(8)
        assert found.gamma == pytest.approx(expected, rel=1e-6)
        assert found.outer_lr == 0.7 and found.gamma_at_zero_lr == at_zero


def test_gamma_is_the_same_whatever_was_asked_before():
    first, second = (settings_after(config(noloco__gamma_at_zero_lr=1.0)) for _ in range(2))
    wandering = [first(step).gamma for step in (40, 4, 28, 8, 40)]
    assert wandering == [second(step).gamma for step in (40, 4, 28, 8, 40)]
    assert wandering[0] == wandering[-1] and len(set(wandering)) == 4


def test_without_the_option_gamma_is_constant():
    settings = config().noloco
    assert settings_after(config())(4) == settings_after(settings)(400) == settings


@pytest.mark.parametrize(
    "scheduler",
    [
        COSINE,
        {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}},
        None,
    ],
)
def test_rates_are_those_of_an_optimizer_that_is_stepped(scheduler):
    deepspeed = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "gradient_clipping": 1.0,
        **({"scheduler": scheduler} if scheduler else {}),
    }  # fmt: skip
    rates = LearningRates(deepspeed)
    inner = InnerOptimizer(torch.zeros(1, 1), torch.zeros(1, 1), deepspeed)
    expected = [inner.set_learning_rate(step) for step in range(12)]
    assert [rates.at(step) for step in reversed(range(12))] == expected[::-1]
    assert len(set(expected)) > 3 or scheduler is None


def test_what_cannot_follow_is_refused():
    with pytest.raises(ConfigError, match="gamma_at_zero_lr follows the inner learning rate, which is constant"):
        config(scheduler={}, noloco__gamma_at_zero_lr=1.0)
    with pytest.raises(ConfigError, match=r"gamma_at_zero_lr γ = 2\.0 is unstable .* γ must lie in \(0, 1\.799\)"):
        config(noloco__gamma_at_zero_lr=2.0)
    with pytest.raises(ValueError, match="give the Config"):
        settings_after(Noloco(gamma_at_zero_lr=1.0))
