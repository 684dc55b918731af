"""Training a tokenizer reproducibly, and what it does to text."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from noloco_mega.data.tokenizer import Tokenizer
from tests import corpus
from tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus.write_jsonl(folder / "corpus.jsonl", corpus.texts(300))
    assert train_tokenizer.main([*arguments(folder), "--output", str(folder / "t.model")]) == 0
    return folder


def arguments(folder):
    """Half of the text is enough, and lets the sample be part of what is reproducible."""
    return [str(folder / "corpus.jsonl"), "--vocab-size", "384", "--max-characters", "45000"]


def test_text_comes_back_unchanged(trained):
    tokenizer = Tokenizer(trained / "t.model")
    assert tokenizer.vocab_size == 384
    for text in [*corpus.texts(40, seed=9), ""]:
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.int32 and (text == "" or tokens.max() < 384)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eod not in tokens
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod, *tokenizer.encode(" b")]) == "a b"


def test_the_one_character_that_does_not_come_back(trained):
    tokenizer = Tokenizer(trained / "t.model")
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"


def test_frequent_words_and_indentation_are_short(trained):
    """A byte-level fallback alone would be lossless too: the merges must have been learnt."""
    tokenizer = Tokenizer(trained / "t.model")
    for text in (" replica", " partner", " weights"):
        assert len(tokenizer.encode(text)) <= 2, text


def test_the_same_input_gives_the_same_bytes(trained):
    """In another process, with another hash seed and under another name."""
    command = [sys.executable, "-m", "tokenizer.train_tokenizer", *arguments(trained)]
    again = trained / "elsewhere" / "again.model"
    root = Path(train_tokenizer.__file__).parent.parent
    subprocess.run([*command, "--output", str(again)], check=True, timeout=60, env={"PYTHONHASHSEED": "99"}, cwd=root)
    assert again.read_bytes() == (trained / "t.model").read_bytes()
    assert Tokenizer(again).digest == Tokenizer(trained / "t.model").digest


def test_a_sample_is_spread_over_the_input_and_fixed_by_its_seed(trained):
    def sample(characters, seed):
        return list(train_tokenizer.chunks([trained / "corpus.jsonl"], "text", characters, seed))

    everything = sample(10**9, 0)
    total = sum(map(len, everything))
    assert "".join(everything) == "".join(corpus.texts(300)).replace("\0", "")
    half = sample(total // 2, 0)
    assert half == sample(total // 2, 0) != sample(total // 2, 1)
    assert 0.35 * total < sum(map(len, half)) < 0.65 * total
    positions = [everything.index(chunk) / len(everything) for chunk in half]
    assert 0.4 < np.mean(positions) < 0.6


def test_pieces_lose_nothing_and_end_at_line_ends():
    text = "".join(f"line {i} " + "x" * (i % 90) + "\n" for i in range(400)) + "y" * 5000
    pieces = list(train_tokenizer._cut(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= train_tokenizer.CHUNK_CHARACTERS
    assert sum(piece.endswith("\n") for piece in pieces) >= len(pieces) - 3


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "choices"),
    [(1000, 1, "896 or 1024"), (128, 1, "384"), (1152, 2, "1024 or 1280"), (100, 4, "512"), (256, 2, "512")],
)
def test_vocabularies_that_would_need_padding_are_refused(vocab_size, tensor, choices):
    with pytest.raises(ValueError, match=f"multiple of 128·tensor = {128 * tensor} .* choose {choices}$"):
        train_tokenizer.rows(vocab_size, tensor)
    assert train_tokenizer.rows(1024, tensor) == 1024


def test_too_little_text_is_refused_and_nothing_is_left(tmp_path, capsys):
    (tmp_path / "small.txt").write_text("just a few words")
    options = ["--output", str(tmp_path / "t.model"), "--vocab-size", "8192"]
    assert train_tokenizer.main([str(tmp_path / "small.txt"), *options]) == 2
    assert "give more text or a smaller --vocab-size" in capsys.readouterr().err
    (tmp_path / "none.txt").write_text("")
    assert train_tokenizer.main([str(tmp_path / "none.txt"), *options]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"small.txt", "none.txt"}


def test_an_existing_model_is_only_replaced_when_asked(trained, tmp_path, capsys):
    model = tmp_path / "t.model"
    model.write_bytes(b"precious")
    again = [*arguments(trained), "--output", str(model)]
    assert train_tokenizer.main(again) == 2
    assert "--force" in capsys.readouterr().err and model.read_bytes() == b"precious"
    assert train_tokenizer.main([*again, "--force"]) == 0
    assert model.read_bytes() == (trained / "t.model").read_bytes()


def test_files_that_are_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        Tokenizer(tmp_path / "missing.model")
    for content in (b"", b"not a model" * 50):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ValueError, match="is not a sentencepiece model"):
            Tokenizer(tmp_path / "bad.model")
    endless = tmp_path / "endless"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.texts(50)), model_prefix=str(endless), vocab_size=120, eos_id=-1, minloglevel=2
    )
    with pytest.raises(ValueError, match="no end-of-sequence piece"):
        Tokenizer(f"{endless}.model")


def test_what_cannot_be_encoded_or_decoded(trained):
    tokenizer = Tokenizer(trained / "t.model")
    with pytest.raises(ValueError, match="not valid Unicode: surrogates not allowed at character 1"):
        tokenizer.encode("a\ud800")
    for ids in ([384], [-1, 5]):
        with pytest.raises(ValueError, match=r"must lie in \[0, 384\)"):
            tokenizer.decode(ids)
