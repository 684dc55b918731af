"""Write a tokenizer for transformers' AutoTokenizer, with the ids that sentencepiece gives.

python -m tokenizer.export_hf tokenizer.model --output FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from noloco_mega.data import tokenizer_json
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.entry import guarded
from noloco_mega.streamed import new_folder


def run(options: argparse.Namespace) -> None:
    tokenizer = Tokenizer(options.tokenizer)
    with new_folder(options.output) as draft:
        tokenizer_json.write(options.tokenizer, draft, options.context)
    print(f"{options.output}: {tokenizer.vocab_size} tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="a sentencepiece BPE model with byte fallback")
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument("--context", type=int, default=2048, help="tokens that models take (default: %(default)s)")
    return guarded(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
