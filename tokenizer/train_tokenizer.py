"""Train a sentencepiece tokenizer whose vocabulary needs no padding rows; the recipe is in tokenizer/README.md.

python -m tokenizer.train_tokenizer corpus.jsonl books/ --output tokenizer.model --vocab-size 8192 --tensor 2
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

from noloco_mega.data import documents
from noloco_mega.entry import guarded

ROW_MULTIPLE = 128
CHUNK_CHARACTERS = 2048
BYTE_AND_SPECIAL_TOKENS = 256 + 3


def rows(vocab_size: int, tensor: int) -> int:
    """`vocab_size` if it can be cut into `tensor` aligned parts. Raises ValueError naming the nearest sizes that can.

    Rows that pad an embedding take part in the softmax of the loss, so the vocabulary itself must fit.
    """
    step = ROW_MULTIPLE * tensor
    if vocab_size % step or vocab_size <= BYTE_AND_SPECIAL_TOKENS:
        smallest = -(-(BYTE_AND_SPECIAL_TOKENS + 1) // step) * step
        below, above = vocab_size // step * step, (vocab_size // step + 1) * step
        choices = sorted({max(below, smallest), max(above, smallest)})
        raise ValueError(
            f"--vocab-size {vocab_size} must be a multiple of 128·tensor = {step} above {BYTE_AND_SPECIAL_TOKENS}; "
            f"choose {' or '.join(map(str, choices))}"
        )
    return vocab_size


def chunks(inputs: Sequence[str | Path], key: str, max_characters: int, seed: int) -> Iterator[str]:
    """Pieces of the inputs' documents, cut after line ends where possible: about `max_characters` of them in all.

    If there is more text, each piece is kept or not by a hash of the seed and its place, so that a sample is spread
    over the whole input, and the same input gives the same sample. Documents that can't be read are left out here;
    tools/preprocess_data.py reports them.
    """
    paths = documents.files(inputs)
    total = sum(len(text) for _, text in _texts(paths, key))
    keep = min(1.0, max_characters / total) if total else 1.0
    for place, text in _texts(paths, key):
        for number, chunk in enumerate(_cut(text)):
            draw = hashlib.blake2b(f"{seed},{place},{number}".encode(), digest_size=8).digest()
            if int.from_bytes(draw, "little") < keep * 2**64:
                yield chunk


def _texts(paths: Sequence[Path], key: str) -> Iterator[tuple[int, str]]:
    for place, record in enumerate(documents.records(paths, key)):
        try:
            text = documents.text(record, key)
            text.encode()
        except (documents.BadDocumentError, UnicodeEncodeError):
            continue
        yield place, text


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most CHUNK_CHARACTERS. sentencepiece skips a sentence with a NUL, so pieces end there as well."""
    for part in text.split("\0"):
        start = 0
        while start < len(part):
            stop = start + CHUNK_CHARACTERS
            if stop < len(part):
                stop = (part.rfind("\n", start, stop) + 1) or stop
            yield part[start:stop]
            start = stop


def train(pieces: Iterator[str], vocab_size: int) -> bytes:
    """A serialized sentencepiece BPE model: lossless on any UTF-8 text but U+2581, <unk> 0, <s> 1, </s> 2.

    Raises ValueError if the text is too small for the vocabulary.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=8 * CHUNK_CHARACTERS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            # The number of threads is stored in the model: one, or the file would depend on the machine.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"sentencepiece can't make {vocab_size} tokens of this text; give more text or a smaller --vocab-size "
            f"({' '.join(str(error).split())})"
        ) from error
    return model.getvalue()


def write(path: Path, content: bytes, force: bool) -> None:
    """Write beside, then rename: a reader sees the old file or the new one. Raises ValueError if one is there."""
    _refuse_existing(path, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as beside:
        beside.write(content)
    os.chmod(beside.name, 0o644)
    os.replace(beside.name, path)


def _refuse_existing(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ValueError(f"{path} exists, and data may have been written with it; choose another name, or --force")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Train a sentencepiece BPE tokenizer, reproducibly.")
    options.add_argument("inputs", nargs="+", help=f"folders or files ({documents.KINDS})")
    options.add_argument("--output", type=Path, required=True, help="the model file to write, e.g. tokenizer.model")
    options.add_argument("--vocab-size", type=int, required=True, help="a multiple of 128·TENSOR")
    options.add_argument("--tensor", type=int, default=1, help="largest tensor-parallel size to be trained with")
    options.add_argument("--key", default="text", help="field of a .jsonl line that holds the text")
    options.add_argument("--max-characters", type=int, default=50_000_000, help="sample about so much of the input")
    options.add_argument("--seed", type=int, default=0, help="seed of the sample, where one is drawn")
    options.add_argument("--force", action="store_true", help="replace an existing model")
    return options


def run(options: argparse.Namespace) -> None:
    size = rows(options.vocab_size, options.tensor)
    _refuse_existing(options.output, options.force)
    pieces = chunks(options.inputs, options.key, options.max_characters, options.seed)
    model = train(pieces, size)
    write(options.output, model, options.force)
    print(f"{options.output}: {size} tokens, SHA-256 {hashlib.sha256(model).hexdigest()}")


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(run, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
