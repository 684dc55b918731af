"""Texts in parts have the very tokens that sentencepiece gives the whole; where that can't be sure, nothing is cut."""

import importlib.util
import io
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from noloco_mega.data.cuts import PART_BYTES, SINGLE_SPACE, Cutter
from noloco_mega.data.tokenizer import Tokenizer
from tests import corpus
from tests.strings import strings

TEXTS = corpus.texts(300)
MISTRAL = importlib.util.find_spec("mistral_common")
OURS = {
    "model_type": "bpe",
    "vocab_size": 512,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}


def trained(**changes):
    """The file of a model trained on TEXTS with the options of our own tokenizers, changed."""
    model = io.BytesIO()
    texts = [text.replace("\0", "") for text in TEXTS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, minloglevel=2, num_threads=1, **(OURS | changes)
    )
    return model.getvalue()


def long_strings(count, inserts=()):
    """Texts of a few hundred characters, with every mixture of spaces, controls and other scripts."""
    draw = random.Random(1)
    short = strings(2000, TEXTS, inserts=inserts)
    return ["".join(draw.choice(short) + draw.choice(["", " ", "  "]) for _ in range(8)) for _ in range(count)]


CUT = {
    "ours": {},
    "with a space in front": {"add_dummy_prefix": True},
    "without whitespace-only pieces": {"allow_whitespace_only_pieces": False, "add_dummy_prefix": True},
    "with pieces of its own": {"user_defined_symbols": ["<|x|>", "replica"]},
}


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("part_bytes", [1, 7, 64])
def test_parts_have_the_tokens_of_the_whole(kind, part_bytes):
    model = trained(**CUT[kind])
    whole, cutter = sentencepiece.SentencePieceProcessor(model_proto=model), Cutter(model, part_bytes)
    assert cutter.cuts
    pieces = 0
    for text in (text.encode() for text in long_strings(400, ("<|x|>", "replica", " replica"))):
        parts = cutter.parts(text)
        pieces += len(parts)
        tokens = np.concatenate([whole.encode(part, return_type="numpy") for part in parts])
        assert tokens.tolist() == whole.encode(text), text
    assert pieces > 1500


NEVER = {
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "no byte fallback": {"byte_fallback": False},
    "normalizing": {"normalization_rule_name": "nmt_nfkc"},
    "removing spaces": {"remove_extra_whitespaces": True},
    "spaces behind words": {"treat_whitespace_as_suffix": True},
    "pieces over several words": {"split_by_whitespace": False},
    "a piece of its own with a space": {"user_defined_symbols": ["outer step"]},
    "a space in front, and a piece of its own": {"add_dummy_prefix": True, "user_defined_symbols": ["replica"]},
}


@pytest.mark.parametrize("kind", NEVER)
def test_where_it_is_not_sure_nothing_is_cut(kind):
    cutter = Cutter(trained(**NEVER[kind]), 1)
    assert not cutter.cuts and cutter.parts(b"one two three") == [b"one two three"]


def test_pieces_over_several_words_would_give_other_tokens():
    """What the refusal is for: the same cuts with such a model."""
    model = trained(**NEVER["pieces over several words"])
    cutter, whole = Cutter(model, 7), sentencepiece.SentencePieceProcessor(model_proto=model)
    cutter.cuts = True
    texts = [text.encode() for text in TEXTS]
    parts = [[token for part in cutter.parts(text) for token in whole.encode(part)] for text in texts]
    assert parts != [whole.encode(text) for text in texts]


def test_a_tokenizer_cuts_long_documents(tmp_path):
    path = corpus.write_tokenizer(tmp_path / "t.model", TEXTS)
    text = "\n".join(TEXTS)
    assert len(SINGLE_SPACE.findall(text.encode())) > 100 and len(text) > 10 * PART_BYTES
    whole = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(text)
    assert Tokenizer(path).encode(text).tolist() == whole
    with pytest.raises(ValueError, match=f"at character {len(text)}"):
        Tokenizer(path).encode(text + "\ud800")


@pytest.mark.skipif(MISTRAL is None, reason="mistral-common is not installed: pip install -r requirements-slow.txt")
@pytest.mark.parametrize("version", ["tokenizer.model.v1", "240216.model.v2", "240323.model.v3", "241114.model.v7"])
def test_real_tokenizers_cut_without_a_difference(version):
    data = Path(MISTRAL.submodule_search_locations[0]) / "data"
    model = next(path for path in data.iterdir() if path.name.endswith(version)).read_bytes()
    whole, cutter = sentencepiece.SentencePieceProcessor(model_proto=model), Cutter(model, 16)
    for text in (text.encode() for text in long_strings(1500)):
        parts = [token for part in cutter.parts(text) for token in whole.encode(part)]
        assert parts == whole.encode(text), text
    source = Path(random.__file__).read_bytes()
    cutter = Cutter(model)
    assert [token for part in cutter.parts(source) for token in whole.encode(part)] == whole.encode(source)
