"""The exported tokenizer against sentencepiece's own ids, through AutoTokenizer."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import sentencepiece

from noloco_mega.data import tokenizer_json
from noloco_mega.data.tokenizer import Tokenizer
from tests import corpus
from tests.strings import strings
from tokenizer import export_hf, train_tokenizer

STRINGS = 20_000
SOURCE = [*corpus.texts(200), *Path(argparse.__file__).read_text().split("\n\n")]
SOURCE = [text for text in SOURCE if text]
MISTRAL = importlib.util.find_spec("mistral_common")


def auto_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def disagreements(model, folder, texts):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = [reference.encode(text) for text in texts]
    fast, own = auto_tokenizer(folder), Tokenizer(folder)
    by_transformers = fast(texts)["input_ids"]
    wrong = [text for text, one, other in zip(texts, expected, by_transformers, strict=True) if one != other]
    wrong += [text for text, ids in zip(texts[:3000], expected, strict=False) if own.encode(text).tolist() != ids]
    wrong += [
        text
        for text, ids in zip(texts[:3000], expected, strict=False)
        if fast.decode(ids) != reference.decode(ids) and "\ufffd" not in reference.decode(ids)
    ]
    return wrong


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = "\n".join([*corpus.texts(100), Path(argparse.__file__).read_text()])
    (folder / "t.model").write_bytes(train_tokenizer.train(train_tokenizer._cut(text), 1024))
    assert export_hf.main([str(folder / "t.model"), "--output", str(folder / "hf")]) == 0
    return folder


def test_a_trained_tokenizer_gives_sentencepieces_ids(trained):
    assert disagreements(trained / "t.model", trained / "hf", strings(STRINGS, SOURCE)) == []
    fast = auto_tokenizer(trained / "hf")
    assert (fast.bos_token_id, fast.eos_token_id, fast.unk_token_id) == (1, 2, 0)
    assert len(fast) == 1024


@pytest.mark.skipif(MISTRAL is None, reason="mistral-common is not installed: pip install -r requirements-slow.txt")
@pytest.mark.parametrize("version", ["tokenizer.model.v1", "240216.model.v2", "240323.model.v3", "241114.model.v7"])
def test_real_tokenizers_give_sentencepieces_ids(tmp_path, version):
    data = Path(MISTRAL.submodule_search_locations[0]) / "data"
    model = next(path for path in data.iterdir() if path.name.endswith(version))
    assert export_hf.main([str(model), "--output", str(tmp_path / "hf")]) == 0
    pieces = tokenizer_json.parse(model).pieces
    defined = tuple(piece.piece for piece in pieces if piece.type == tokenizer_json.Piece.USER_DEFINED)
    texts = strings(STRINGS, SOURCE, inserts=defined)
    texts = [text for text in texts if not text.startswith(defined or "\0none")]
    assert len(texts) > 0.99 * STRINGS
    assert disagreements(model, tmp_path / "hf", texts) == []


def test_only_a_user_defined_piece_in_front_differs(tmp_path):
    prefix = tmp_path / "u"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.texts(300)), model_prefix=str(prefix), vocab_size=700, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    model = tmp_path / "u.model"
    assert export_hf.main([str(model), "--output", str(tmp_path / "hf")]) == 0
    texts = strings(4000, corpus.texts(100), inserts=("<tool>",))
    wrong = disagreements(model, tmp_path / "hf", texts)
    assert wrong == [] or all(text.startswith("<tool>") for text in wrong)
    inside, front = "a <tool> <tool>b  c", "<tool> x"
    assert disagreements(model, tmp_path / "hf", [inside]) == []
    ids = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(front)
    assert ids[1:] == auto_tokenizer(tmp_path / "hf")(front)["input_ids"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model_type": "unigram", "normalization_rule_name": "identity"}, "it is not a BPE model"),
        ({"normalization_rule_name": "nmt_nfkc"}, r"it normalizes text \(nmt_nfkc\)"),
        ({"normalization_rule_name": "identity", "remove_extra_whitespaces": True}, "it removes extra spaces"),
        ({"normalization_rule_name": "identity", "byte_fallback": False}, "it has no byte fallback"),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, capsys, options, message):
    settings = {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.texts(300)), model_prefix=str(tmp_path / "x"), vocab_size=500, minloglevel=2,
        hard_vocab_limit=False, **settings,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        tokenizer_json.parse(tmp_path / "x.model")
    assert export_hf.main([str(tmp_path / "x.model"), "--output", str(tmp_path / "out")]) == 2
    assert "can't be exported with the same ids" in capsys.readouterr().err
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_fast_tokenizers_are_read(trained, tmp_path):
    own, fast = Tokenizer(trained / "t.model"), Tokenizer(trained / "hf" / "tokenizer.json")
    assert (fast.vocab_size, fast.eod, fast.bos) == (own.vocab_size, own.eod, own.bos) == (1024, 2, 1)
    assert fast.digest != own.digest and fast.digest == Tokenizer(trained / "hf").digest
    text = "a </s> is only text 漢"
    assert fast.encode(text).dtype == own.encode(text).dtype and fast.eod not in fast.encode(text)
    assert fast.decode([*fast.encode(text), fast.eod]) == text
    with pytest.raises(ValueError, match="not valid Unicode"):
        fast.encode("a\ud800")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a Hugging Face fast tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((trained / "hf" / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="name its eos_token in"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert Tokenizer(tmp_path).eod == 2
