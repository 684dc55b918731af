"""Parsing, overrides and cross-checks of the configuration."""

import argparse
import copy
import json

import pytest

from noloco_mega import checks, cli, deepspeed_keys
from noloco_mega.config import ConfigError, load, parse
from noloco_mega.entry import add_config_arguments, load_config, load_run

LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32


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


def test_nested_blocks_round_trip():
    config = parse(changed(model__rope_scaling=LLAMA3, model__attention_bias="qkv"))
    assert parse(config.to_json()) == config and config.model.rope_scaling.factor == 8.0


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
        (
            {"zero_optimization__overlap_comm": True},
            'zero_optimization.overlap_comm" is not supported here: it reduces gradients inside',
        ),
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
        ({"noloco__optimizer": "sgd"}, "known: allreduce, diloco, gossip, local, noloco"),
        ({"noloco__group_size": 5}, "choose at most 4"),
        ({"noloco__outer_momentum": 0.9}, "γ must lie in (0, 0.542)"),
        ({"noloco__gamma": 0}, "would never shrink. With this α, γ must lie in (0, 1.799)"),
        ({"noloco__nesterov": True, "noloco__gamma": 1.5}, "(look-ahead): the replicas' spread would grow"),
        ({"noloco__combine": "after", "noloco__gamma": 2.1}, "γ must lie in (0, 1.999)"),
        ({"noloco__combine": "never"}, "\"noloco.combine\": input should be 'step' or 'after'"),
        ({"noloco__pairing": "tournament", "noloco__outer_momentum": 0.9}, 'replicas (pairing "tournament")'),
        ({"noloco__pairing": "hypercube", "topology__replicas": 6}, "needs a power of two as topology.replicas"),
        ({"noloco__pairing": "tournament", "noloco__group_size": 3}, "makes pairs; set noloco.group_size to 2"),
        ({"noloco__exchange_deadline_seconds": 121.0}, "link_timeout_seconds >= 2.5 · exchange_deadline_seconds"),
        ({"noloco__heartbeat_seconds": 90.0}, "heartbeat_seconds < exchange_deadline_seconds"),
        ({"run__name": "a/b"}, "one folder name"),
        ({"run__directory": ""}, '"run.directory" must be a path'),
        ({"data__valid": ""}, '"data.valid" must be a path'),
        ({"data__cache": "a\0b"}, '"data.cache" must be a path'),
        ({"data__blend": {" ": 0.5}}, '"data.blend" must be a path'),
        ({"data__valid_domains": {"code": ""}}, '"data.valid_domains.code" must be a path'),
        ({"data__valid_domains": {"": "x"}}, "names a domain ''; give it a name"),
        ({"run__init_from": ""}, '"run.init_from" must be a path'),
        ({"run__final_consensus": True, "noloco__optimizer": "local"}, 'which noloco.optimizer "local" keeps apart'),
        ({"noloco__outer_lr": float("nan")}, '"noloco.outer_lr": input should be a finite number'),
        ({"noloco__gamma": float("inf")}, '"noloco.gamma": input should be a finite number'),
        ({"noloco__link_timeout_seconds": 1e99}, "less than or equal to 1000000"),
        ({"topology": 3}, '"topology": input should be an object'),
        ({"bf16": True}, '"bf16" must be an object like {"enabled": true} (given: true)'),
        ({"zero_optimization": 1}, '"zero_optimization" must be an object like {"stage": 1} (given: 1)'),
        ({"optimizer": []}, '"optimizer" must be an object like'),
        ({"optimizer": {"type": "AdamW", "params": None}}, '"optimizer.params" must be an object like {"lr": 6e-4}'),
        ({"optimizer": {"params": {"lr": 1}}}, '"optimizer.type" is missing'),
        ({"optimizer__params__betass": [0.9, 0.9]}, 'key "optimizer.params.betass"; did you mean "betas"?'),
        ({"optimizer__params__betas": [0.9, 1.0]}, '"optimizer.params.betas" must be two numbers in [0, 1)'),
        ({"optimizer__params__betas": 0.9}, '"optimizer.params.betas" must be two numbers in [0, 1)'),
        ({"optimizer__params__lr": "auto"}, '"auto" is not resolved here'),
        ({"optimizer__params__lr": True}, '"optimizer.params.lr" must be a finite number of at least 0 (given: true)'),
        ({"optimizer__params__lr": -1e-3}, '"optimizer.params.lr" must be a finite number of at least 0'),
        ({"optimizer__params__lr": float("nan")}, '"optimizer.params.lr" must be a finite number of at least 0'),
        ({"optimizer__params__eps": 0}, '"optimizer.params.eps" must be a finite number above 0'),
        ({"optimizer__params__weight_decay": -1}, '"optimizer.params.weight_decay" must be a finite number of at'),
        ({"optimizer__params__max_grad_norm": 1.0}, 'DeepSpeed clips by the top-level "gradient_clipping"'),
        ({"optimizer__params__bias_correction": False}, "which of them runs depends on the device"),
        ({"optimizer__params__adam_w_mode": False}, 'has no effect on "AdamW"'),
        ({"gradient_clipping": "auto"}, '"gradient_clipping" must be a finite number of at least 0'),
        ({"gradient_clipping": -1}, '"gradient_clipping" must be a finite number of at least 0'),
        ({"bf16": {"enable": True}}, 'unknown key "bf16.enable"; did you mean "enabled"?'),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "the outer step works on fp32 masters"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, 'grad_accum_dtype" must be "fp32"'),
        ({"zero_optimization__overlap_com": False}, 'did you mean "overlap_comm"?'),
        ({"zero_optimization__stage": True}, '"zero_optimization.stage" must be an integer from 0 to 3'),
        ({"zero_optimization__offload_optimizer": {"device": "cpu"}}, "must not be offloaded"),
        ({"zero_optimization__compute_grad_norm": False}, '"zero_optimization.compute_grad_norm" must be true'),
        ({"scheduler": {}}, '"scheduler.type" is missing; known: WarmupLR'),
        ({"scheduler": {"type": "WarmupCosinLR", "params": {}}}, '"scheduler.type" must be one of "WarmupLR"'),
        ({"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}}, '"scheduler.type" must be one of'),
        ({"scheduler": {"type": "WarmupLR"}}, '"scheduler.params" must be an object like'),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, '"scheduler.params.total_num_steps" is missing'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}}, 'did you mean "warmup_num_steps"?'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, 'must be one of "log", "linear"'),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500}}}, "warmup_num_steps = 1000"),
        ({"torch_autocast__enabled": True}, "this would have no effect"),
        ({"compile__deepcompile": True}, "this would have no effect"),
        ({"flops_profiler__enabled": True}, "this would have no effect"),
        ({"activation_checkpointing__partition_activations": True}, "this would have no effect"),
        ({"amp__enabled": True}, 'DeepSpeed\'s "amp" is not supported here: DeepSpeed removed it'),
        ({"sparse_gradients": True}, 'DeepSpeed\'s "sparse_gradients" is not supported here'),
        ({"dataloader_drop_last": True}, "samples are planned by number"),
        ({"elasticity__enabled": True}, 'DeepSpeed\'s "elasticity" is not supported here'),
        ({"zero_force_ds_cpu_optimizer": True}, "it is for offloading"),
        ({"model__attention_bias": "some"}, "'none', 'qkv' or 'all'"),
        ({"model__rope_scaling": {"type": "yarn", "factor": 4}}, "'linear' or 'llama3'"),
        ({"model__rope_scaling": {"type": "linear", "factor": 4, "lowfreq": 1}}, 'did you mean "low_freq_factor"?'),
        ({"model__rope_scaling": {"type": "linear", "factor": 4, "low_freq_factor": 1}}, "has no low_freq_factor"),
        ({"model__rope_scaling": {"type": "llama3", "factor": 4}}, "needs low_freq_factor, high_freq_factor, original"),
        ({"model__rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor < high_freq_factor"),
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
    wrong = changed(
        topolgy={},
        run__steps=0,
        bf16=True,
        scheduler=1,
        optimizer__params__lr="x",
        gradient_clipping=-1,
        data__train="",
    )
    with pytest.raises(ConfigError) as caught:
        parse({**wrong, "topology": {**wrong["topology"], "stages": 3}, "train_batch_size": "x"})
    listed = str(caught.value)
    assert listed.startswith("9 problems:\n"), listed
    for part in (
        "topolgy",
        "run.steps",
        "bf16",
        "scheduler",
        ".lr",
        "clipping",
        "data.train",
        "stages = 3",
        "batch_size",
    ):
        assert part in listed, part


HOSTILE = [
    None, True, False, -1, 0, 1, 2.5, 1e99, 1e300, -1e300, float("nan"), float("inf"), 10**400, 2**31, "", "auto",
    "NaN", "a\0b", "\ud800", [], [[]], [None], [1e99, -1], {}, {"": None}, {"enabled": "yes"}, {"type": []},
    {"params": 3}, {"type": "OneCycle", "params": {"cycle_min_lr": [], "cycle_max_lr": {}}}, [{"a": {"b": [{}]}}],
]  # fmt: skip


def places(value, path=()):
    """Paths of everything inside a JSON value, itself included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def everything():
    """A valid config that says every key that may be said: each one is a place for a wrong value."""
    raw = parse(raw_config()).to_json()
    raw["topology"]["sites"] = [[0, 1], [2, 3]]
    raw["bf16"] = {"enabled": True, "immediate_grad_update": True}
    raw["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 5e8}
    raw["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}
    raw["optimizer"]["params"] |= {"betas": [0.9, 0.95], "eps": 1e-8}
    raw["train_batch_size"] = 8
    raw["data_types"] = {"grad_accum_dtype": "fp32"}
    for key, entry in deepspeed_keys.TOP.items():
        if isinstance(entry, deepspeed_keys.Refused) and entry.may_be_off:
            raw[key] = {"enabled": False}
    return raw


def test_no_value_anywhere_is_a_traceback():
    valid, accepted, refused = everything(), 0, 0
    parse(valid)
    for path in places(valid):
        for value in HOSTILE:
            raw = copy.deepcopy(valid)
            target = raw
            for key in path[:-1]:
                target = target[key]
            if not path:
                raw = value if isinstance(value, dict) else {"": value}
            else:
                target[path[-1]] = value
            try:
                checks.deepspeed_settings(parse(raw))
                accepted += 1
            except ConfigError:
                refused += 1
    assert accepted > 100 and refused > 1000


def test_features_that_are_turned_off_are_not_handed_on():
    settings = checks.deepspeed_settings(parse(everything()))
    assert not [key for key in settings if isinstance(deepspeed_keys.TOP[key], deepspeed_keys.Refused)]
    off = {"overlap_comm": False, "offload_param": None, "allgather_partitions": False}
    config = parse(changed(zero_optimization=off))
    assert checks.deepspeed_settings(config)["zero_optimization"] == {"allgather_partitions": False, "stage": 1}
    assert config.deepspeed["zero_optimization"] == off, "the config itself was changed"


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"run": NaN}', "NaN is no number in JSON"),
        ('{"fp16": {"enabled": false, "loss_scale": -Infinity}}', "-Infinity is no number in JSON"),
        ('{"run": 1e999}', '"run": input should be an object'),
        ('{"gradient_clipping": 1e999}', '"gradient_clipping" must be a finite number'),
        ('{"run": ' + "[" * 10_000 + "]" * 10_000 + "}", "not valid JSON"),
        ('{"run": ' + "[" * 100 + "]" * 100 + "}", "more than 8 levels"),
        ('{"run": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[]", "a config is a JSON object"),
        ("", "not valid JSON"),
        (b"\xff", "not valid JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_that_are_no_config(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)


def test_unstable_settings_run_when_asked_for():
    parse(changed(noloco__gamma=0, noloco__allow_unstable=True))
    parse(changed(noloco__outer_momentum=0.9, noloco__optimizer="diloco"))
    parse(changed(noloco__outer_momentum=0.9, topology__replicas=2))  # two replicas: the exact range is wider


@pytest.mark.parametrize(
    "noloco, problem",
    [
        ({"codec": "modulo", "optimizer": "diloco"}, r'"modulo" is not for .*"diloco"; set it to "none" or "absmax"'),
        ({"codec": "modulo", "optimizer": "local"}, 'set it to "none"'),
        ({"codec": "absmax"}, 'set it to "none" or "modulo"'),
        ({"codec_bits": 3}, 'codec_bits = 3 has no effect on noloco.codec "none"'),
        (
            {"codec": "absmax", "optimizer": "diloco", "codec_range": 8.0},
            'codec_range = 8 has no effect on .* "absmax"',
        ),
        ({"codec": "modulo", "codec_bits": 1}, "codec_bits"),
        ({"codec": "modulo", "codec_bits": 9}, "codec_bits"),
        ({"codec": "modulo", "codec_range": 1.5}, "codec_range"),
        ({"codec": "zip"}, "codec"),
        (
            {"codec": "modulo", "codec_bits": 2, "codec_range": 10.0},
            "4 replicas .2 bits for a range of 10.: the rep.*spread",
        ),
        (
            {"codec": "modulo", "codec_bits": 2, "optimizer": "gossip"},
            "rounding would drive the replicas further apart",
        ),
    ],
)
def test_codecs_that_do_not_fit_are_refused(noloco, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(changed(noloco=noloco))


def test_codecs_that_fit():
    parse(changed(noloco={"codec": "modulo", "codec_bits": 3, "codec_range": 5.0}))
    parse(changed(noloco={"codec": "modulo", "optimizer": "gossip"}))
    parse(changed(noloco={"codec": "modulo", "codec_bits": 2, "codec_range": 10.0, "allow_unstable": True}))


def test_what_is_only_simulated_is_refused_in_a_run(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(noloco={"codec": "absmax", "optimizer": "diloco", "codec_bits": 5})))
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    arguments = parser.parse_args(["--config", str(path)])
    assert load_config(arguments).noloco.codec_bits == 5
    with pytest.raises(ConfigError, match="only simulated"):
        load_run(arguments)
    assert cli.main(["check", "--config", str(path)]) == 2


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


@pytest.mark.parametrize("value", ["no", "auto", "newest", 200, "200", "step_00000200"])
def test_where_to_resume(value):
    assert parse(changed(run__resume=value)).run.resume == value


@pytest.mark.parametrize("value", ["yes", "latest", "step_", -3, True])
def test_where_not_to_resume(value):
    with pytest.raises(ConfigError, match=r"run\.resume"):
        parse(changed(run__resume=value))


def test_resume_on_the_command_line_is_a_setting(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw_config()))
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    for words, expected in {(): "no", ("--resume", "auto"): "auto", ("--resume", "40"): 40}.items():
        arguments = parser.parse_args(["--config", str(path), *words])
        assert load_config(arguments).run.resume == expected
