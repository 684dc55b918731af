"""Which tokens is a text? A sentencepiece model, loaded by path."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import sentencepiece


class Tokenizer:
    """A sentencepiece model. `digest` is the SHA-256 of its file: data and model agree on it, not on a name.

    Raises ValueError if the file is missing, is no sentencepiece model or has no end-of-document token.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._model, self.digest = _load(self.path)
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        """The end-of-document token, sentencepiece's </s>. No text encodes to it."""
        if self.eod < 0:
            raise ValueError(
                f"the tokenizer {path} has no end-of-sequence piece to end documents with; train one that has "
                "(tokenizer/train_tokenizer.py does)"
            )

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens], without an end-of-document token. Raises ValueError for text that is not valid Unicode.

        `decode` gives the same text back for the models of tokenizer/train_tokenizer.py, but for one character:
        sentencepiece writes spaces as U+2581, so a U+2581 of the text itself comes back as a space.
        """
        try:
            return self._model.encode(text.encode(), return_type="numpy")
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid Unicode: {error.reason} at character {error.start}") from error

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a sequence of ids in [0, vocab_size); end-of-document tokens decode to nothing."""
        ids = [int(token) for token in tokens]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids must lie in [0, {self.vocab_size}); got {min(ids)} .. {max(ids)}")
        return self._model.decode(ids)


def _load(path: Path) -> tuple[sentencepiece.SentencePieceProcessor, str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read the tokenizer {path}: {error.strerror}; train one with tokenizer/train_tokenizer.py"
        ) from error
    try:
        # An empty proto would leave the processor silently unloaded.
        model = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError as error:
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
    if model is None or model.vocab_size() == 0:
        raise ValueError(f"{path} is not a sentencepiece model: it is empty")
    return model, hashlib.sha256(content).hexdigest()
