"""Which GPU a rank takes, with torch.cuda's answers made up, and how NCCL's waits are bounded."""

import os

import pytest
import torch

from noloco_mega import device


@pytest.fixture
def gpus(monkeypatch):
    """Set the number of GPUs that torch shows and CUDA_VISIBLE_DEVICES; returns the indices that were taken."""
    taken = []
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "1")  # so that it is restored

    def show(count, visible=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return taken

    return show


@pytest.mark.parametrize(
    ("count", "visible", "local_rank", "index"),
    [(8, None, 5, 5), (1, None, 0, 0), (1, "6", 6, 0), (1, "GPU-8932f937", 3, 0), (2, "4,5", 1, 1)],
)
def test_each_local_rank_has_its_gpu(gpus, count, visible, local_rank, index):
    taken = gpus(count, visible)
    assert device.select(local_rank) == device.Device(torch.device("cuda", index), "nccl") and taken == [index]


@pytest.mark.parametrize(("count", "visible", "local_rank"), [(1, None, 1), (2, "4,5", 2), (8, None, 8)])
def test_a_rank_without_a_gpu_is_told_so(gpus, count, visible, local_rank):
    taken = gpus(count, visible)
    with pytest.raises(ValueError, match=f"local rank {local_rank} has no GPU: this node shows {count}"):
        device.select(local_rank)
    assert not taken


def test_a_node_without_gpus_computes_on_its_cpu(gpus):
    gpus(0)
    assert device.select(3) == device.Device(torch.device("cpu"), "gloo")


@pytest.mark.parametrize(("seconds", "value"), [(60.0, "60"), (0.2, "1"), (1.5, "2")])
def test_nccls_waits_are_bounded_in_whole_seconds(monkeypatch, seconds, value):
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "x")
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")
    device.bound_nccl(seconds)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == value
    device.bound_nccl(7)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == value, "what is set stays"


def test_a_config_that_wants_a_gpu_is_refused_without_one(gpus):
    gpus(0, "7")
    with pytest.raises(ValueError, match=r'run\.device is "cuda".*sees no GPU: CUDA_VISIBLE_DEVICES is 7 and torch'):
        device.select(0, "cuda")
    assert device.select(0).backend == "gloo"


def test_the_cpu_is_used_when_it_is_asked_for(gpus):
    taken = gpus(8)
    assert not device.select(3, "cpu").is_cuda and not taken
