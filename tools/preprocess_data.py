r"""Turn text into the token files that training reads: Megatron's .bin/.idx, with a .json beside that describes them.

    python -m tools.preprocess_data corpus.jsonl books/ --tokenizer tokenizer.model --output data/corpus \
        --valid-fraction 0.02 --workers 8

Every document is tokenized whole and ends with the end-of-document token. The output depends on the text, the
tokenizer and the options, not on the number of workers. Where it is there already, nothing is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from noloco_mega.data import documents
from noloco_mega.data.documents import Record
from noloco_mega.data.tokenizer import Tokenizer

FORMAT = 1
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 512
BATCHES_AHEAD = 3
SHOWN_PROBLEMS = 20


class Encoded(NamedTuple):
    """One document: its tokens, the end-of-document token included, or the reason why there are none."""

    tokens: np.ndarray | None
    problem: str | None
    text_bytes: int
    draw: float
    """In [0, 1), a hash of the text: equal documents fall on the same side of a split."""


@lru_cache(maxsize=1)
def tokenizer_at(path: str) -> Tokenizer:
    """The tokenizer of this worker process, loaded for its first batch."""
    return Tokenizer(path)


def encode(tokenizer_path: str, key: str, batch: Sequence[Record]) -> list[Encoded]:
    """Tokenize a batch of documents; what one of them gets depends on nothing but its text."""
    tokenizer = tokenizer_at(tokenizer_path)
    encoded = []
    for record in batch:
        try:
            text = documents.text(record, key)
            tokens = tokenizer.encode(text)
            if not len(tokens):
                raise documents.BadDocumentError("empty")
        except ValueError as error:
            encoded.append(Encoded(None, f"{record.where}: {error}", 0, 0.0))
            continue
        raw = text.encode()
        draw = int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "little") / 2**48
        encoded.append(Encoded(np.append(tokens, np.int32(tokenizer.eod)), None, len(raw), draw))
    return encoded


def megatron_format() -> ModuleType:
    """megatron-core's reader and writer of the format. Imported late: it imports torch, which no worker needs."""
    with warnings.catch_warnings():
        # Importing any part of megatron-core tells that its GPU extensions are absent; nothing here computes.
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


class Output:
    """One PREFIX.bin / .json / .idx, written beside and renamed by `finish`, the .idx last: a file set is whole or
    has no .idx. Left without `finish`, it removes what it wrote."""

    def __init__(self, prefix: str, dtype: type[np.integer]) -> None:
        self.prefix, self.documents, self.tokens, self.max_token, self.text_bytes = prefix, 0, 0, 0, 0
        self._dtype = np.dtype(dtype)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._beside = {suffix: f"{prefix}{suffix}.partial-{os.getpid()}" for suffix in (".bin", ".json", ".idx")}
        self._builder = megatron_format().IndexedDatasetBuilder(self._beside[".bin"], dtype=dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._builder.data_file.close()
        for path in self._beside.values():
            Path(path).unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document. Raises ValueError for an id that the file's dtype would wrap."""
        largest = int(tokens.max())
        if tokens.min() < 0 or largest > np.iinfo(self._dtype).max:
            raise ValueError(f"token id {largest if largest > 0 else tokens.min()} does not fit into {self._dtype}")
        self._builder.add_document(tokens, [len(tokens)])
        self.documents += 1
        self.tokens += len(tokens)
        self.text_bytes += text_bytes
        self.max_token = max(self.max_token, largest)

    def finish(self, facts: dict[str, Any]) -> None:
        """Put the files in place; `facts` are noted in the .json."""
        self._builder.finalize(self._beside[".idx"])
        counts = {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "max_token": self.max_token,
            "dtype": self._dtype.name,
        }
        Path(self._beside[".json"]).write_text(json.dumps(counts | facts, indent=1) + "\n")
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix, path in self._beside.items():
            os.replace(path, self.prefix + suffix)


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Runs of records of about BATCH_BYTES."""
    batch: list[Record] = []
    size_bytes = 0
    for record in records:
        batch.append(record)
        size_bytes += record.size_bytes
        if size_bytes >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def encoded_batches(
    work: partial[list[Encoded]], records: Iterable[Record], workers: int
) -> Iterator[tuple[list[Record], list[Encoded]]]:
    """Every batch with its result, in the order of the input. At most BATCHES_AHEAD per worker are in memory."""
    if workers == 1:
        for batch in batches(records):
            yield batch, work(batch)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: deque[tuple[list[Record], Any]] = deque()
        for batch in batches(records):
            running.append((batch, pool.submit(work, batch)))
            if len(running) > BATCHES_AHEAD * workers:
                done, future = running.popleft()
                yield done, future.result()
        for done, future in running:
            yield done, future.result()


def fingerprint(
    paths: Sequence[Path], tokenizer: Tokenizer, key: str, valid_fraction: float, test_fraction: float = 0.0
) -> str:
    """What the output is a function of; kept in the .json to tell whether it is up to date."""
    parts = [FORMAT, documents.fingerprint(paths), tokenizer.digest, key, valid_fraction]
    parts += [test_fraction] if test_fraction else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def state(prefix: str, wanted: str) -> str:
    """One of current, missing, outdated (made from something else), foreign (no .json: not made by this program)."""
    binary, index, sidecar = (Path(prefix + suffix) for suffix in (".bin", ".idx", ".json"))
    if not sidecar.exists():
        return "foreign" if binary.exists() or index.exists() else "missing"
    try:
        facts = json.loads(sidecar.read_text())
        same = facts["fingerprint"] == wanted
        size_bytes = facts["tokens"] * np.dtype(facts["dtype"]).itemsize
    except (json.JSONDecodeError, KeyError, TypeError):
        return "outdated"
    if not (binary.exists() and index.exists() and binary.stat().st_size == size_bytes):
        return "missing"
    return "current" if same else "outdated"


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer_path: str | Path,
    output: str,
    *,
    key: str = "text",
    valid_fraction: float = 0.0,
    test_fraction: float = 0.0,
    workers: int = 1,
    force: bool = False,
    console: Console | None = None,
) -> list[str]:
    """Tokenize the inputs into OUTPUT, or into OUTPUT_train, OUTPUT_valid and OUTPUT_test, those that have a part;
    returns these path prefixes.

    Documents that can't be used are named on the console and counted in the .json. Raises ValueError if the inputs,
    the tokenizer or the output are unusable; nothing has been replaced by then.
    """
    console = console or Console(stderr=True)
    if min(valid_fraction, test_fraction) < 0 or valid_fraction + test_fraction >= 1 or workers < 1:
        raise ValueError(
            "--valid-fraction and --test-fraction must lie in [0, 1), also together, and --workers above 0: "
            f"{valid_fraction:g}, {test_fraction:g}, {workers}"
        )
    paths = documents.files(inputs)
    tokenizer = Tokenizer(tokenizer_path)
    # Ends of the parts in [0, 1), which a document's draw falls into; the first part takes what is beyond them.
    ends = {"valid": valid_fraction, "test": test_fraction and valid_fraction + test_fraction}
    ends = {name: end for name, end in ends.items() if end}
    prefixes = [f"{output}_{name}" for name in ("train", *ends)] if ends else [output]
    wanted = fingerprint(paths, tokenizer, key, valid_fraction, test_fraction)
    states = {prefix: state(prefix, wanted) for prefix in prefixes}
    foreign = [prefix for prefix, found in states.items() if found == "foreign"]
    if foreign and not force:
        raise ValueError(
            f"{foreign[0]}.bin or .idx exists without a .json of this program; choose another --output, or --force"
        )
    if set(states.values()) == {"current"} and not force:
        console.print(f"{', '.join(prefixes)}: up to date, nothing to do", highlight=False)
        return prefixes
    for prefix, found in states.items():
        reason = {"outdated": "the text, the tokenizer or the options changed", "current": "as asked"}.get(found, found)
        console.print(f"{prefix}: writing ({reason})", highlight=False)
    _write(paths, tokenizer, prefixes, key, list(ends.values()), workers, wanted, console)
    return prefixes


def _write(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    prefixes: Sequence[str],
    key: str,
    ends: Sequence[float],
    workers: int,
    wanted: str,
    console: Console,
) -> None:
    dtype = megatron_format().DType.optimal_dtype(tokenizer.vocab_size)
    started, unusable = time.monotonic(), 0
    work = partial(encode, str(tokenizer.path), key)
    with ExitStack() as stack:
        outputs = [stack.enter_context(Output(prefix, dtype)) for prefix in prefixes]
        progress = stack.enter_context(_progress(console))
        bar = progress.add_task("tokenizing", total=sum(path.stat().st_size for path in paths))
        for batch, encoded in encoded_batches(work, documents.records(paths, key), workers):
            for document in encoded:
                if document.tokens is None:
                    unusable += 1
                    if unusable <= SHOWN_PROBLEMS:
                        console.print(f"left out: {document.problem}", highlight=False, markup=False)
                    continue
                part = next((number for number, end in enumerate(ends, 1) if document.draw < end), 0)
                outputs[part].add(document.tokens, document.text_bytes)
            progress.advance(bar, sum(record.size_bytes for record in batch))
        for output in outputs:
            if not output.documents:
                raise ValueError(
                    f"no usable document for {output.prefix}; give more text" + (" or other fractions" if ends else "")
                )
        facts = {
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": tokenizer.digest,
            "left_out_of_input": unusable,
            "fingerprint": wanted,
        }
        for output in outputs:
            output.finish(facts)
    if unusable:
        console.print(f"{unusable} documents were left out", highlight=False)
    seconds, megabytes = time.monotonic() - started, sum(output.text_bytes for output in outputs) / 1e6
    for output in outputs:
        console.print(f"{output.prefix}: {output.documents} documents, {output.tokens} tokens", highlight=False)
    console.print(f"{megabytes:.1f} MB in {seconds:.1f} s, {megabytes / seconds:.2f} MB/s", highlight=False)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Tokenize text into Megatron's .bin/.idx.")
    options.add_argument("inputs", nargs="+", help=f"folders or files ({documents.KINDS})")
    options.add_argument("--tokenizer", required=True, help="a sentencepiece model, or a Hugging Face fast tokenizer")
    options.add_argument("--output", required=True, help="path prefix of the files to write")
    options.add_argument("--key", default="text", help="field of a .jsonl or column of a .parquet with the text")
    options.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        help="set about this part of the documents aside: writes OUTPUT_train and OUTPUT_valid",
    )
    options.add_argument("--test-fraction", type=float, default=0.0, help="the same for OUTPUT_test")
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenize")
    options.add_argument("--force", action="store_true", help="write even if the output exists")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        preprocess(
            options.inputs,
            options.tokenizer,
            options.output,
            key=options.key,
            valid_fraction=options.valid_fraction,
            test_fraction=options.test_fraction,
            workers=options.workers,
            force=options.force,
        )
    except ValueError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
