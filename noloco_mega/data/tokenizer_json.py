"""How does a tokenizer look to Hugging Face? A sentencepiece BPE model as tokenizer.json, with the same ids.

In sentencepiece every piece has a score, and a merge makes the piece of the best score; the merges of tokenizer.json
are therefore all pairs of pieces that make up a piece, by its score. What sentencepiece does to text before that
(a space put in front, spaces written as U+2581) becomes a normalizer and a pre-tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from noloco_mega.data.tokenizer import CONFIG, FAST, SENTENCEPIECE

SPACE = "\u2581"
BPE_TYPE = TrainerSpec.BPE
Piece = ModelProto.SentencePiece
# Files that go along with tokenizer.json.
COMPANIONS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", SENTENCEPIECE)


def write(path: Path, folder: Path, context_tokens: int) -> None:
    """Write the tokenizer at `path` (a sentencepiece model, or a fast tokenizer's file or folder) into `folder`, for
    AutoTokenizer.

    Raises ValueError for a sentencepiece model that tokenizer.json has no equal for, naming what it is.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        copy(path if path.is_dir() else path.parent, folder)
        return
    model = parse(path)
    convert(model, path).save(str(folder / FAST))
    shutil.copyfile(path, folder / SENTENCEPIECE)
    names = {"bos_token": model.trainer_spec.bos_id, "eos_token": model.trainer_spec.eos_id}
    names |= {"unk_token": model.trainer_spec.unk_id, "pad_token": model.trainer_spec.pad_id}
    settings: dict[str, Any] = {
        # The Llama class of transformers 5 replaces the normalizer of tokenizer.json by its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        # sentencepiece reads a literal </s> as text.
        "split_special_tokens": True,
        **{name: model.pieces[number].piece for name, number in names.items() if number >= 0},
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def copy(folder: Path, target: Path) -> bool:
    """Copy a Hugging Face folder's tokenizer into `target`, which is made if needed; False where there is none."""
    files = [name for name in (FAST, *COMPANIONS) if (folder / name).is_file()]
    if FAST not in files and SENTENCEPIECE not in files:
        return False
    target.mkdir(exist_ok=True)
    for name in files:
        shutil.copyfile(folder / name, target / name)
    return True


def parse(path: Path) -> ModelProto:
    """Raises ValueError if the file is no sentencepiece model, or one that tokenizer.json has no equal for."""
    model = ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    except Exception as error:  # protobuf's own kinds
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    problems = {
        "it is not a BPE model": trainer.model_type != BPE_TYPE,
        f"it normalizes text ({normalizer.name})": bool(normalizer.precompiled_charsmap),
        "it removes extra spaces": normalizer.remove_extra_whitespaces,
        "it keeps spaces as they are": not normalizer.escape_whitespaces,
        "it writes spaces behind words": trainer.treat_whitespace_as_suffix,
        "it has no byte fallback": not trainer.byte_fallback,
    }
    found = [problem for problem, present in problems.items() if present]
    if found:
        raise ValueError(f"{path} can't be exported with the same ids: {', '.join(found)}")
    return model


def convert(model: ModelProto, path: Path) -> Tokenizer:
    """The fast tokenizer of a sentencepiece model.

    One text differs: where sentencepiece puts a space in front of every text and the text begins with a user-defined
    piece, this puts none. Ids whose bytes are not valid UTF-8 decode to other replacement characters.
    """
    spec, pieces = model.normalizer_spec, model.pieces
    vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        raise ValueError(f"{path} can't be exported with the same ids: two of its pieces are equal")
    unknown = next(piece.piece for piece in pieces if piece.type == Piece.UNKNOWN)
    fast = Tokenizer(BPE(vocabulary, merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        # The first one puts a space in front of a text that has none left, and only at its very beginning (not behind
        # every added token, as a normalizer would); the second one writes it as sentencepiece does.
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
                pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False),
            ]
        )
        decoding.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(decoding)
    control = [piece.piece for piece in pieces if piece.type in (Piece.CONTROL, Piece.UNKNOWN)]
    defined = [piece.piece for piece in pieces if piece.type == Piece.USER_DEFINED]
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    fast.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])
    return fast


def merges(model: ModelProto) -> list[tuple[str, str]]:
    """All pairs of ordinary pieces that make up a third one, the best score of that one first."""
    numbers = {piece.piece: number for number, piece in enumerate(model.pieces) if piece.type == Piece.NORMAL}

    def pairs() -> Iterator[tuple[float, int, int, int]]:
        for text, number in numbers.items():
            for cut in range(1, len(text)):
                left, right = numbers.get(text[:cut]), numbers.get(text[cut:])
                if left is not None and right is not None:
                    yield -model.pieces[number].score, number, left, right

    return [(model.pieces[left].piece, model.pieces[right].piece) for _, _, left, right in sorted(pairs())]
