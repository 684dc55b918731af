"""Every place in megatron-core that this package patches or overrides is still what it was."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

import pytest
import torch
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.transformer import attention, torch_norm
from megatron.core.transformer.dot_product_attention import DotProductAttention

from noloco_mega import mcore_compat
from noloco_mega.comm.routed_p2p import RoutedP2PCommunicator
from noloco_mega.model.attention import SdpaCoreAttention


def test_version():
    assert version("megatron-core") == "0.16.1"


@pytest.mark.parametrize("module", [rotary_pos_embedding, mappings])
def test_current_device_is_asked_through_torch_cuda(module):
    assert "torch.cuda.current_device()" in inspect.getsource(module)


def test_schedules_name_cuda_only_in_their_token_counters():
    source = inspect.getsource(schedules)
    assert len(re.findall(r'torch\.zeros\(\[\], dtype=torch\.int, device="cuda"\)', source)) == 3
    mentions = [line.strip() for line in source.splitlines() if re.search(r"""["']cuda["']""", line)]
    # The other one is the autocast of a run that asks for it; ours doesn't.
    assert [line for line in mentions if "torch.zeros" not in line] == [
        'context_manager = torch.autocast("cuda", dtype=config.autocast_dtype)'
    ]


def test_rng_tracker_has_a_no_op_kind():
    parameters = inspect.signature(mcore_random.initialize_rng_tracker).parameters
    assert {"inference_rng_tracker", "force_reset"} <= parameters.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA exists")
def test_prepare_twice_is_prepare_once():
    mcore_compat.prepare()
    proxy, tracker = schedules.torch, mcore_random.get_cuda_rng_tracker()
    mcore_compat.prepare()
    assert schedules.torch is proxy and mcore_random.get_cuda_rng_tracker() is tracker
    assert torch.cuda.current_device() == torch.device("cpu")
    assert proxy.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert proxy.zeros(2, 3).shape == (2, 3) and proxy.nn is torch.nn
    with tracker.fork():
        assert torch.empty(2).device.type == "cpu"


def test_every_transfer_of_the_communicator_goes_through_the_overridden_method():
    stock, ours = P2PCommunicator._communicate, RoutedP2PCommunicator._communicate
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(stock).parameters)
    transfers = [name for name in vars(P2PCommunicator) if name.startswith(("send_", "recv_"))]
    assert len(transfers) == 9
    for name in transfers:
        source = inspect.getsource(getattr(P2PCommunicator, name))
        assert "self._communicate(" in source and "torch.distributed" not in source


def test_core_attention_is_called_and_built_as_the_stock_one():
    for method in ("__init__", "forward"):
        stock = inspect.signature(getattr(DotProductAttention, method)).parameters
        ours = inspect.signature(getattr(SdpaCoreAttention, method)).parameters
        # Attention never passes its own dropout.
        assert [name for name in stock if name != "attention_dropout"] == list(ours)
    assert "attention_dropout=" not in inspect.getsource(attention.Attention.__init__)


def test_stock_norm_still_refuses_sequence_parallelism():
    # The day it doesn't, SequenceParallelRMSNorm can go.
    assert "sequence parallel not supported" in inspect.getsource(torch_norm.WrappedTorchNorm)
