"""A checkpoints folder on disk: what is whole, what is removed when, and what a failure leaves."""

import json
import os
import time
import zlib
from types import SimpleNamespace

import pytest
import torch

from noloco_mega import cli
from noloco_mega.checkpoint import format, reader
from noloco_mega.checkpoint.courses import Course
from noloco_mega.checkpoint.folders import Checkpoints, step_of
from noloco_mega.checkpoint.format import CheckpointError, RankContent, Span, Stored
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.config import parse
from noloco_mega.model.parameters import ParameterSlices, Piece
from tests.checkpoints import NUMEL, content, facts, save
from tests.unit.test_config import changed

CONFIG = parse(changed(topology={"replicas": 2}))


def tree(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_names():
    assert step_of("step_00000200") == 200 and step_of("step_123456789") == 123456789
    assert step_of("step_200") is None and step_of("latest") is None


def test_a_box_across_ranks_and_only_a_whole_folder(tmp_path):
    config = parse(changed(topology={"replicas": 1, "tensor": 2}))
    folder = save(tmp_path, config, 7, 0)
    saved = SavedReplica(folder)
    assert (saved.step, saved.names, saved.kinds) == (7, ["weight"], ["master"])
    assert torch.equal(saved.tensor("weight"), torch.full((2 * NUMEL,), 7.0))
    assert saved.box("weight", "master", ((NUMEL - 3, NUMEL + 2),)).shape == (5,)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "rank_000.safetensors", "rank_001.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("start", [0, NUMEL // 2, NUMEL])
def test_a_box_of_a_ranks_size_wherever_it_lies(tmp_path, start):
    draft = tmp_path / "draft"
    draft.mkdir()
    for rank in (0, 1):
        format.write_rank(draft, rank, content(rank, rank, 2))
    format.commit(draft, tmp_path / "saved", (0, 1), {"step": 1})
    saved = SavedReplica(tmp_path / "saved")
    whole = torch.arange(2 * NUMEL) // NUMEL
    assert torch.equal(saved.box("weight", "master", ((start, start + NUMEL),)), whole[start : start + NUMEL].float())


def matrix(rank, rows, columns):
    """A content of two kinds of a matrix of (2 · rows) x columns, of which the rank holds `rows`; elements count up."""
    whole = torch.arange(2 * rows * columns, dtype=torch.float32)
    part = whole[rank * rows * columns : (rank + 1) * rows * columns]
    piece = Piece(((0, rows), (0, columns)), ((rank * rows, (rank + 1) * rows), (0, columns)))
    kinds = {"master": part, "exp_avg": -part}
    return RankContent(
        tensors=[Stored(key=f"{kind}.0", kind=kind, tensor=tensor, layout="0") for kind, tensor in kinds.items()],
        layouts={"0": [Span("weight", 0, 0, rows * columns)]},
        slices=[ParameterSlices("weight", (2 * rows, columns), (piece,))],
        numbers={},
    )


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A saved matrix of 200 x 30 on two ranks, and a list of the bytes of every read from its files."""
    draft = tmp_path / "draft"
    draft.mkdir()
    for rank in (0, 1):
        format.write_rank(draft, rank, matrix(rank, 100, 30))
    format.commit(draft, tmp_path / "saved", (0, 1), {"step": 1})
    real, reads = reader._read_whole, []

    def count(file, target):
        reads.append(len(target))
        real(file, target)

    monkeypatch.setattr(reader, "_read_whole", count)
    return SavedReplica(tmp_path / "saved"), reads


def test_loading_reads_a_file_once_and_a_box_only_its_rows(counted):
    saved, reads = counted
    targets = {f"{kind}.0": torch.zeros(3000) for kind in ("master", "exp_avg")}
    saved.load(saved.parts[1], targets)
    assert sum(reads) == saved.parts[1]["bytes"]
    expected = torch.arange(3000, 6000).float()
    assert torch.equal(targets["master.0"], expected) and torch.equal(targets["exp_avg.0"], -expected)
    saved.take_as_verified()
    whole = torch.arange(6000).float().view(200, 30)
    for top, bottom, left, right in [(120, 130, 0, 30), (90, 110, 0, 30), (50, 51, 7, 9), (0, 200, 0, 30)]:
        reads.clear()
        box = saved.box("weight", "exp_avg", ((top, bottom), (left, right)))
        assert torch.equal(box, -whole[top:bottom, left:right])
        assert sum(reads) == (bottom - top) * 30 * 4


def test_sums_that_are_slower_than_the_disk(counted, monkeypatch):
    """No chunk is overwritten before it is summed."""

    def slowly(chunk, crc):
        time.sleep(0.002)
        return zlib.crc32(chunk, crc)

    monkeypatch.setattr(reader, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(reader, "zlib", SimpleNamespace(crc32=slowly))
    saved, reads = counted
    saved.verify(saved.parts[0])
    assert sum(reads) == saved.parts[0]["bytes"] and max(reads) == 1000
    saved.verify(saved.parts[0])
    assert sum(reads) == saved.parts[0]["bytes"], "it is verified already"


def test_a_damaged_file_is_named_by_what_loads_it(counted):
    saved, _ = counted
    path = saved.folder / saved.parts[0]["file"]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_000.safetensors is damaged: exp_avg.0 does not match"):
        saved.load(saved.parts[0], {"master.0": torch.zeros(3000)})


def test_pruning_keeps_the_newest_and_the_one_known_complete(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, CONFIG, step, 0)
        save(tmp_path, CONFIG, step, 1)
    mine = Checkpoints(tmp_path, 0, 2)
    mine.prune(2, {10})
    assert mine.steps() == [10, 30, 40] and Checkpoints(tmp_path, 1, 2).steps() == [10, 20, 30, 40]
    mine.prune(2, {40})
    assert mine.steps() == [30, 40]
    Checkpoints(tmp_path, 1, 2).prune(1, {40})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000030", "step_00000040"]


def test_latest_never_goes_back_and_is_replaced_whole(tmp_path):
    one, other = Checkpoints(tmp_path, 0, 2), Checkpoints(tmp_path, 1, 2)
    assert one.latest() is None
    one.advance_latest(20)
    other.advance_latest(10)
    assert one.latest() == 20 and (tmp_path / "latest").read_text() == "step_00000020\n"
    other.advance_latest(30)
    assert one.latest() == 30


def test_a_run_that_goes_on_from_an_older_step_sets_newer_ones_aside(tmp_path):
    for step in (10, 20):
        for replica in range(2):
            save(tmp_path, CONFIG, step, replica)
    mine = Checkpoints(tmp_path, 0, 2)
    mine.advance_latest(20)
    mine.draft(30).mkdir(parents=True)
    mine.begin(10, [Course(0, 0)])
    assert mine.steps() == [10] and Checkpoints(tmp_path, 1, 2).steps() == [10, 20] and mine.latest() == 10
    assert list(mine.look(20).replicas) == [1], "no mixture of two courses looks complete"
    assert not (tmp_path / "step_00000030").exists()
    save(tmp_path, CONFIG, 20, 0, 5.0)
    mine.drop_superseded()
    assert float(SavedReplica(mine.folder(20)).tensor("weight")[0]) == 5.0
    assert not [name for name in tree(tmp_path) if "superseded" in name]


def test_folders_of_replicas_that_are_no_more_go_with_those_of_the_others(tmp_path):
    four = parse(changed(topology={"replicas": 4}))
    for step in (10, 20):
        for replica in range(4):
            save(tmp_path, four, step, replica)
    for replica in range(2):
        Checkpoints(tmp_path, replica, 2).prune(1, {20})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000020"]
    for replica in range(2):
        Checkpoints(tmp_path, replica, 2).begin(10, [Course(0, 0)])
    assert Checkpoints(tmp_path, 0, 2).look(20).replicas == {}


@pytest.mark.parametrize("moment", ["file", "manifest", "rename"])
def test_an_interrupted_write_leaves_the_older_checkpoint_as_it_was(tmp_path, monkeypatch, moment):
    """The process dies, in the middle of the write of a step that exists already."""
    save(tmp_path, CONFIG, 10, 0)
    mine = Checkpoints(tmp_path, 0, 2)
    before = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()}
    mine.draft(10).mkdir()
    if moment == "file":
        monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("died")))
    with pytest.raises(OSError, match="died"):
        format.write_rank(mine.draft(10), 0, content(99.0))
        if moment == "manifest":
            monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("died")))
        else:
            real = os.rename
            monkeypatch.setattr(
                os, "rename",
                lambda a, b: (_ for _ in ()).throw(OSError("died")) if str(a).endswith("draft") else real(a, b),
            )  # fmt: skip
        format.commit(mine.draft(10), mine.folder(10), [0], facts(CONFIG, 10, 0))
    monkeypatch.undo()
    mine.begin(10, [Course(0, 0)])
    assert {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()} | {
        ".latest.lock": b""
    } == before | {".latest.lock": b""}


def test_a_folder_that_was_moved_is_no_checkpoint(tmp_path):
    save(tmp_path, CONFIG, 10, 0).rename(tmp_path / "step_00000010" / "replica_01")
    found = Checkpoints(tmp_path, 0, 2).look(10)
    assert not found.replicas and "it was moved there" in found.problems[0]


def test_inspect(tmp_path, capsys):
    run = tmp_path / "run"
    for step in (10, 20):
        for replica in range(2):
            save(run / "checkpoints", CONFIG, step, replica)
    assert cli.main(["inspect", str(run), "--verify"]) == 0
    text = capsys.readouterr().out
    tokens = 2 * 20 * CONFIG.replica_batch_size * CONFIG.model.seq_length
    expected = ["step         20 of", "2 replicas of 1 stages", f"{tokens:,}", "every checksum verified", "loss 3.5000"]
    for words in (*expected, "step_00000010", "replica 1"):
        assert words in text, text
    victim = run / "checkpoints" / "step_00000010" / "replica_01" / "rank_000.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert cli.main(["inspect", str(run / "checkpoints" / "step_00000010"), "--verify"]) == 0
    assert f"problem    {victim} is damaged" in capsys.readouterr().out
    victim.unlink()
    cli.main(["inspect", str(run / "checkpoints" / "step_00000010")])
    text = capsys.readouterr().out
    assert "no: replica 1 is missing or not whole" in text and "is missing" in text
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err


def test_a_manifest_is_plain_json(tmp_path):
    manifest = json.loads((save(tmp_path, CONFIG, 10, 0) / "manifest.json").read_text())
    (part,) = manifest["content"]["parts"]
    assert part["parameters"] == {"weight": {"shape": [NUMEL], "pieces": [[[[0, NUMEL]], [[0, NUMEL]]]]}}
    assert part["tensors"][0]["dtype"] == "float32" and manifest["content"]["format"] == format.FORMAT
