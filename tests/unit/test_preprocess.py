"""Text to token files and back to samples, against megatron-core's own readers."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from rich.console import Console

from noloco_mega.data import token_files
from noloco_mega.data.dataset import Dataset, open_dataset
from noloco_mega.data.tokenizer import Tokenizer
from tests import corpus
from tools import preprocess_data, stdlib_corpus

TEXTS = corpus.texts(300)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    corpus.write_tokenizer(folder / "t.model", [text.replace("\0", "") for text in TEXTS])
    corpus.write_jsonl(folder / "a.jsonl", TEXTS)
    return folder


def run(source, output, **options):
    """Tokenize the fixture's text; returns the prefixes and what was printed."""
    printed = io.StringIO()
    options = {"inputs": [source / "a.jsonl"], "tokenizer_path": source / "t.model", "output": str(output)} | options
    return preprocess_data.preprocess(**options, console=Console(file=printed, width=500)), printed.getvalue()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def documents_in(prefix):
    indexed = IndexedDataset(str(prefix))
    return [indexed[i].tolist() for i in range(len(indexed))]


def test_every_document_comes_back(source, tmp_path):
    run(source, tmp_path / "all")
    tokenizer, documents = Tokenizer(source / "t.model"), documents_in(tmp_path / "all")
    assert all(tokens[-1] == tokenizer.eod and tokenizer.eod not in tokens[:-1] for tokens in documents)
    assert [tokenizer.decode(tokens) for tokens in documents] == TEXTS
    facts = json.loads((tmp_path / "all.json").read_text())
    assert facts["documents"] == len(TEXTS) and facts["tokens"] == sum(map(len, documents))
    assert facts["max_token"] == max(map(max, documents)) and facts["vocab_size"] == 384
    assert facts["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert facts["tokenizer_sha256"] == tokenizer.digest


def test_the_number_of_workers_changes_no_byte(source, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess_data, "BATCH_DOCUMENTS", 7)
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        run(source, tmp_path / str(workers) / "out", workers=workers, valid_fraction=0.2)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert set(contents(tmp_path / "1")) == {f"out_{s}.{e}" for s in ("train", "valid") for e in ("bin", "idx", "json")}


def test_a_split_is_by_document_and_keeps_equal_ones_together(source, tmp_path):
    twice = corpus.write_jsonl(tmp_path / "twice.jsonl", TEXTS + TEXTS[::-1])
    run(source, tmp_path / "out", inputs=[twice], valid_fraction=0.25)
    train, valid = ([tuple(d) for d in documents_in(tmp_path / f"out_{side}")] for side in ("train", "valid"))
    assert not set(train) & set(valid)
    assert len(train) + len(valid) == 2 * len(TEXTS)
    assert 0.15 < len(valid) / (2 * len(TEXTS)) < 0.35
    # The side depends on the document alone, so a corpus that grows moves none from one side to the other.
    run(source, tmp_path / "once", valid_fraction=0.25)
    assert {tuple(d) for d in documents_in(tmp_path / "once_valid")} == set(valid)


def test_folders_are_read_in_order_of_their_paths(source, tmp_path):
    folder = tmp_path / "texts"
    for name, text in {"b/z.txt": "last", "b/a.py": "second", "a.md": "first", "ignored.bin": "never"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run(source, tmp_path / "out", inputs=[folder, source / "a.jsonl"])
    tokenizer = Tokenizer(source / "t.model")
    read = [tokenizer.decode(tokens) for tokens in documents_in(tmp_path / "out")]
    assert read[:3] == ["first", "second", "last"] and read[3:] == TEXTS


def test_unusable_documents_are_counted_and_named(source, tmp_path):
    bad = tmp_path / "bad.jsonl"
    lines = [b'{"text": "good"}', b"{", b'{"other": 1}', b"", b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[1]"]
    bad.write_bytes(b"\n".join([*lines, b'{"text": ""}', b"[" * 100_000, b'{"text": "good too"}']))
    _, printed = run(source, tmp_path / "out", inputs=[bad])
    named = dict(re.findall(r"left out: .*bad.jsonl:(\d+): (.*)", printed))
    assert {int(line): reason.split(":")[0].strip() for line, reason in named.items()} == {
        2: "not JSON",
        3: 'no text under the key "text"',
        5: "not UTF-8 at byte 10",
        6: "not valid Unicode",
        7: 'no text under the key "text"',
        8: "empty",
        9: "not JSON that can be read",
    }
    assert "7 documents were left out" in printed
    assert json.loads((tmp_path / "out.json").read_text())["left_out_of_input"] == 7
    assert len(documents_in(tmp_path / "out")) == 2


def test_a_second_run_does_only_what_is_needed(source, tmp_path):
    text = corpus.write_jsonl(tmp_path / "text.jsonl", TEXTS)
    out = tmp_path / "out"
    out.mkdir()

    def again(**options):
        return run(source, out / "o", inputs=[text], valid_fraction=0.3, **options)[1]

    assert "writing (missing)" in again()
    first = contents(out)
    stamps = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "up to date" in again(workers=2)
    assert stamps == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "o_valid.idx").unlink()
    assert "o_valid: writing (missing)" in again()
    assert contents(out) == first
    (out / "o_train.bin").write_bytes(first["o_train.bin"][:-2])
    assert "o_train: writing (missing)" in again()
    assert contents(out) == first
    corpus.write_jsonl(text, TEXTS[:-1])
    assert "changed" in again()
    assert contents(out) != first


def test_files_of_others_are_not_overwritten(source, tmp_path):
    (tmp_path / "out.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"without a \.json of this program"):
        run(source, tmp_path / "out")
    assert contents(tmp_path) == {"out.bin": b"mine"}
    run(source, tmp_path / "out", force=True)
    assert len(documents_in(tmp_path / "out")) == len(TEXTS)


def test_the_files_are_those_of_megatrons_writer(tmp_path):
    documents = [np.arange(1, length, dtype=np.int32) for length in (2, 3, 70, 5)]
    for vocab_size in (2, 65499, 65500, 128_000):
        dtype = token_files.narrowest(vocab_size)
        assert dtype == DType.optimal_dtype(vocab_size)
        prefixes = [str(tmp_path / f"{vocab_size}{part}") for part in "ab"]
        with token_files.Draft(tmp_path / "draft", prefixes, dtype, "these", resume=True) as draft:
            for number, document in enumerate(documents):
                draft.files[number % 2].add(document, 1)
            draft.finish({"fingerprint": "x"})
        for part, prefix in enumerate(prefixes):
            corpus.write_tokens(tmp_path / "theirs", documents[part::2], dtype.type)
            for suffix in (".bin", ".idx"):
                assert Path(prefix + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_ids_that_the_file_would_wrap_are_refused(tmp_path):
    for ids in ([1, 65536], [-1], [3, -1, 2]):
        with (
            pytest.raises(ValueError, match=f"token id {min(ids) if min(ids) < 0 else 65536} does not fit into uint16"),
            token_files.Draft(tmp_path / "draft", ["out"], np.dtype(np.uint16), "", resume=True) as draft,
        ):
            draft.files[0].add(np.array([65535], dtype=np.int32), 1)
            draft.files[0].add(np.array(ids, dtype=np.int32), 1)
    assert not list(tmp_path.iterdir())


def test_inputs_that_cannot_work(source, tmp_path):
    (tmp_path / "blank.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for inputs, message in {
        "missing.txt": "there is no input",
        "folder": "holds no file that ends in",
        "blank.txt": "no usable document",
    }.items():
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / "out", inputs=[tmp_path / inputs])
    with pytest.raises(ValueError, match="give a folder or a file that ends in"):
        run(source, tmp_path / "out", inputs=[source / "t.model"])
    with pytest.raises(ValueError, match=r"--valid-fraction and --test-fraction must lie in \[0, 1\)"):
        run(source, tmp_path / "out", valid_fraction=1.0)
    with pytest.raises(ValueError, match="or other fractions"):
        run(source, tmp_path / "out", valid_fraction=1e-9)
    assert {path.name for path in tmp_path.iterdir()} == {"blank.txt", "folder"}


@pytest.mark.parametrize("wrong", ["inputs", "--tokenizer"])
def test_the_command_tells_what_is_wrong_with_status_2(source, tmp_path, capsys, wrong):
    words = {"inputs": source / "a.jsonl", "--tokenizer": source / "t.model", wrong: tmp_path / "missing.txt"}
    line = [words["inputs"], "--tokenizer", words["--tokenizer"], "--output", tmp_path / "out", "--workers", "1"]
    assert preprocess_data.main([*map(str, line)]) == 2
    assert re.search(r"^error: (there is no input|cannot read the tokenizer) .*missing.txt", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_the_standard_library_as_a_corpus(tmp_path, capsys):
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for path in paths:
        assert stdlib_corpus.main(["--output", str(path), "--max-megabytes", "0.3"]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    documents = [json.loads(line) for line in paths[0].read_text().splitlines()]
    names = [document["path"] for document in documents]
    assert len(names) > 5 and names == sorted(names) and not any("site-packages" in name for name in names)
    assert sum(len(document["text"].encode()) for document in documents) <= 0.3e6
    assert f"{len(names)} files, 0.3 MB" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------- datasets


class _Settings:
    """The one thing that GPTDataset asks of a tokenizer."""

    vocab_size, eod = 384, 2
    unique_identifiers: dict = {}  # noqa: RUF012


@pytest.mark.parametrize("seq_length", [1, 7, 16, 64])
@pytest.mark.parametrize("tokens", [65, 1000, 1025])
def test_samples_are_those_of_megatrons_dataset(tmp_path, seq_length, tokens):
    """GPTDataset shuffles documents by its seed before it cuts them; give it the order that undoes that."""
    documents = corpus.random_documents(tokens, 384)
    prefix = corpus.write_tokens(tmp_path / "data", documents)
    shuffled = np.arange(len(documents))
    np.random.RandomState(5).shuffle(shuffled)
    settings = GPTDatasetConfig(
        random_seed=5,
        sequence_length=seq_length,
        split="1,0,0",
        blend=([str(prefix)], None),
        tokenizer=_Settings(),
        path_to_cache=str(tmp_path / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(str(prefix))
    theirs = GPTDataset(indexed, str(prefix), np.argsort(shuffled), None, Split.train, settings)
    ours = Dataset(prefix, seq_length)
    rows = [[*theirs[i]["tokens"].tolist(), int(theirs[i]["labels"][-1])] for i in range(len(theirs))]
    assert len(ours) == len(theirs)
    assert sorted(rows) == sorted(ours[i].tolist() for i in range(len(ours)))
    assert ours.read(np.array([0, len(ours) - 1])).tolist() == [ours[0].tolist(), ours[len(ours) - 1].tolist()]


def test_wide_tokens_and_the_sidecar(tmp_path):
    prefix = corpus.write_tokens(tmp_path / "wide", [[70_000, 1, 2], [5] * 30], dtype=np.int32)
    assert Dataset(prefix, 2)[0].tolist() == [70_000, 1, 2]
    with pytest.raises(ValueError, match=r"ids 1 .. 70000, but model.vocab_size = 70000"):
        open_dataset(prefix, 2, vocab_size=70_000)
    assert len(open_dataset(prefix, 2, vocab_size=70_001)) == 16
    with pytest.raises(IndexError, match="sample 16 of a data set of 16"):
        Dataset(prefix, 2)[16]


def test_a_scan_is_kept_and_done_again_when_the_file_changes(tmp_path, monkeypatch):
    prefix = corpus.write_tokens(tmp_path / "data", [[1, 2, 3, 4]])
    open_dataset(prefix, 2, vocab_size=5, cache=tmp_path / "cache")
    assert len(contents(tmp_path / "cache")) == 1

    def never(_):
        raise AssertionError("scanned again")

    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "token_range", never)
        open_dataset(prefix, 2, vocab_size=5, cache=tmp_path / "cache")
    corpus.write_tokens(tmp_path / "data", [[1, 2, 3, 9]])
    with pytest.raises(ValueError, match=r"ids 1 .. 9"):
        open_dataset(prefix, 2, vocab_size=5, cache=tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"set data.cache to a folder that can be written"):
        open_dataset(prefix, 2, vocab_size=10, cache=tmp_path / "file")


def test_negative_ids_are_found(tmp_path):
    prefix = corpus.write_tokens(tmp_path / "data", [[1, 2, -3, 4]], dtype=np.int32)
    with pytest.raises(ValueError, match=r"ids -3 .. 4"):
        open_dataset(prefix, 2, vocab_size=5)


def test_what_the_sidecar_says_is_checked(source, tmp_path):
    run(source, tmp_path / "out")
    digest = Tokenizer(source / "t.model").digest
    assert open_dataset(tmp_path / "out", 16, vocab_size=384, tokenizer_digest=digest).documents == len(TEXTS)
    assert not list(tmp_path.glob("*.scan.json"))
    with pytest.raises(ValueError, match=r"with another tokenizer than data\.tokenizer"):
        open_dataset(tmp_path / "out", 16, vocab_size=384, tokenizer_digest="0" * 64)
    largest = json.loads((tmp_path / "out.json").read_text())["max_token"]
    with pytest.raises(ValueError, match=f"but model.vocab_size = {largest}"):
        open_dataset(tmp_path / "out", 16, vocab_size=largest)
    corpus.write_tokens(tmp_path / "out", [[1] * 100])
    with pytest.raises(ValueError, match=r"tokens, but .* holds 100"):
        open_dataset(tmp_path / "out", 16, vocab_size=384)
    (tmp_path / "out.json").write_text("{")
    with pytest.raises(ValueError, match="can't be read"):
        open_dataset(tmp_path / "out", 16, vocab_size=384)


def test_broken_files_are_explained(tmp_path):
    prefix = corpus.write_tokens(tmp_path / "data", [[1, 2, 3], [4, 5, 6]])
    binary, index = tmp_path / "data.bin", tmp_path / "data.idx"
    good = contents(tmp_path)

    def refused(message, seq_length=2):
        with pytest.raises(ValueError, match=message):
            Dataset(prefix, seq_length)
        binary.write_bytes(good["data.bin"])
        index.write_bytes(good["data.idx"])

    refused(r"holds 6 tokens, but one sample takes seq_length \+ 1 = 7", seq_length=6)
    binary.unlink()
    refused("there is no .*data.bin; write it with")
    index.unlink()
    refused("there is no .*data.idx")
    binary.write_bytes(b"")
    refused("data.bin is empty")
    binary.write_bytes(good["data.bin"] + b"xx")
    refused("the two do not belong together")
    index.write_bytes(good["data.idx"][:-1])
    refused("is damaged")
    index.write_bytes(b"something else entirely, but long enough")
    refused("not an index in Megatron's format")
    index.write_bytes(good["data.idx"][:9] + b"\x02" + good["data.idx"][10:])
    refused("version 2")
    builder = IndexedDatasetBuilder(str(tmp_path / "none.bin"), dtype=np.uint16)
    builder.finalize(str(tmp_path / "none.idx"))
    with pytest.raises(ValueError, match=r"none.bin is empty"):
        Dataset(tmp_path / "none", 2)
    assert Dataset(prefix, 2)[1].tolist() == [3, 4, 5]
