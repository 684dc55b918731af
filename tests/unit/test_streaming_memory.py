"""Converting a model several times larger than a shard needs the memory of about two shards."""

import subprocess
import sys
from pathlib import Path

import torch

from noloco_mega import merging
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.config import Model
from noloco_mega.model import hf
from noloco_mega.streamed import Planned, new_folder, write_weights
from tests import corpus

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 50_000_000
MODEL = {
    "vocab_size": 4096, "hidden_size": 1024, "num_layers": 8, "num_attention_heads": 8, "num_query_groups": 8,
    "ffn_hidden_size": 3072, "seq_length": 32,
}  # fmt: skip
TINY = MODEL | {"vocab_size": 384, "hidden_size": 32, "num_layers": 1, "ffn_hidden_size": 32}
MEASURE = """
import runpy, sys
tool = runpy.run_path(sys.argv[1])
sys.argv[1:2] = []
assert tool["main"]() == 0
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""


def peak_bytes(tool, *words):
    """The peak of resident memory of a process that runs a tool."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(ROOT / "tools" / tool), *map(str, words)]
    output = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=200).stdout
    return int(output.split()[-1])


def both_ways(folder, block, tokenizer):
    """The peaks of an export and of an import of a model, and its size in bytes."""
    model = Model(**block)
    planned = [Planned(row.ours, hf.shapes(row, model)[0], torch.float32) for row in hf.table(model)]
    with new_folder(folder / "ours") as draft:
        tensors = (torch.full(plan.shape, 0.01) for plan in planned)
        write_weights(draft, planned, tensors, {"step": 0, "replica": 0, "model": block}, SHARD_BYTES, "made")
    size = ["--max-shard-size", SHARD_BYTES]
    words = ["--checkpoint", folder / "ours", "--output", folder / "hub", "--tokenizer", tokenizer, *size]
    export = peak_bytes("convert_to_hf.py", *words)
    again = peak_bytes("convert_from_hf.py", "--model", folder / "hub", "--output", folder / "again", *size)
    assert merging.planned(SavedReplica(folder / "again")) == planned
    return export, again, sum(plan.size_bytes for plan in planned)


def test_both_directions_stay_within_two_shards(tmp_path):
    tokenizer = corpus.write_tokenizer(tmp_path / "t.model", corpus.texts(300))
    *tiny, _ = both_ways(tmp_path / "tiny", TINY, tokenizer)
    *large, total = both_ways(tmp_path / "large", MODEL, tokenizer)
    assert total > 9 * SHARD_BYTES
    # What the libraries take themselves is in both.
    for less, more in zip(tiny, large, strict=True):
        print(f"{(more - less) / 1e6:.1f} MB for {total / 1e6:.1f} MB in shards of {SHARD_BYTES / 1e6:.1f} MB")
        assert more - less < 2 * SHARD_BYTES
