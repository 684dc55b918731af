"""launch/*.sh with the real launchers: whole runs of two replicas, started replica by replica."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from noloco_mega import config as configs
from noloco_mega.comm.rendezvous import RendezvousServer
from tests.e2e.conftest import ROOT
from tests.e2e.runs import SECRET, rows_of
from tests.e2e.test_launchers import ended, finished, free_port, start

MPIEXEC = os.environ.get("MPIEXEC") or shutil.which("mpiexec")
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec here (make test-cluster installs MPICH)")


@contextmanager
def rendezvous():
    """The variables of a running rendezvous."""
    server = RendezvousServer(SECRET.encode())
    try:
        yield {"NOLOCO_RENDEZVOUS": "{}:{}".format(*server.address), "NOLOCO_SECRET": SECRET}
    finally:
        server.close()


def complete(raw, *results):
    for status, output in results:
        assert status == 0 and "Traceback" not in output, output
    assert finished(raw) == 2 and max(row["step"] for row in rows_of(raw)) == 6


def test_torchrun_sh_starts_one_replica(config_file, tmp_path):
    path, raw = config_file()
    with rendezvous() as variables:
        replicas = [start(["launch/torchrun.sh", path], tmp_path, NOLOCO_REPLICA=str(r), **variables) for r in range(2)]
        complete(raw, *map(ended, replicas))


def test_torchrun_sh_on_two_nodes_of_a_replica(config_file, tmp_path):
    """One replica of two stages by two torchruns, as on two nodes, and the other one by one."""
    path, raw = config_file(topology={"replicas": 2, "stages": 2})
    port = free_port()
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    with rendezvous() as variables:
        launches = [
            start(["launch/torchrun.sh", path, *nodes, "--node-rank", k], tmp_path, NOLOCO_REPLICA="0", **variables)
            for k in range(2)
        ]
        launches.append(start(["launch/torchrun.sh", path], tmp_path, NOLOCO_REPLICA="1", **variables))
        complete(raw, *map(ended, launches))


def test_deepspeed_sh_on_a_hostfile_of_two_without_ssh(config_file, tmp_path):
    """Four ranks in two replicas on two hosts of three slots and one: the second replica lies on both hosts."""
    path, raw = config_file(topology={"replicas": 2, "stages": 2})
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-0 slots=3\nworker-1 slots=1\n")
    with rendezvous() as variables:
        nodes = [
            start(
                ["launch/deepspeed.sh", path, hosts, "--no_ssh", "--node_rank", node, "--", "--set", "run.log_every=2"],
                tmp_path,
                HOME=str(tmp_path),
                **variables,
            )
            for node in range(2)
        ]
        complete(raw, *map(ended, nodes))
    assert {row["step"] for row in rows_of(raw) if "loss" in row} >= {2, 4, 6} and rows_of(raw)


@needs_mpi
@pytest.mark.parametrize("options", [[], ["--mpi4py"], ["--together"]], ids=["variables", "mpi4py", "together"])
def test_mpi_sh(config_file, tmp_path, options):
    path, raw = config_file()
    variables = {"MPIEXEC": MPIEXEC}
    if "--mpi4py" in options:
        variables |= {"RANK": "7", "WORLD_SIZE": "99"}  # left over from something else: only MPI knows better
    complete(raw, ended(start(["launch/mpi.sh", path, *options], tmp_path, **variables)))


@needs_mpi
def test_a_killed_replica_of_mpi_ends_no_other(config_file, tmp_path):
    """One launch per replica: mpiexec ends the killed rank's replica alone, and the script says that one failed."""
    path, raw = config_file(
        run__steps=100_000, noloco__exchange_deadline_seconds=3.0, noloco__heartbeat_seconds=0.5,
    )  # fmt: skip
    script = start(["launch/mpi.sh", path], tmp_path, MPIEXEC=MPIEXEC)
    wait_for_steps(raw, script, 4)
    ranks = ranks_below(script.pid)
    assert set(ranks) == {"0", "1"}
    os.kill(ranks["1"], signal.SIGKILL)
    reached = max(row["step"] for row in rows_of(raw))
    wait_for_steps(raw, script, reached + 8)
    script.send_signal(signal.SIGTERM)
    status, output = ended(script)
    assert status == 1 and "1 of 2 launches ended with an error" in output, output
    assert finished(raw) == 1


def wait_for_steps(raw, process, step, limit_seconds=120):
    rows = configs.parse(raw).output / "metrics.jsonl"
    deadline = time.monotonic() + limit_seconds
    while not (rows.exists() and any(row["step"] >= step for row in rows_of(raw))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no step {step} in {limit_seconds} s"
        time.sleep(0.2)


def ranks_below(pid):
    """The training processes below a process: replica -> pid of its first rank."""
    import psutil

    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        words = process.cmdline()
        if words[:3] == [sys.executable, "-m", "noloco_mega.train"]:
            found.setdefault(process.environ()["NOLOCO_REPLICA"], process.pid)
    return found


@pytest.mark.parametrize(
    "words, variables, message",
    [
        (["launch/torchrun.sh", "C"], {}, "set NOLOCO_REPLICA to this replica's number"),
        (["launch/torchrun.sh", "C"], {"NOLOCO_REPLICA": "0"}, "set NOLOCO_RENDEZVOUS=HOST:PORT"),
        (["launch/torchrun.sh", "C", "--nnodes", "3", "--together"], {}, "cannot be spread evenly over 3 nodes"),
        (["launch/deepspeed.sh", "C", "H", "--no_ssh", "--node_rank", "0"], {}, "every host runs this script"),
        (
            ["launch/deepspeed.sh", "C", "H", "--no_ssh", "--node_rank", "2"],
            {"NOLOCO_RENDEZVOUS": "h:1"},
            "hosts 0 to 1",
        ),
        (["launch/deepspeed.sh", "C", "H"], {}, "set NOLOCO_RENDEZVOUS_HOST"),
        (["launch/mpi.sh", "C"], {"MPIEXEC": "no-such-mpiexec"}, "load your cluster's MPI module"),
        (["launch/mpi.sh"], {}, "launch/mpi.sh CONFIG [--hostfile FILE]"),
        (["launch/local.sh", "C"], {"CUDA_VISIBLE_DEVICES": "0"}, "shows 1 GPUs, but 2 replicas of 1 ranks need 2"),
    ],
)
def test_a_script_started_the_wrong_way_says_how_to(config_file, tmp_path, words, variables, message):
    path, raw = config_file()
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-0 slots=1\nworker-1 slots=1\n")
    words = [{"C": path, "H": hosts}.get(word, word) for word in words]
    status, output = ended(start(words, tmp_path, **variables))
    assert status == 2 and message in output, output
    assert finished(raw) == 0


def test_replicas_on_one_machine_take_different_gpus(tmp_path):
    """`gpus_of`, sourced as the scripts do."""

    def gpus(**variables):
        text = "script=test; source launch/common.sh; replicas=2 ranks=2; gpus_of 0; gpus_of 1"
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
        return subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True).stdout.split()

    assert gpus(CUDA_VISIBLE_DEVICES="3,1,6,7,0") == ["CUDA_VISIBLE_DEVICES=3,1", "CUDA_VISIBLE_DEVICES=6,7"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = gpus(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert found == ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"]


@pytest.mark.parametrize(
    "cuda, compiler, message",
    [
        ("", "12.6", "this torch was built without CUDA"),
        ("12.6", "", "install the CUDA toolkit 12.6"),
        ("12.6", "11.8", "nvcc is CUDA 11.8, torch was built for 12.6"),
        ("12.6", "12.4", "transformer_engine[pytorch]"),
    ],
)
def test_install_gpu_sh_says_what_is_missing(tmp_path, cuda, compiler, message):
    """With a Python and a compiler that only tell their versions: nothing is installed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *cuda*) echo "{cuda}" ;; *) echo 2.13.0 ;; esac\n')
    python.chmod(0o755)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "sed", "env"):
        (programs / name).symlink_to(shutil.which(name))
    if compiler:
        (programs / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {compiler}, V{compiler}.1'\n")
        (programs / "nvcc").chmod(0o755)
    found = subprocess.run(
        ["launch/install_gpu.sh", "--dry-run", "--with-apex"],
        env={"PATH": str(programs), "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert message in found.stdout + found.stderr, found
    assert (found.returncode == 0) == (message == "transformer_engine[pytorch]")
    assert found.returncode or "git+https://github.com/NVIDIA/apex.git" in found.stdout


@pytest.mark.parametrize(
    "status, variables, ends, requeued",
    [
        (0, {}, 0, False),
        (2, {}, 2, False),
        (75, {}, 75, True),
        (137, {"SLURM_RESTART_COUNT": "3"}, 137, True),
        (75, {"SLURM_RESTART_COUNT": "3", "NOLOCO_RESTARTS": "3"}, 2, False),
        (75, {"NOLOCO_CHECK": "1"}, 75, False),
    ],
)
def test_which_replicas_of_an_array_are_requeued(config_file, tmp_path, status, variables, ends, requeued):
    """The script itself, with stand-ins for srun and scontrol. Its SLURM_JOB_ID is the whole array's."""
    path, _ = config_file()
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": f"exit {status}", "scontrol": f'echo "$*" >> {tmp_path}/asked'}.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    job = {"JOB_ID": "7", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1", "NTASKS": "1", "JOB_NAME": "test"}
    script = subprocess.run(
        ["bash", "launch/slurm/replica_array.sbatch", path],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHON": sys.executable,
             "SLURM_SUBMIT_DIR": str(ROOT), "NOLOCO_RENDEZVOUS": "h:1", "NOLOCO_LOGS": str(tmp_path / "logs"),
             **{f"SLURM_{name}": value for name, value in job.items()}, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert script.returncode == ends, script.stderr
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7_1\n" if requeued else "")
