"""A small corpus, tokenizer and token files, made once by the project's own programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 512


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """The `data` block of a config, on about 1 MB of the standard library's source."""
    folder = tmp_path_factory.mktemp("text")

    def tool(*words):
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.model"
    tool("tools/stdlib_corpus.py", "--output", corpus, "--max-megabytes", 1)
    tool("tokenizer/train_tokenizer.py", corpus, "--output", tokenizer, "--vocab-size", VOCABULARY)
    tool(
        "tools/preprocess_data.py", corpus, "--tokenizer", tokenizer, "--output", folder / "text",
        "--valid-fraction", 0.1, "--workers", 1,
    )  # fmt: skip
    return {"train": str(folder / "text_train"), "valid": str(folder / "text_valid"), "tokenizer": str(tokenizer)}


@pytest.fixture
def tiny(text_data, tmp_path):
    """A function that gives a config of 4 replicas of 2 stages, as its file's JSON, with dotted keys changed."""

    def build(**changes):
        raw = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}},
            "topology": {"replicas": 4, "stages": 2},
            "model": {
                "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4,
                "num_query_groups": 2, "ffn_hidden_size": 64, "seq_length": 32,
            },
            "data": text_data,
            "noloco": {
                "inner_steps": 5, "heartbeat_seconds": 3.0, "exchange_deadline_seconds": 20.0,
                "link_timeout_seconds": 60.0, "rendezvous_timeout_seconds": 60.0,
            },
            "run": {"name": "test", "directory": str(tmp_path), "steps": 20, "log_every": 1, "eval_microbatches": 2,
                    "tensorboard": False},
        }  # fmt: skip
        for dotted, value in changes.items():
            *parents, last = dotted.split("__")
            block = raw
            for parent in parents:
                block = block.setdefault(parent, {})
            block[last] = value
        json.dumps(raw)
        return raw

    return build
