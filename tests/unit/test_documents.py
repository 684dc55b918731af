"""Compressed files and .parquet hold the same documents as the plain files that they were made from."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from noloco_mega.data import documents
from tests import corpus
from tools.preprocess_data import preprocess

TEXTS = corpus.texts(300)


def packed(suffix, content):
    return gzip.compress(content) if suffix == ".gz" else zstandard.ZstdCompressor().compress(content)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("t") / "t.model", TEXTS)


def tokens(folder, tokenizer, *inputs, **options):
    preprocess(inputs, tokenizer, str(folder / "out"), **options)
    return (folder / "out.bin").read_bytes(), (folder / "out.idx").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_kind_gives_the_same_tokens(tmp_path, tokenizer, kind, workers):
    for name in ("plain", "packed"):
        (tmp_path / name).mkdir()
    plain = corpus.write_jsonl(tmp_path / "plain" / "c.jsonl", TEXTS)
    other = tmp_path / "packed" / f"c{kind}"
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS}), other, row_group_size=70)
    else:
        half = len(plain.read_bytes()) // 2
        # Two frames, as appending to a file makes them.
        suffix = f".{kind.rsplit('.', 1)[1]}"
        other.write_bytes(packed(suffix, plain.read_bytes()[:half]) + packed(suffix, plain.read_bytes()[half:]))
    expected = tokens(tmp_path / "plain", tokenizer, plain)
    assert tokens(tmp_path / "packed", tokenizer, tmp_path / "packed", workers=workers) == expected
    size = other.stat().st_size
    shares = sum(record.size_bytes for record in documents.records([other]))
    assert 0.9 * size <= shares <= size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_text_is_one_document(tmp_path, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(packed(suffix, b"one\ntwo"))
    (tmp_path / f"a.bin{suffix}").write_bytes(packed(suffix, b"no text"))
    (record,) = documents.records(documents.files([tmp_path]))
    assert documents.text(record, "text") == "one\ntwo"
    (tmp_path / f"a.txt{suffix}").write_bytes(packed(suffix, b"one\ntwo" * 999)[:-6])
    with pytest.raises(documents.BadDocumentError, match="damaged"):
        documents.text(record, "text")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_file_is_named_and_nothing_is_written(tmp_path, tokenizer, suffix):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    path = tmp_path / f"c.jsonl{suffix}"
    path.write_bytes(packed(suffix, lines)[:-9])
    with pytest.raises(ValueError, match=rf"c\.jsonl\{suffix} is damaged behind line \d+"):
        tokens(tmp_path, tokenizer, path)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_rows_without_text_and_columns_that_are_not_there(tmp_path, tokenizer, capsys):
    path = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b", None, "c"], "n": [1, 2, 3]}), path)
    tokens(tmp_path, tokenizer, path)
    assert 'c.parquet:2: no text in the column "text"' in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "out.json").read_text())["left_out_of_input"] == 1
    with pytest.raises(ValueError, match='no column "body"; it has text, n'):
        tokens(tmp_path, tokenizer, path, key="body")
    with pytest.raises(ValueError, match='the column "n" holds int64, not text'):
        tokens(tmp_path, tokenizer, path, key="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"c\.parquet is damaged behind row 0"):
        tokens(tmp_path, tokenizer, path)
