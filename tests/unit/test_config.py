"""Parsing, overrides and cross-checks of the configuration."""

import copy
import json

import pytest

from noloco_mega import checks
from noloco_mega.config import ConfigError, load, parse


def raw_config():
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "topology": {"replicas": 4, "stages": 2},
        "model": {
            "vocab_size": 1024,
            "hidden_size": 64,
            "num_layers": 4,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 128,
            "seq_length": 64,
        },
        "data": {"train": "x_train", "valid": "x_valid", "tokenizer": "t.model"},
        "run": {"name": "test", "steps": 10},
    }


def changed(**paths):
    """The valid config with dotted paths (written with __) set; None deletes."""
    raw = copy.deepcopy(raw_config())
    for path, value in paths.items():
        *parents, last = path.split("__")
        block = raw
        for parent in parents:
            block = block.setdefault(parent, {})
        if value is None:
            del block[last]
        else:
            block[last] = value
    return raw


def test_a_valid_config_round_trips():
    config = parse(raw_config())
    assert parse(config.to_json()) == config
    assert (config.micro_batch_size, config.microbatches, config.replica_batch_size) == (4, 2, 8)
    assert config.noloco.outer_momentum == 0.5 and config.noloco.outer_lr == 0.7 and config.noloco.gamma == 0.7
    assert not config.bf16 and config.topology.site_of(2) == (0, 1, 2, 3)


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        parse(raw_config()).run.steps = 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"noloco__iner_steps": 3}, 'unknown key "noloco.iner_steps"; did you mean "inner_steps"?'),
        ({"zero_optimisation": {}}, 'unknown key "zero_optimisation"; did you mean "zero_optimization"?'),
        ({"topolgy": {}}, 'did you mean "topology"?'),
        ({"run__steps": None}, '"run.steps" is missing'),
        ({"run__steps": "10"}, '"run.steps"'),
        ({"run__steps": 0}, "greater than 0"),
        ({"noloco__gamma": True}, '"noloco.gamma"'),
        ({"noloco__routing": "ring"}, "'random' or 'fixed'"),
        ({"topology__stages": 3}, "choose stages from [1, 2, 4]"),
        ({"topology__tensor": 3}, "num_attention_heads = 4 is not a multiple"),
        ({"topology__tensor": 4}, "num_query_groups = 2 is not a multiple"),
        ({"model__num_query_groups": 3}, "not a multiple of model.num_query_groups"),
        ({"model__hidden_size": 66}, "not a multiple of model.num_attention_heads"),
        ({"model__kv_channels": 5}, "even head width"),
        ({"topology__tensor": 2, "model__vocab_size": 1023}, "a multiple of 128·tensor"),
        ({"model__tied_embeddings": True}, "topology.stages = 1"),
        ({"topology__sequence_parallel": True}, "topology.tensor > 1"),
        ({"topology__sites": [[0, 1], [1, 2]]}, "exactly once; it names [0, 1, 1, 2]"),
        ({"zero_optimization__stage": 2}, 'set "zero_optimization": {"stage": 1}'),
        ({"zero_optimization__stage": 0}, 'set "zero_optimization": {"stage": 1}'),
        ({"zero_optimization__overlap_comm": True}, "overlap_comm reduces gradients"),
        ({"fp16__enabled": True}, "use bf16 or fp32"),
        ({"bf16": {"enabled": True, "immediate_grad_update": False}}, "bf16.immediate_grad_update must be True"),
        ({"bf16__enabled": True, "communication_data_type": "bf16"}, "communication_data_type must be 'fp32'"),
        ({"gradient_clipping": None}, "DeepSpeed clips to 1.0"),
        ({"optimizer__type": "Adam"}, 'AdamW under the name "Adam"'),
        ({"optimizer__type": "Lion"}, 'use "AdamW" or "Adam"'),
        ({"optimizer": None}, "give the inner optimizer"),
        ({"optimizer__params": {}}, "optimizer.params.lr"),
        ({"train_batch_size": 9}, "4 · accumulation 2 · topology.data 1 = 8"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "must be a positive integer"),
        ({"noloco__optimizer": "sgd"}, "known: local, noloco"),
        ({"noloco__group_size": 5}, "choose at most 4"),
        ({"noloco__outer_momentum": 0.9}, "γ must lie in (0, 0.542)"),
        ({"noloco__gamma": 0}, "would never shrink. With this α, γ must lie in (0, 1.799)"),
        ({"noloco__exchange_deadline_seconds": 400.0}, "heartbeat_seconds < exchange_deadline_seconds < link"),
        ({"noloco__heartbeat_seconds": 90.0}, "heartbeat_seconds < exchange_deadline_seconds < link"),
        ({"run__name": "a/b"}, "one folder name"),
    ],
)
def test_a_bad_config_says_what_to_change(change, message):
    with pytest.raises(ConfigError) as caught:
        parse(changed(**change))
    assert message in str(caught.value)


def test_every_problem_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        parse(changed(topology__stages=3, gradient_clipping=None, noloco__outer_momentum=0.9))
    assert str(caught.value).startswith("3 problems:\n")


def test_unstable_settings_run_when_asked_for():
    parse(changed(noloco__gamma=0, noloco__allow_unstable=True))
    parse(changed(noloco__outer_momentum=0.9, noloco__optimizer="local"))
    parse(changed(noloco__outer_momentum=0.9, topology__replicas=2))  # two replicas: the exact range is wider


def test_adam_with_l2_is_allowed_when_spelled_out():
    parse(changed(optimizer={"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}))


@pytest.mark.parametrize(
    "given, data, expected",
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, 1, (4, 4)),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, 2, (4, 2)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, 2, (4, 2)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (4, 1)),
        ({"train_batch_size": 16}, 2, (8, 1)),
    ],
)
def test_two_batch_sizes_give_the_third(given, data, expected):
    assert checks.batch_sizes(given, data) == expected


def test_bf16_gets_what_the_hand_off_needs():
    settings = checks.deepspeed_settings(parse(changed(bf16={"enabled": True})))
    assert settings["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"} and settings["communication_data_type"] == "fp32"
    assert settings["zero_optimization"]["stage"] == 1


def test_files_and_overrides(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(raw_config()))
    config = load(path, ["noloco.inner_steps=20", "run.name=other", "optimizer.params.lr=0.5", "bf16.enabled=true"])
    assert config.noloco.inner_steps == 20 and config.run.name == "other" and config.bf16
    assert config.deepspeed["optimizer"]["params"]["lr"] == 0.5
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        load(path, ["noloco.inner_steps"])
    with pytest.raises(ConfigError, match="holds a value, not a block"):
        load(path, ["gradient_clipping.x=1"])
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(tmp_path / "absent.json")
    path.write_text('{"run": {"name": "a"}, "run": {}}')
    with pytest.raises(ConfigError, match="names run twice"):
        load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(path)
