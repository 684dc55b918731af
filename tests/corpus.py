"""A small text and its tokenizer, token files and config, for tests of the data path."""

import json
import random
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from noloco_mega.config import Config, parse
from tokenizer import train_tokenizer

SENTENCE = "the outer step of a replica sends its slow weights to a partner drawn anew for each inner phase"
WORDS = SENTENCE.split()
STRANGE = [
    "  spaces at both ends and   inside  ",
    "\ttabs\r\nand line ends\n\n\n",
    "accents é, 漢字, 🎉 and e\u0301",
    "a NUL \0 and other controls \x01\x1f\x7f",
    "<s> </s> <unk> <0x41> are only text",
    "0123456789 1e-5",
    " ",
    "\n",
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 120 words, in lines, the strange ones first."""
    draw = random.Random(seed)
    ordinary = [
        "".join(draw.choice(WORDS) + draw.choice("    \n") for _ in range(draw.randint(1, 120)))
        + f"number {draw.random()}"
        for _ in range(count - len(STRANGE))
    ]
    return [*STRANGE, *ordinary]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def write_tokenizer(path: Path, documents: list[str], vocab_size: int = 384) -> Path:
    path.write_bytes(train_tokenizer.train(iter(documents), vocab_size))
    return path


def write_tokens(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    """PREFIX.bin and PREFIX.idx by megatron-core's own writer, and no .json."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def random_documents(tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Documents of random length with `tokens` random ids in all."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, tokens)
    ends = np.unique(rng.integers(1, tokens, max(tokens // 40, 1)))
    return [part.tolist() for part in np.split(ids, ends)]


def config(
    folder: Path,
    *,
    micro_batch: int = 2,
    microbatches: int = 2,
    data: int = 1,
    vocab_size: int = 384,
    seq_length: int = 16,
    eval_microbatches: int = 2,
    cache: str | None = None,
) -> Config:
    """A run of four replicas on FOLDER/train, FOLDER/valid and FOLDER/t.model."""
    files = {"train": str(folder / "train"), "valid": str(folder / "valid"), "tokenizer": str(folder / "t.model")}
    return parse(
        {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "topology": {"replicas": 4, "data": data},
            "model": {
                "vocab_size": vocab_size,
                "hidden_size": 32,
                "num_layers": 1,
                "num_attention_heads": 2,
                "ffn_hidden_size": 32,
                "seq_length": seq_length,
            },
            "data": files | ({"cache": cache} if cache else {}),
            "run": {"name": "test", "steps": 10, "eval_microbatches": eval_microbatches},
        }
    )
