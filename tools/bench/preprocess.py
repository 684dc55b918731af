"""How fast is preprocessing, beside sentencepiece's own encoding of the same texts? One core, one run, by turns.

    python -m tools.bench.preprocess [INPUT ... --tokenizer FILE] [--megabytes 12] [--rounds 3]

Without inputs: the standard library's source, with a tokenizer of 8,192 tokens that is trained on it first. Prints the
median over rounds of each one's MB/s (of text, in seconds of this process on the CPU, so that other load counts less)
and the ratio; the same for all documents joined to one. Preprocessing reads, tokenizes, hashes, writes and syncs;
sentencepiece only encodes texts that are in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sentencepiece
from rich.console import Console

from noloco_mega.data import documents
from noloco_mega.entry import guarded
from tokenizer import train_tokenizer
from tools import preprocess_data, stdlib_corpus

VOCABULARY = 8192


def prepared(options: argparse.Namespace, folder: Path) -> tuple[list[Path], Path]:
    """The input files and the tokenizer. Raises ValueError where only one of both is given."""
    if bool(options.inputs) != bool(options.tokenizer):
        raise ValueError("give both inputs and --tokenizer, or neither")
    if options.inputs:
        return documents.files(options.inputs), options.tokenizer
    text, model = folder / "corpus.jsonl", folder / "tokenizer.model"
    with contextlib.redirect_stdout(io.StringIO()):
        stdlib_corpus.main(["--output", str(text), "--max-megabytes", str(options.megabytes)])
    pieces = train_tokenizer.chunks([text], "text", 4_000_000, 0)
    model.write_bytes(train_tokenizer.train(pieces, VOCABULARY))
    return [text], model


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def compare(name: str, paths: Sequence[Path], model: Path, texts: Sequence[bytes], rounds: int, folder: Path) -> None:
    """Print one line: both speeds and their ratio, round by round in turn."""
    whole = sentencepiece.SentencePieceProcessor(model_file=str(model))
    quiet = Console(file=io.StringIO())
    megabytes = sum(map(len, texts)) / 1e6

    def ours() -> None:
        preprocess_data.preprocess(paths, model, str(folder / "out"), force=True, resume=False, console=quiet)

    def theirs() -> None:
        for text in texts:
            whole.encode(text, return_type="numpy")

    pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(rounds)]
    speeds = [statistics.median(megabytes / pair[side] for pair in pairs) for side in (0, 1)]
    ratio = statistics.median(their / our for our, their in pairs)
    print(f"{name:<26} {speeds[0]:8.2f} {speeds[1]:18.2f} {ratio:8.2f}")


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, model = prepared(options, folder)
        texts = [documents.text(record, options.key).encode() for record in documents.records(paths, options.key)]
        joined = folder / "joined.txt"
        joined.write_bytes(b"\n".join(texts))
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"{len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB; load of the machine: {load}")
        print(f"{'MB/s on one core':<26} {'ours':>8} {'sentencepiece':>18} {'ratio':>8}")
        compare("as they are", paths, model, texts, options.rounds, folder)
        compare("joined to one document", [joined], model, [joined.read_bytes()], options.rounds, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path, nargs="*", help=f"folders or files ({documents.KINDS})")
    parser.add_argument("--tokenizer", type=Path, help="a sentencepiece model")
    parser.add_argument("--key", default="text", help="field of a .jsonl or column of a .parquet with the text")
    parser.add_argument("--megabytes", type=float, default=12.0, help="of the standard library (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
