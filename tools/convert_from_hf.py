"""From a Hugging Face model to a folder of weights that training starts from.

    python tools/convert_from_hf.py --model DIR --output WEIGHTS

Then put the printed "model" block into a config, and "init_from": "WEIGHTS" into its "run" block. The weights suit any
topology. Only safetensors are read; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from noloco_mega import convert, streamed
from noloco_mega.entry import guarded


def run(arguments: argparse.Namespace) -> None:
    size = streamed.size_bytes(arguments.max_shard_size)
    model, remarks = convert.import_model(arguments.model, arguments.output, max_shard_bytes=size)
    for remark in remarks:
        print(remark)
    print(f"{arguments.output}: written. For a config:")
    block = {key: value for key, value in asdict(model).items() if value is not None}
    data = {"tokenizer": str(arguments.output / "tokenizer")} if (arguments.output / "tokenizer").exists() else {}
    print(json.dumps({"model": block, "data": data, "run": {"init_from": str(arguments.output)}}, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json and safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument("--max-shard-size", default="5GB", help="of a weights file (default: %(default)s)")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
