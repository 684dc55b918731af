"""Where can a text be cut so that its parts have the tokens of the whole? sentencepiece is slower on long texts.

A BPE merge joins two neighbours into one piece. Where no piece of the vocabulary holds a space (written U+2581) behind
another character, none can reach over the place between a character and a space that follows it: whatever is merged
on one side does not depend on the other. The rest of what sentencepiece does to a text must be local, too, so that
models that normalize are left out.
"""

from __future__ import annotations

import re
from itertools import pairwise

from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]

SPACE = "\u2581"
PART_BYTES = 2048
"""Parts are a little longer than this: the fastest of the sizes tried, by a little (tools/bench/preprocess.py)."""
# A single space: between two characters that are neither a space nor U+2581.
SINGLE_SPACE = re.compile(b"(?<! )(?<!\xe2\x96\x81) (?=[^ ])(?!\xe2\x96\x81)")


class Cutter:
    """Cuts texts for one sentencepiece model."""

    def __init__(self, content: bytes, part_bytes: int = PART_BYTES) -> None:
        """`content` is the model file."""
        model = ModelProto.FromString(content)
        self._part_bytes = part_bytes
        self.cuts = _is_local(model)
        """Whether this model's texts can be cut at all."""
        # A model that puts a space in front of every text does so for each part: the text's own is left out.
        self._dropped = int(model.normalizer_spec.add_dummy_prefix)

    def parts(self, text: bytes) -> list[bytes]:
        """The parts of a text (UTF-8), in order; their tokens, one after the other, are the text's."""
        if not self.cuts or len(text) <= self._part_bytes:
            return [text]
        places = [0]
        while found := SINGLE_SPACE.search(text, places[-1] + self._part_bytes):
            places.append(found.start())
        first, *rest = [text[start:stop] for start, stop in pairwise([*places, len(text)])]
        return [first, *(part[self._dropped :] for part in rest)]


def _is_local(model: ModelProto) -> bool:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != TrainerSpec.BPE or trainer.treat_whitespace_as_suffix or not trainer.byte_fallback:
        return False
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        return False
    defined = [piece.piece for piece in model.pieces if piece.type == ModelProto.SentencePiece.USER_DEFINED]
    if (normalizer.add_dummy_prefix and defined) or any({" ", SPACE} & set(text) for text in defined):
        return False
    return not any(SPACE in piece.piece.lstrip(SPACE) for piece in model.pieces)
