"""Does the routed schedule deadlock under NCCL's rules? Batched never, unbatched it does."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

from noloco_mega import mcore_compat
from noloco_mega.plan.routing import IdentityRoutes, RandomRoutes
from tests.unit import nccl_rules
from tests.unit.nccl_rules import Transfer


class Recorder(P2PCommunicator):
    """Writes down what the schedule asks for, and answers receives with zeros."""

    def __init__(self, stage, stages, settings):
        self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: stages)
        self.config, self.virtual_pipeline_model_parallel_size = settings, None
        self.calls, self.counts = [], dict.fromkeys(nccl_rules.KINDS, 0)

    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, **_):
        wanted = (tensor_send_prev is not None, recv_prev, tensor_send_next is not None, recv_next)
        call = [Transfer(kind, self.counts[kind]) for kind, want in zip(nccl_rules.KINDS, wanted, strict=True) if want]
        for transfer in call:
            self.counts[transfer.kind] += 1
        self.calls.append(call)
        answers = [torch.zeros(tensor_shape, requires_grad=True) if want else None for want in (recv_prev, recv_next)]
        return *answers, None


class Stage(torch.nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.config, self.model_type = settings, ModelType.encoder_or_decoder
        self.weight, self.input = torch.nn.Parameter(torch.ones(1)), None

    def set_input_tensor(self, tensors):
        self.input = tensors[0]

    def forward(self):
        return self.weight * (torch.ones(2, 1, 4) if self.input is None else self.input)


def recorded(stage, stages, microbatches):
    """The calls of a real run of megatron-core's schedule on one stage."""
    mcore_compat.prepare()
    settings = TransformerConfig(
        num_layers=stages,
        hidden_size=4,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
    )
    recorder, one = Recorder(stage, stages, settings), SimpleNamespace(size=lambda: 1)
    schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=lambda _, model: (model(), lambda output: (output.sum(), {})),
        data_iterator=None,
        model=Stage(settings),
        num_microbatches=microbatches,
        seq_length=2,
        micro_batch_size=1,
        p2p_communicator=recorder,
        pg_collection=SimpleNamespace(tp=one, cp=one, pp=recorder.pp_group, embd=None, pos_embd=None, dp_cp=one),
    )
    return recorder.calls


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_model_of_the_schedule_is_the_schedule(stages, monkeypatch):
    # Without torch.distributed megatron-core takes every stage for the only one.
    monkeypatch.setattr(schedules, "is_pp_first_stage", lambda group: group.rank() == 0)
    monkeypatch.setattr(schedules, "is_pp_last_stage", lambda group: group.rank() == group.size() - 1)
    for microbatches in (1, 2, 4, 7, 12):
        for stage in range(stages):
            expected = nccl_rules.one_forward_one_backward(stage, stages, microbatches)
            assert recorded(stage, stages, microbatches) == expected, (stage, microbatches)


def all_ranks(stages, replicas, microbatches, routes):
    calls = [nccl_rules.one_forward_one_backward(stage, stages, microbatches) for stage in range(stages)]
    return [
        nccl_rules.along_routes(calls[stage], stage, replica, stages, routes)
        for replica in range(replicas)
        for stage in range(stages)
    ]


def settings(seed):
    """S 2-8, N 1-16, M 1-32; N and M uniform in their logarithms, to keep most of the runs small."""
    draw = random.Random(seed)
    return draw.randint(2, 8), round(16 ** draw.random()), round(32 ** draw.random())


@pytest.mark.parametrize("tens", range(10))
def test_grouped_calls_never_deadlock(tens):
    for seed in range(tens * 100, tens * 100 + 100):
        stages, replicas, microbatches = settings(seed)
        ranks = all_ranks(stages, replicas, microbatches, RandomRoutes(seed, range(replicas)))
        assert nccl_rules.stuck(ranks) == [], (seed, stages, replicas, microbatches)


ORDERS = {
    "as megatron-core lists them": lambda call: call,
    "sends first": lambda call: sorted(call, key=lambda operation: operation[0] != "send"),
    "receives first": lambda call: sorted(call, key=lambda operation: operation[0] != "recv"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_single_calls_deadlock(order):
    deadlocks = 0
    for seed in range(40):
        stages, replicas, microbatches = settings(seed)
        ranks = all_ranks(stages, replicas, microbatches, RandomRoutes(seed, range(replicas)))
        deadlocks += nccl_rules.stuck([nccl_rules.unbatched(calls, ORDERS[order]) for calls in ranks]) != []
    assert deadlocks > 20


def test_smallest_deadlock_is_two_stages_that_both_send_first():
    ranks = all_ranks(2, 1, 2, IdentityRoutes())
    assert nccl_rules.stuck(ranks) == []
    assert nccl_rules.stuck([nccl_rules.unbatched(calls, ORDERS["sends first"]) for calls in ranks]) == [0, 1]


def test_rules_on_a_circle_of_three():
    """Worked by hand: three ranks each send to the next one and receive from the one before."""
    circle = [[[("send", (r + 1) % 3, (r,)), ("recv", (r - 1) % 3, ((r - 1) % 3,))]] for r in range(3)]
    assert nccl_rules.stuck(circle) == []
    assert nccl_rules.stuck([nccl_rules.unbatched(calls, ORDERS["sends first"]) for calls in circle]) == [0, 1, 2]
    with pytest.raises(AssertionError, match="mixed up"):
        nccl_rules.stuck([[[("send", 1, ("a",))]], [[("recv", 0, ("b",))]]])
