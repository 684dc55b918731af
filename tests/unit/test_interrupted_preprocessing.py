"""Preprocessing that is killed anywhere and started again gives the bytes of one that was not."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from noloco_mega.data import token_files
from tests import corpus
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[2]
TEXTS = corpus.texts(60)
SPLIT = {"valid_fraction": 0.3}
PARTS = ("out_train", "out_valid")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A text with two bad lines, its tokenizer, and `whole`: the files that an undisturbed run makes of them."""
    folder = tmp_path_factory.mktemp("source")
    corpus.write_tokenizer(folder / "t.model", [text.replace("\0", "") for text in corpus.texts(300)])
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join([*lines[:9], "{", *lines[9:50], '{"other": 1}', *lines[50:]]) + "\n")
    (folder / "whole").mkdir()
    run(folder, folder / "whole", **SPLIT)
    return folder


@pytest.fixture
def often(monkeypatch):
    """A state is saved after every 20 documents."""
    monkeypatch.setattr(token_files, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(preprocess_data, "BATCH_DOCUMENTS", 20)


def run(source, folder, **options):
    """Tokenize `source` into FOLDER/out; what was printed."""
    printed = io.StringIO()
    options = {"inputs": [source / "a.jsonl"], "tokenizer_path": source / "t.model"} | options
    preprocess_data.preprocess(output=str(folder / "out"), **options, console=Console(file=printed, width=500))
    return printed.getvalue()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_at(event, source, folder):
    """In a child process: run until `event` calls have changed or synced files, then SIGKILL. True if it came to its
    end before that."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return not os.WIFSIGNALED(status)
    left = [event]

    def counted(function):
        def call(*arguments, **options):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    os.fsync, os.replace, os.unlink, os.rmdir = map(counted, (os.fsync, os.replace, os.unlink, os.rmdir))
    try:
        run(source, folder, **SPLIT)
        os._exit(0)
    finally:
        os._exit(1)


def visible_are_whole(folder):
    """No .idx but of a file set that is whole; and beside the unfinished folder nothing but the sets' files."""
    for part in PARTS:
        if (folder / f"{part}.idx").exists():
            facts = json.loads((folder / f"{part}.json").read_text())
            assert token_files.state(str(folder / part), facts["fingerprint"]) == "current"
    names = {path.name for path in folder.iterdir()} - {"out.unfinished"}
    assert names <= {part + suffix for part in PARTS for suffix in token_files.SUFFIXES}


@pytest.mark.usefixtures("often")
def test_killed_at_any_moment(source, tmp_path):
    event, ended = 0, False
    while not ended:
        event += 1
        folder = tmp_path / str(event)
        folder.mkdir()
        ended = killed_at(event, source, folder)
        visible_are_whole(folder)
        printed = run(source, folder, **SPLIT)
        assert contents(folder) == contents(source / "whole"), f"killed at event {event}"
        assert "2 documents were left out" in printed or "up to date" in printed
    assert event > 40, "the run was not killed in its end phase"


@pytest.mark.usefixtures("often")
def test_killed_again_and_again(source, tmp_path):
    attempts = 0
    while not killed_at(12, source, tmp_path):
        attempts += 1
        assert attempts < 30, "it does not come forward"
    assert attempts > 2 and contents(tmp_path) == contents(source / "whole")


def interrupted(source, folder, **options):
    """A run that Ctrl-C ended behind its second batch."""
    batches = iter(range(2))

    def stop(self):
        if next(batches, None) is None:
            raise KeyboardInterrupt
        save(self)

    with pytest.MonkeyPatch.context() as patched:
        save = token_files.Draft.save_if_due
        patched.setattr(token_files.Draft, "save_if_due", stop)
        with pytest.raises(KeyboardInterrupt):
            run(source, folder, **(SPLIT | options))
    assert [path.name for path in folder.iterdir()] == ["out.unfinished"]


@pytest.mark.usefixtures("often")
def test_it_goes_on_with_another_number_of_workers(source, tmp_path):
    interrupted(source, tmp_path)
    printed = run(source, tmp_path, workers=2, **SPLIT)
    assert "going on behind the 40 documents" in printed
    assert contents(tmp_path) == contents(source / "whole")


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("changed", ["text", "tokenizer", "options", "nothing, but --no-resume"])
def test_what_has_changed_is_begun_anew(source, tmp_path, changed):
    mine, out, clean = (tmp_path / name for name in ("source", "out", "clean"))
    shutil.copytree(source, mine)
    for folder in (out, clean):
        folder.mkdir()
    interrupted(mine, out)
    options = dict(SPLIT)
    if changed == "text":
        (mine / "a.jsonl").write_text((mine / "a.jsonl").read_text().replace("replica", "copy"))
    elif changed == "tokenizer":
        corpus.write_tokenizer(mine / "t.model", corpus.texts(300)[40:])
    elif changed == "options":
        options["test_fraction"] = 0.2
    else:
        options["resume"] = False
    printed = run(mine, out, **options)
    assert "an interrupted run is dropped" in printed and "going on" not in printed
    run(mine, clean, **options)
    assert contents(out) == contents(clean)


@pytest.mark.usefixtures("often")
def test_a_damaged_part_is_begun_anew(source, tmp_path):
    interrupted(source, tmp_path)
    path = tmp_path / "out.unfinished" / "out_train.bin"
    path.write_bytes(path.read_bytes()[:100])
    assert "an interrupted run is dropped" in run(source, tmp_path, **SPLIT)
    assert contents(tmp_path) == contents(source / "whole")


@pytest.mark.usefixtures("often")
def test_what_was_there_stays_until_the_new_files_are_whole(source, tmp_path):
    run(source, tmp_path, valid_fraction=0.5)
    before = contents(tmp_path)
    interrupted_files = tmp_path / "out.unfinished"
    with pytest.MonkeyPatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(token_files.Growing, "add", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        run(source, tmp_path, **SPLIT)
    shutil.rmtree(interrupted_files)
    assert contents(tmp_path) == before


def test_two_runs_into_one_output(source, tmp_path):
    draft = token_files.Draft(tmp_path / "out.unfinished", ["a"], token_files.narrowest(300), "x", resume=True)
    with draft:
        with pytest.raises(ValueError, match=r"another process is writing in .*out\.unfinished"):
            run(source, tmp_path)
        assert list((tmp_path / "out.unfinished").iterdir())
    run(source, tmp_path)


def test_a_kill_ends_the_workers_too(source, tmp_path):
    big = corpus.write_jsonl(tmp_path / "big.jsonl", corpus.texts(6000))
    program = (
        "from noloco_mega.data import token_files; from tools import preprocess_data as p; import sys\n"
        "token_files.SAVE_SECONDS, p.BATCH_DOCUMENTS = 0, 40\nsys.exit(p.main(sys.argv[1:]))"
    )
    words = [big, "--tokenizer", source / "t.model", "--output", tmp_path / "out", "--workers", 2]
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, words)], cwd=ROOT, stderr=subprocess.DEVNULL)
    state, deadline = tmp_path / "out.unfinished" / "state.json", time.monotonic() + 90
    while not state.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert "going on behind" in run(source, tmp_path, inputs=[big])
    (tmp_path / "clean").mkdir()
    run(source, tmp_path / "clean", inputs=[big])
    assert {name: (tmp_path / name).read_bytes() for name in contents(tmp_path / "clean")} == contents(
        tmp_path / "clean"
    )
