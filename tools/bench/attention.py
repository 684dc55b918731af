"""How fast and how large is our core attention next to megatron-core's unfused one? Both, side by side in one run.

    python -m tools.bench.attention [--length 1024 --batch 2 --heads 12 --groups 12 --width 64 --rounds 5]

Time is the median over rounds of one forward and backward pass, the two modules taking turns. Memory is the highest
resident set size of a pass above the one before it (glibc on Linux; the CPU's only).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from noloco_mega import device, mcore_compat
from noloco_mega.model.attention import SdpaCoreAttention

MIB = 2**20


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status: VmRSS (now) or VmHWM (the highest since `forget_peak`)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Give freed memory back to the system, or a pass would run in what the one before left; then reset VmHWM."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(module: torch.nn.Module, inputs: list[torch.Tensor], mask: torch.Tensor | None) -> tuple[float, int]:
    """(seconds, peak bytes) of one forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    forget_peak()
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    module(*leaves, mask).sum().backward()
    seconds = time.perf_counter() - start
    return seconds, resident_bytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"length": 1024, "batch": 2, "heads": 12, "groups": 12, "width": 64, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = parser.parse_args()
    if device.select(0).is_cuda:
        parser.error("this bench reads the CPU's memory; run it with CUDA_VISIBLE_DEVICES= (empty)")
    mcore_compat.prepare()
    parallel_state._set_global_memory_buffer()
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=chosen.heads * chosen.width,
        num_attention_heads=chosen.heads,
        num_query_groups=chosen.groups,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bf16=chosen.dtype == "bfloat16",
    )
    arguments = {
        "config": settings,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    }
    causal = torch.triu(torch.ones(chosen.length, chosen.length, dtype=torch.bool), 1)[None, None]
    modules = {"ours": (SdpaCoreAttention(**arguments), None), "unfused": (DotProductAttention(**arguments), causal)}
    inputs = [
        torch.randn(chosen.length, chosen.batch, count, chosen.width, dtype=getattr(torch, chosen.dtype))
        for count in (chosen.heads, chosen.groups, chosen.groups)
    ]
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in modules}
    for round_number in range(chosen.rounds + 1):
        for name, (module, mask) in modules.items():
            result = measure(module, inputs, mask)
            if round_number:  # the first one warms up
                results[name].append(result)
    medians = {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in results.items()}
    print(f"{vars(chosen)}, {torch.get_num_threads()} threads")
    for name, (seconds, peak) in medians.items():
        print(f"{name:8} {seconds * 1000:9.1f} ms {peak / MIB:9.1f} MiB")
    ratios = [theirs / ours for ours, theirs in zip(medians["ours"], medians["unfused"], strict=True)]
    print(f"unfused / ours: {ratios[0]:.2f} x the time, {ratios[1]:.2f} x the memory")


if __name__ == "__main__":
    main()
