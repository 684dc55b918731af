"""The tables of DeepSpeed's settings against the installed DeepSpeed: what it reads, and what it makes of them."""

import inspect
from collections.abc import KeysView

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from noloco_mega import checks, deepspeed_keys
from noloco_mega.deepspeed_keys import Refused, supported
from tests.unit.test_config import changed, everything, parse


class Recorded(dict):
    """A dict that remembers which keys were asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return KeysView(self)

    def __copy__(self):
        return self


def test_every_key_that_deepspeed_reads_has_an_entry_and_no_other():
    settings = Recorded({"train_micro_batch_size_per_gpu": 1})
    ds_config.DeepSpeedConfig(settings)
    read = settings.asked | set(ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert len(read) > 50
    # Read before anything else, and only in a world without our groups.
    assert set(deepspeed_keys.TOP) == read | {"sequence_parallel_size"}


def names(model):
    return {name for name in model.model_fields} | {field.alias for field in model.model_fields.values() if field.alias}


def test_the_nested_keys_are_deepspeeds():
    assert set(deepspeed_keys.BF16) == names(DeepSpeedBF16Config)
    assert set(deepspeed_keys.ZERO) == names(DeepSpeedZeroConfig) | set(ds_config._REMOVED_ZERO_CONFIG_KEYS)
    settings = Recorded()
    ds_config.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "data_types": settings})
    assert set(deepspeed_keys.TOP["data_types"].keys) == settings.asked


def test_the_inner_optimizers_keys_are_those_of_both_adams():
    torchs, fused = (set(inspect.signature(adam).parameters) - {"params"} for adam in (torch.optim.AdamW, FusedAdam))
    read_by_the_engine = {"adam_w_mode", "torch_adam", "fp32_optimizer_states", "max_grad_norm"}
    assert set(supported(deepspeed_keys.ADAM)) - read_by_the_engine == torchs & fused - {"amsgrad", *read_by_the_engine}
    assert set(deepspeed_keys.ADAM) == torchs | fused | read_by_the_engine


def test_the_schedulers_and_their_keys_are_deepspeeds():
    assert sorted(deepspeed_keys.SCHEDULERS) == sorted(lr_schedules.VALID_LR_SCHEDULES)
    for name, keys in deepspeed_keys.SCHEDULERS.items():
        parameters = dict(inspect.signature(getattr(lr_schedules, name)).parameters)
        del parameters["optimizer"]
        assert set(keys) == set(parameters), name
        required = {key for key, parameter in parameters.items() if parameter.default is parameter.empty}
        assert set(deepspeed_keys.REQUIRED.get(name, ())) == required, name
    warmup = inspect.signature(lr_schedules.WarmupCosineLR).parameters["warmup_num_steps"].default
    assert warmup == deepspeed_keys.DEFAULT_WARMUP_STEPS


VALUES = [1, 0, 0.5, 1e99, 5e8, 2, 1000, True, False, None, "log", "linear", "fp32", "bf16", "fp16", "info", "mean"]


@pytest.mark.parametrize("name", deepspeed_keys.SCHEDULERS)
def test_deepspeed_takes_every_schedule_that_the_tables_take(name):
    least = {"total_num_steps": 2000, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    least = {key: value for key, value in least.items() if key in deepspeed_keys.SCHEDULERS[name]}
    tried = 0
    for key in supported(deepspeed_keys.SCHEDULERS[name]):
        for value in VALUES:
            settings = {"scheduler": {"type": name, "params": {**least, key: value}}}
            if list(deepspeed_keys.problems(settings)):
                continue
            optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
            scheduler = getattr(lr_schedules, name)(optimizer, **settings["scheduler"]["params"])
            for step in (-1, 0, 1, 2, 5, 1999, 2000, 10_000):
                scheduler.step(step)
            tried += 1
    assert tried > 5


def test_deepspeed_takes_every_setting_that_the_tables_take():
    tried = 0
    paths = [
        (key,) for key in supported(deepspeed_keys.TOP) if isinstance(deepspeed_keys.TOP[key], deepspeed_keys.Kind)
    ]
    paths += [("zero_optimization", key) for key in supported(deepspeed_keys.ZERO)]
    paths += [("bf16", key) for key in supported(deepspeed_keys.BF16)]
    for path in paths:
        for value in VALUES:
            try:
                config = parse(changed(**{"__".join(path): value} if value is not None else {}))
            except ValueError:
                continue
            ds_config.DeepSpeedConfig(checks.deepspeed_settings(config))
            tried += 1
    assert tried > 50
    ds_config.DeepSpeedConfig(checks.deepspeed_settings(parse(everything())))


def test_the_table_of_refusals_gives_reasons():
    for keys in (deepspeed_keys.TOP, deepspeed_keys.ZERO, deepspeed_keys.BF16, deepspeed_keys.ADAM):
        for key, entry in keys.items():
            assert not isinstance(entry, Refused) or len(entry.reason) > 10, key
