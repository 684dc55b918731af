"""Which tokens is a text? A sentencepiece model or a Hugging Face fast tokenizer, loaded by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
import tokenizers

from noloco_mega.data.cuts import Cutter

FAST, CONFIG, SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"


class Encoder(Protocol):
    """What one kind of tokenizer file does."""

    vocab_size: int
    eod: int
    bos: int | None

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: list[int]) -> str: ...


class Tokenizer:
    """The tokenizer at `path`: a sentencepiece model, a tokenizer.json, or a folder that holds either.

    `digest` is the SHA-256 of what it is made from: data and model agree on it, not on a name. Raises ValueError if
    the file is missing, is no tokenizer or has no end-of-document token.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path
        if self.path.is_dir():
            file = self.path / (FAST if (self.path / FAST).exists() else SENTENCEPIECE)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(
                f"cannot read the tokenizer {file}: {error.strerror}; train one with tokenizer/train_tokenizer.py"
            ) from error
        self._encoder: Encoder
        if file.suffix == ".json":
            self._encoder = _Fast(file, content)
            content += str(self._encoder.eod).encode()
        else:
            self._encoder = _SentencePiece(file, content)
        self.digest = hashlib.sha256(content).hexdigest()
        self.padded = file.suffix == ".json"
        """Whether models may have more embedding rows than this has tokens: those of fast tokenizers often do."""
        self.vocab_size: int = self._encoder.vocab_size
        self.eod: int = self._encoder.eod
        """The end-of-document token, sentencepiece's </s>. No text encodes to it."""
        self.bos: int | None = self._encoder.bos
        """The begin-of-text token, where there is one; never added here."""

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens], without an end-of-document token. Raises ValueError for text that is not valid Unicode.

        `decode` gives the same text back for the models of tokenizer/train_tokenizer.py, but for one character:
        sentencepiece writes spaces as U+2581, so a U+2581 of the text itself comes back as a space.
        """
        try:
            return self._encoder.encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid Unicode: {error.reason} at character {error.start}") from error

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a sequence of ids in [0, vocab_size); end-of-document tokens decode to nothing."""
        ids = [int(token) for token in tokens]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids must lie in [0, {self.vocab_size}); got {min(ids)} .. {max(ids)}")
        return self._encoder.decode(ids)


class _SentencePiece:
    def __init__(self, path: Path, content: bytes) -> None:
        try:
            # An empty proto would leave the processor silently unloaded.
            model = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
        except RuntimeError as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
        if model is None or model.vocab_size() == 0:
            raise ValueError(f"{path} is not a sentencepiece model: it is empty")
        self._model, self._cutter = model, Cutter(content)
        self.vocab_size: int = model.vocab_size()
        self.eod: int = model.eos_id()
        self.bos: int | None = model.bos_id() if model.bos_id() >= 0 else None
        if self.eod < 0:
            raise ValueError(
                f"the tokenizer {path} has no end-of-sequence piece to end documents with; train one that has "
                "(tokenizer/train_tokenizer.py does)"
            )

    def encode(self, text: str) -> np.ndarray:
        parts = [self._model.encode(part, return_type="numpy") for part in self._cutter.parts(text.encode())]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)


class _Fast:
    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._model = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} is not a Hugging Face fast tokenizer: {error}") from error
        # Settings of one text at a time that a file may carry along.
        self._model.no_padding()
        self._model.no_truncation()
        # A literal end-of-text token in a document is text: only special tokens that are no text end documents.
        self._model.encode_special_tokens = True
        self.vocab_size: int = 1 + max(self._model.get_vocab(with_added_tokens=True).values())
        names = _special_names(path.with_name(CONFIG))
        eod = self._model.token_to_id(names.get("eos_token") or "")
        if eod is None:
            raise ValueError(
                f"the tokenizer {path} has no end-of-sequence token to end documents with; name its eos_token in "
                f"{CONFIG} beside it"
            )
        self.eod: int = eod
        self.bos: int | None = self._model.token_to_id(names.get("bos_token") or "")

    def encode(self, text: str) -> np.ndarray:
        text.encode()  # for the error of invalid Unicode
        return np.array(self._model.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)


def _special_names(path: Path) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, as text."""
    try:
        settings: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    texts = {name: settings.get(name) for name in ("bos_token", "eos_token")}
    return {name: text["content"] if isinstance(text, dict) else text for name, text in texts.items() if text}
