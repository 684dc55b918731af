"""The static report: its figures by hand, and the refusals of links that cannot carry a run."""

import json
import re

import pytest
import torch

from noloco_mega import checks, cli, costs, report
from noloco_mega.config import ConfigError, parse
from noloco_mega.outer import coding
from tests.unit.test_config import changed


def rows(text, first_word):
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first_word]]


def test_the_table_places_every_rank():
    config = parse(changed(topology={"replicas": 4, "stages": 2, "sites": [[0, 3], [1, 2]]}))
    text = report.describe(config, {rank: f"node{rank // 4}" for rank in range(8)})
    lines = [line.split() for line in text.splitlines() if re.match(r"\s*\d+ .*node\d$", line)]
    # rank, replica, stage, tensor, data, site, host
    assert lines[3] == ["3", "1", "1", "0", "0", "1", "node0"]
    assert lines[6] == ["6", "3", "0", "0", "0", "0", "node1"]
    assert len(lines) == 8


def test_bytes_by_hand():
    """4 replicas x 3 stages x 2 tensor ranks x 2 data ranks, bf16, written out as a person would."""
    config = parse(
        changed(
            topology={"replicas": 4, "stages": 4, "tensor": 2, "data": 2},
            bf16={"enabled": True},
        )
    )
    message = 4 * 64 * 64 * 2  # samples · tokens · hidden · bytes
    traffic = costs.traffic(config)
    # An end stage has one neighbour, a middle one two; two microbatches.
    assert traffic.rank_inner == (2 * message, 4 * message, 4 * message, 2 * message)
    assert traffic.replica_inner == 2 * 2 * 12 * message
    assert traffic.replica_inner_outside == traffic.replica_inner * 3 / 4
    assert traffic.rank_outer[1] == 4 * costs.stage_parameters(config, 1) / 2
    assert traffic.replica_outer == 4 * sum(traffic.rank_outer)
    fixed = parse(changed(noloco__routing="fixed"))
    assert costs.traffic(fixed).replica_inner_outside == 0 < costs.traffic(fixed).replica_inner
    sites = parse(changed(topology={"replicas": 4, "stages": 2, "sites": [[0, 1], [2, 3]]}))
    assert costs.traffic(sites).replica_inner_outside == costs.traffic(sites).replica_inner / 2
    parallel = parse(changed(topology={"replicas": 4, "stages": 2, "tensor": 2, "sequence_parallel": True}))
    assert costs.traffic(parallel).replica_inner == costs.traffic(parse(changed())).replica_inner


def test_an_outer_optimizer_that_never_exchanges_costs_nothing():
    config = parse(changed(noloco__optimizer="local"))
    held, sent = costs.memory(config, 0, on_gpu=False), costs.traffic(config)
    assert held.phi == held.delta == held.host_buffers == 0 and sent.replica_outer == 0
    assert "no stability range" in report.describe(config)


def test_bytes_of_the_baselines_by_hand():
    """Three replicas, D = 2: a ring sends 2/3 of the buffer twice; pairs send all of it once."""
    cut = {"topology": {"replicas": 3, "stages": 2, "data": 2}}
    sent = {name: costs.traffic(parse(changed(**cut, noloco__optimizer=name))) for name in checks.OUTER_OPTIMIZERS}
    share = costs.stage_parameters(parse(changed(**cut)), 1) // 2
    assert {name: traffic.rank_outer[1] for name, traffic in sent.items()} == {
        "noloco": 4 * share, "gossip": 4 * share, "diloco": 2 * 4 * share * 2 // 3, "allreduce": 0, "local": 0,
    }  # fmt: skip
    assert {name for name, traffic in sent.items() if traffic.replica_gradients} == {"allreduce"}
    assert sent["allreduce"].rank_gradients == sent["diloco"].rank_outer
    held = {name: costs.memory(parse(changed(noloco__optimizer=name)), 0, on_gpu=True) for name in sent}
    assert {name for name, memory in held.items() if memory.phi} == {"noloco", "diloco"}
    assert {name for name, memory in held.items() if memory.host_buffers} == {"noloco", "gossip"}
    text = report.describe(parse(changed(noloco__optimizer="diloco")))
    assert "a lost replica ends the run" in text and "exchange buffers of no bytes" in text


@pytest.mark.parametrize("optimizer", ["noloco", "gossip"])
def test_bytes_and_memory_of_a_codec(optimizer):
    """Against what the coding of a rank's share makes: its messages and what it reads."""
    plain = {"optimizer": optimizer, "group_size": 3}
    config = parse(changed(noloco={**plain, "codec": "modulo", "codec_bits": 5}))
    share = torch.zeros(costs.stage_parameters(config, 1))
    found = coding.build(config.noloco, [share], 0, [share], 1.0)
    message, buffers = found.write(0, 0), found.buffers(2)
    read = found.read(0, 0, dict(zip((1, 2), buffers, strict=True)))
    held = costs.memory(config, 1, on_gpu=False)
    assert costs.traffic(config).rank_outer[1] == 2 * sum(tensor.nbytes for tensor in message)
    tensors = [*message, *buffers[0], *buffers[1], *read[1].tensors, *read[2].tensors]
    assert held.host_buffers == sum(tensor.nbytes for tensor in tensors)
    assert held.phi == 4 * len(share) and (held.delta > 0) == (optimizer == "noloco")
    text = report.describe(config)
    assert "5 bits and 1/8" in text and "4·P/D·(n − 1) and n messages" in text
    assert "takes" not in report.describe(parse(changed(noloco=plain))).splitlines()[-1]


def test_the_time_of_averages_over_everybody():
    """Rings at 1 Gbit/s, by hand; they take their time, but no deadline is theirs."""
    for name in ("diloco", "allreduce"):
        config = parse(changed(noloco__routing="fixed", noloco__optimizer=name))
        traffic = costs.traffic(config)
        seconds = (traffic.replica_outer + traffic.replica_gradients) * 8 / 1e9
        verdict = report.judge(config, links(gbit_per_second=1.0))
        spoken = f"{seconds * 1000:.3g} ms"
        assert (f"gradients {spoken} more" if name == "allreduce" else f"an exchange {spoken}") in verdict
        report.judge(config, links(gbit_per_second=1e-6))


def links(**changes):
    return report.Links(**{"gbit_per_second": 10.0, "site_gbit_per_second": 10.0, "rank_tflops": 1e-3, **changes})


def test_links_that_carry_a_run_and_links_that_do_not():
    config = parse(changed())
    # By hand: 2 microbatches x 64 kB x 2 ways x 3/4 = 196.6 kB leave a replica per inner step, 1.57 Mbit.
    assert costs.traffic(config).replica_inner_outside == 196_608
    assert "They can carry this run" in report.judge(config, links())
    # 512 tokens · 6 · 229,952 multiplied parameters / (2 ranks · 1 GFLOP/s) = 353 ms of computing per inner step.
    multiplied = costs.model_parameters(config) - 1024 * 64
    assert costs.inner_step_flops(config) == 512 * 6 * multiplied
    seconds = costs.inner_step_flops(config) / 2e9
    enough = 196_608 * 8 / seconds / 1e9
    report.judge(config, links(gbit_per_second=enough * 1.01))
    with pytest.raises(ConfigError, match=r"set noloco\.routing to fixed"):
        report.judge(config, links(gbit_per_second=enough * 0.99))
    report.judge(parse(changed(noloco__routing="fixed")), links(gbit_per_second=enough * 0.99))


def test_an_exchange_that_takes_longer_than_it_may_is_refused():
    config = parse(changed(noloco__routing="fixed"))
    limit = costs.traffic(config).replica_outer * 8 / 180 / 1e9
    report.judge(config, links(gbit_per_second=1.01 * limit))
    with pytest.raises(
        ConfigError, match=r"the 180 s that noloco.link_timeout_seconds leaves it.*raise that above 302"
    ):
        report.judge(config, links(gbit_per_second=0.99 * limit))
    sites = parse(changed(noloco__routing="fixed", topology__sites=[[0, 1], [2, 3]]))
    with pytest.raises(ConfigError, match="link_timeout_seconds"):
        report.judge(sites, links(site_gbit_per_second=0.9 * limit))


def test_the_stability_of_every_form_is_told():
    tournament = {"noloco__pairing": "tournament", "noloco__nesterov": True}
    text = report.describe(parse(changed(**tournament)))
    assert 'among 4 replicas (pairing "tournament", look-ahead), γ must lie in (0, 1.399)' in text
    follows = {"noloco__combine": "after", "noloco__gamma": 0.5, "noloco__gamma_at_zero_lr": 1.0}
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    text = report.describe(parse(changed(**follows, scheduler=cosine)))
    # A third of the variance is left by γ = 1, half of it by γ = 0.5: 1 − k + k·(1 − γ)², k = 2/3.
    assert "multiplied by 0.707 with γ = 0.5, by 0.577 with γ = 1, to which γ goes as the learning rate" in text


def test_the_command_prints_and_refuses(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(changed()))
    assert cli.main(["check", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 replicas x 2 stages" in text and "γ must lie in (0, 1.800)" in text
    assert cli.main(["check", "--config", str(path), "--link-gbit-per-second", "1e-6"]) == 2
    assert "these links cannot carry this run" in capsys.readouterr().err
    assert cli.main(["check", "--config", str(path), "--set", "topology.stages=3"]) == 2
    assert "choose stages from [1, 2, 4]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["check", "--config", str(path), "--link-gbit-per-second", "0"])
    assert "must be positive" in capsys.readouterr().err
