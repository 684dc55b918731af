"""Real launchers, and the errors of a process that was started the wrong way."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from noloco_mega import config as configs
from tests.e2e.conftest import ROOT
from tests.e2e.runs import rows_of

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(words, tmp_path, **variables):
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(tmp_path), **variables}
    environ["PATH"] = f"{os.path.dirname(sys.executable)}:{environ['PATH']}"
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process, limit_seconds=150):
    """A process's status and output."""
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"hang; output:\n{output}") from None
    return process.returncode, output


@pytest.fixture
def config_file(tiny, tmp_path):
    def write(**changes):
        raw = tiny(**{"topology": {"replicas": 2, "stages": 1}, "run__steps": 6, **changes})
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return path, raw

    return write


def finished(raw):
    output = configs.parse(raw).output
    return len(list(output.glob("replica_*/weights/manifest.json")))


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_deepspeed_launcher(config_file, tmp_path):
    path, raw = config_file(run__tensorboard=True)
    words = [
        "deepspeed", "--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", free_port(), "--module",
        "noloco_mega.train", "--deepspeed_config", path,
    ]  # fmt: skip
    status, output = ended(start(words, tmp_path))
    assert status == 0, output
    assert finished(raw) == 2 and max(row["step"] for row in rows_of(raw)) == 6
    assert len(list(configs.parse(raw).output.glob("replica_*/events.out.tfevents.*"))) == 2


def test_torchrun_for_the_whole_run(config_file, tmp_path):
    path, raw = config_file()
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module",
        "noloco_mega", "train", "--config", path, "--set", "run.steps=4",
    ]  # fmt: skip
    status, output = ended(start(words, tmp_path))
    assert status == 0, output
    assert finished(raw) == 2 and max(row["step"] for row in rows_of(raw)) == 4


def test_local_sh_stops_cleanly_when_it_is_told_to(config_file, tmp_path):
    path, raw = config_file(run__steps=100_000)
    process = start(["launch/local.sh", path], tmp_path)
    rows = configs.parse(raw).output / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (rows.exists() and any(row["step"] > 5 for row in rows_of(raw))):
            assert time.monotonic() < deadline and process.poll() is None, "the run did not get to step 5"
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        status, output = ended(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
    assert status == 0 and finished(raw) == 2 and "Traceback" not in output, output


@pytest.mark.parametrize(
    "variables, message",
    [
        ({}, "no launcher started this process"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "started 1 processes, but the topology"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NOLOCO_REPLICA": "0"}, "no rendezvous: start one"),
    ],
)
def test_a_process_started_the_wrong_way_says_how_to(config_file, tmp_path, variables, message):
    path, raw = config_file()
    status, output = ended(
        start(
            [sys.executable, "-m", "noloco_mega", "train", "--config", path, "--local_rank", "0"], tmp_path, **variables
        )
    )
    assert status == 2 and message in output and "Traceback" not in output, output
    assert finished(raw) == 0


def test_a_rendezvous_that_is_not_there_is_named_with_how_long_it_was_waited_for(config_file, tmp_path):
    path, raw = config_file(noloco__rendezvous_timeout_seconds=2.0)
    port = free_port()
    status, output = ended(
        start(
            [sys.executable, "-m", "noloco_mega", "train", "--config", path],
            tmp_path,
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            NOLOCO_REPLICA="0",
            NOLOCO_RENDEZVOUS=f"127.0.0.1:{port}",
        )
    )
    assert status == 2 and f"no rendezvous answered at 127.0.0.1:{port} in 2 s" in output, output
    assert "Traceback" not in output and finished(raw) == 0


def test_a_port_in_use_says_what_to_choose(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "noloco_mega", "rendezvous", "--port", port]
        status, output = ended(start(words, tmp_path))
    assert status == 2 and f"cannot listen on 127.0.0.1:{port}" in output, output
    assert "another process has this port: choose another one, or 0" in output and "Traceback" not in output


def test_a_mistake_in_the_config_starts_nothing(config_file, tmp_path):
    path, raw = config_file()
    status, output = ended(start(["launch/local.sh", path, "--set", "noloco.iner_steps=3"], tmp_path))
    assert status != 0 and 'did you mean "inner_steps"?' in output
    assert not configs.parse(raw).output.exists()
