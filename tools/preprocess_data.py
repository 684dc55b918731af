r"""Turn text into the token files that training reads: Megatron's .bin/.idx, with a .json beside that describes them.

    python -m tools.preprocess_data corpus.jsonl books/ --tokenizer tokenizer.model --output data/corpus \
        --valid-fraction 0.02 --workers 8

Every document is tokenized whole and ends with the end-of-document token. The output depends on the text, the
tokenizer and the options, not on the number of workers. Where it is there already, nothing is done. A run that was
killed left OUTPUT.unfinished; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from noloco_mega.data import documents, token_files
from noloco_mega.data.documents import Record
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.entry import guarded

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
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        running: deque[tuple[list[Record], Any]] = deque()
        try:
            for batch in batches(records):
                running.append((batch, pool.submit(work, batch)))
                if len(running) > BATCHES_AHEAD * workers:
                    done, future = running.popleft()
                    yield done, future.result()
            for done, future in running:
                yield done, future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker was killed (is there enough memory for --workers?); the same command goes on from here"
            ) from error


def _end_with_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent is gone, which a pool's worker would not see."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def fingerprint(
    paths: Sequence[Path], tokenizer: Tokenizer, key: str, valid_fraction: float, test_fraction: float = 0.0
) -> str:
    """What the output is a function of; kept in the .json to tell whether it is up to date."""
    parts = [FORMAT, documents.fingerprint(paths), tokenizer.digest, key, valid_fraction]
    parts += [test_fraction] if test_fraction else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
    resume: bool = True,
    console: Console | None = None,
) -> list[str]:
    """Tokenize the inputs into OUTPUT, or into OUTPUT_train, OUTPUT_valid and OUTPUT_test, those that have a part;
    returns these path prefixes.

    Documents that can't be used are named on the console and counted in the .json. With `resume`, goes on where a run
    with the same text, tokenizer and options was interrupted. Raises ValueError if the inputs, the tokenizer or the
    output are unusable; nothing has been replaced by then.
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
    states = {prefix: token_files.state(prefix, wanted) for prefix in prefixes}
    foreign = [prefix for prefix, found in states.items() if found == "foreign"]
    if foreign and not force:
        raise ValueError(
            f"{foreign[0]}.bin or .idx exists without a .json of this program; choose another --output, or --force"
        )
    unfinished = Path(f"{output}.unfinished")
    if set(states.values()) == {"current"} and not force:
        token_files.clear(unfinished)
        console.print(f"{', '.join(prefixes)}: up to date, nothing to do", highlight=False)
        return prefixes
    for prefix, found in states.items():
        reason = {"outdated": "the text, the tokenizer or the options changed", "current": "as asked"}.get(found, found)
        console.print(f"{prefix}: writing ({reason})", highlight=False)
    # What tokenized the first part must tokenize the rest.
    identity = f"{wanted} {' '.join(version(name) for name in ('sentencepiece', 'tokenizers'))}"
    dtype = token_files.narrowest(tokenizer.vocab_size)
    with token_files.Draft(unfinished, prefixes, dtype, identity, resume=resume) as draft:
        if draft.resumed:
            console.print(f"going on behind the {draft.done.records} documents of an interrupted run", highlight=False)
        elif draft.dropped:
            reason = "it was of another text, tokenizer or options, or is damaged" if resume else "as asked"
            console.print(f"an interrupted run is dropped ({reason})", highlight=False)
        if not draft.complete:
            _tokenize(draft, paths, tokenizer, key, list(ends.values()), workers, console)
        _refuse_empty(draft, prefixes, bool(ends))
        facts = {"vocab_size": tokenizer.vocab_size, "tokenizer_sha256": tokenizer.digest}
        draft.finish(facts | {"left_out_of_input": draft.done.left_out, "fingerprint": wanted})
    if draft.done.left_out:
        console.print(f"{draft.done.left_out} documents were left out", highlight=False)
    for prefix, counts in zip(prefixes, draft.counts, strict=True):
        console.print(f"{prefix}: {counts.documents} documents, {counts.tokens} tokens", highlight=False)
    return prefixes


def _tokenize(
    draft: token_files.Draft,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    key: str,
    ends: Sequence[float],
    workers: int,
    console: Console,
) -> None:
    """Add what the draft does not hold yet of the inputs' documents."""
    done = draft.done
    started_seconds, before_bytes = time.monotonic(), sum(counts.text_bytes for counts in draft.counts)
    remaining = islice(documents.records(paths, key), done.records, None)
    with _progress(console) as progress:
        total_bytes = sum(path.stat().st_size for path in paths)
        bar = progress.add_task("tokenizing", total=total_bytes, completed=done.input_bytes)
        for batch, encoded in encoded_batches(partial(encode, str(tokenizer.path), key), remaining, workers):
            for document in encoded:
                if document.tokens is None:
                    done.left_out += 1
                    if done.left_out <= SHOWN_PROBLEMS:
                        console.print(f"left out: {document.problem}", highlight=False, markup=False)
                    continue
                part = next((number for number, end in enumerate(ends, 1) if document.draw < end), 0)
                draft.files[part].add(document.tokens, document.text_bytes)
            done.records += len(batch)
            done.input_bytes += sum(record.size_bytes for record in batch)
            draft.save_if_due()
            progress.update(bar, completed=done.input_bytes)
    seconds = time.monotonic() - started_seconds
    megabytes = (sum(counts.text_bytes for counts in draft.counts) - before_bytes) / 1e6
    console.print(f"{megabytes:.1f} MB in {seconds:.1f} s, {megabytes / seconds:.2f} MB/s", highlight=False)


def _refuse_empty(draft: token_files.Draft, prefixes: Sequence[str], split: bool) -> None:
    for prefix, counts in zip(prefixes, draft.counts, strict=True):
        if not counts.documents:
            raise ValueError(
                f"no usable document for {prefix}; give more text" + (" or other fractions" if split else "")
            )


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
    options.add_argument("--no-resume", action="store_true", help="begin anew even if an interrupted run left a part")
    return options


def run(options: argparse.Namespace) -> None:
    preprocess(
        options.inputs,
        options.tokenizer,
        options.output,
        key=options.key,
        valid_fraction=options.valid_fraction,
        test_fraction=options.test_fraction,
        workers=options.workers,
        force=options.force,
        resume=not options.no_resume,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(run, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
