"""Microbatches against the flat token stream: independent of how a replica is cut, and safe when all ranks start."""

import hashlib
import itertools
import time

import numpy as np
import pytest
import torch

from noloco_mega.data.dataset import Dataset, open_dataset
from noloco_mega.data.loader import Loader, open_loader
from noloco_mega.grid import Grid
from noloco_mega.plan import sampling, views
from noloco_mega.plan.views import View
from tests import corpus
from tests.harness import replica_world, run_ranks
from tools import preprocess_data

SEQ_LENGTH = 16
TOKENS = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random token files without a sidecar, and a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    corpus.write_tokenizer(folder / "t.model", [text.replace("\0", "") for text in corpus.texts(200)])
    corpus.write_tokens(folder / "train", corpus.random_documents(TOKENS, 384, seed=1))
    corpus.write_tokens(folder / "valid", corpus.random_documents(600, 384, seed=2))
    return folder


def loader(folder, view_log=None, **options):
    config = corpus.config(folder, **options)
    data = [open_dataset(name, SEQ_LENGTH, vocab_size=384) for name in (config.data.train, config.data.valid)]
    return Loader(config, *data, views.initial(4) if view_log is None else view_log)


def test_a_batch_is_what_the_plan_says(folder):
    """Against the file read as one array: the tokens of the planned samples, and the same moved by one."""
    stream = np.fromfile(folder / "train.bin", dtype=np.uint16).astype(np.int64)
    log, length = views.initial(4), (TOKENS - 1) // SEQ_LENGTH
    read = loader(folder, log, micro_batch=3, microbatches=2)
    for step, microbatch, replica in [(0, 0, 0), (0, 1, 3), (7, 1, 2), (60, 0, 1)]:
        chosen = sampling.samples(log, step, replica, 3 * microbatch, 3, 6, length, seed=0)
        batch = read.train(step, microbatch, replica)
        for row, sample in enumerate(chosen.tolist()):
            start = sample * SEQ_LENGTH
            assert batch.tokens[row].tolist() == stream[start : start + SEQ_LENGTH].tolist()
            assert batch.labels[row].tolist() == stream[start + 1 : start + SEQ_LENGTH + 1].tolist()
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
        assert batch.loss_mask.shape == (3, SEQ_LENGTH) and batch.loss_mask.dtype == torch.float32
        assert batch.loss_mask.eq(1).all()


def test_the_cut_of_a_replica_changes_no_sample(folder):
    """D = 1 with M = 4, D = 2 with M = 2 and D = 4 with M = 1 number the same microbatches 0 .. M·D − 1."""
    whole = loader(folder, microbatches=4)
    for data in (2, 4):
        cut = loader(folder, microbatches=4 // data, data=data)
        for step, microbatch, replica in [(0, 0, 0), (3, 1, 2), (5, 3, 3), (90, 2, 1)]:
            for ours, theirs in zip(
                whole.train(step, microbatch, replica), cut.train(step, microbatch, replica), strict=True
            ):
                assert torch.equal(ours, theirs)


def test_an_epoch_over_all_replicas_reads_every_sample_once(folder):
    read, length = loader(folder), (TOKENS - 1) // SEQ_LENGTH
    rows = [
        tuple(row.tolist())
        for step in range(length // 16 + 1)
        for replica in range(4)
        for microbatch in range(2)
        for row in read.train(step, microbatch, replica).tokens
    ]
    stream = np.fromfile(folder / "train.bin", dtype=np.uint16)[: length * SEQ_LENGTH].reshape(length, SEQ_LENGTH)
    assert sorted(rows[:length]) == sorted(tuple(row) for row in stream.tolist())


def test_a_view_added_later_is_followed(folder):
    log = views.initial(4)
    read = loader(folder, log)
    before, after = read.train(5, 0, 3).tokens, read.train(6, 0, 3).tokens
    log.append(View(6, (1, 3)))
    assert torch.equal(read.train(5, 0, 3).tokens, before)
    assert not torch.equal(read.train(6, 0, 3).tokens, after)
    assert torch.equal(read.train(6, 0, 3).tokens, loader(folder, log).train(6, 0, 3).tokens)


def test_evaluations_always_see_the_same_samples(folder):
    few, many = loader(folder), loader(folder, [View(0, (2,))], eval_microbatches=9)
    for microbatch in range(2):
        assert torch.equal(few.valid(microbatch).tokens, many.valid(microbatch).tokens)
        assert torch.equal(few.valid(microbatch).labels[:, :-1], few.valid(microbatch).tokens[:, 1:])
    rows = {tuple(row.tolist()) for microbatch in range(9) for row in many.valid(microbatch).tokens}
    assert len(rows) == 18
    with pytest.raises(AssertionError, match="no microbatch 2"):
        few.valid(2)
    with pytest.raises(ValueError, match=r"need 38 samples, but .*valid has 37; lower it to at most 18"):
        loader(folder, eval_microbatches=19)


def test_a_batch_asked_for_again_is_not_read_again(folder, monkeypatch):
    read, reads = loader(folder), []
    original = Dataset.read
    monkeypatch.setattr(Dataset, "read", lambda self, indices: reads.append(1) or original(self, indices))
    first, second = read.train(1, 1, 2), read.train(1, 1, 2)
    assert first.tokens is second.tokens and len(reads) == 1


def test_tokenizer_data_and_model_must_belong_together(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model.vocab_size = 512, but the tokenizer .* has 384 tokens"):
        open_loader(corpus.config(folder, vocab_size=512), views.initial(4))
    texts = corpus.texts(200)
    corpus.write_jsonl(tmp_path / "text.jsonl", texts)
    corpus.write_tokenizer(tmp_path / "t.model", texts[20:])
    for name in ("train", "valid"):
        preprocess_data.preprocess([tmp_path / "text.jsonl"], tmp_path / "t.model", str(tmp_path / name))
    assert open_loader(corpus.config(tmp_path), views.initial(4)).train(0, 0, 0).tokens.shape == (2, SEQ_LENGTH)
    corpus.write_tokenizer(tmp_path / "t.model", texts[90:])
    with pytest.raises(ValueError, match="was written with another tokenizer"):
        open_loader(corpus.config(tmp_path), views.initial(4))


def _meet(folder, rank, ranks):
    """Wait until all ranks are here, so that what follows really happens at the same time."""
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < ranks:
        assert time.monotonic() < deadline, f"only {sorted(folder.iterdir())} came"


def _read_all(place, directory, grid, data_folder, caches):
    replica_world(grid, place, directory)
    digests = set()
    for number, cache in enumerate(caches):
        _meet(directory / f"meeting_{number}", grid.rank(place), grid.size)
        read = open_loader(corpus.config(data_folder, cache=str(cache)), views.initial(2))
        digest = hashlib.sha256()
        for step, microbatch, replica in itertools.product(range(3), range(2), range(2)):
            for tensor in read.train(step, microbatch, replica):
                digest.update(tensor.numpy().tobytes())
        digest.update(read.valid(0).tokens.numpy().tobytes())
        digests.add(digest.hexdigest())
    return digests


def test_all_ranks_of_all_replicas_may_start_on_an_empty_cache(tmp_path, folder):
    """The files have no sidecar, so every rank scans them and keeps what it found; the second time it is there."""
    grid = Grid(replicas=2, stages=2)
    caches = [tmp_path / name for name in ("cache_a", "cache_b", "cache_a", "cache_c")]
    digests = run_ranks(_read_all, grid, tmp_path, grid, folder, caches, limit_seconds=90)
    assert len(set.union(*digests)) == 1
    for cache in caches:
        kept = sorted(path.name.split(".")[0] for path in cache.iterdir())
        assert kept == ["train", "valid"], "temporary files were left, or the findings of two files share a name"


def test_the_digest_tells_token_files_apart(folder, tmp_path):
    documents = corpus.random_documents(TOKENS, 384, seed=1)
    assert loader(folder).digest() == loader(folder).digest()
    digests = {Dataset(folder / "train", SEQ_LENGTH).digest()}
    digests.add(Dataset(corpus.write_tokens(tmp_path / "shorter", documents[:-1]), SEQ_LENGTH).digest())
    documents[-1][-1] ^= 1
    digests.add(Dataset(corpus.write_tokens(tmp_path / "last", documents), SEQ_LENGTH).digest())
    documents[0][0] ^= 1
    digests.add(Dataset(corpus.write_tokens(tmp_path / "first", documents), SEQ_LENGTH).digest())
    assert len(digests) == 4
