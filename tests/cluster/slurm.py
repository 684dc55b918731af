"""A SLURM cluster of four nodes on this machine, for tests: a controller, four node daemons, keys and ports of its own.

Only processes started here are ever signalled, and nothing outside `folder` is written.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
GPUS_PER_NODE = 2


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"no {', '.join(absent)} here (make test-cluster installs SLURM)"
    if os.getuid() != 0:
        return "SLURM's daemons need root here"
    return None


class Cluster:
    """A running cluster. `environ` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("munge", "state", "spool", "log"):
            (folder / name).mkdir(mode=0o755)
        folder.chmod(0o755)
        for number in range(GPUS_PER_NODE):
            os.mknod(folder / f"nvidia{number}", 0o600 | 0o020000, os.makedev(1, 3))  # /dev/null under another name
        self._daemons: list[subprocess.Popen] = []
        self._write_settings()
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environ["PATH"] += ":/usr/sbin"
        munge = folder / "munge"
        self._start("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
                    f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
        self._until(lambda: (munge / "socket").exists(), "munged")
        self._start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for node in NODES:
            (folder / "spool" / node).mkdir()
            self._start("slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", node)
        self._until(lambda: self.run("sinfo", "-h", "-o", "%D", "-t", "idle") == str(len(NODES)), "SLURM")

    def run(self, *words: object) -> str:
        """Output of one of SLURM's commands; empty if it failed."""
        return subprocess.run(
            [str(word) for word in words], env=self.environ, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    def submit(self, *words: object, **variables: str) -> str:
        """The id of a new batch job, submitted from the project's folder."""
        found = subprocess.run(
            ["sbatch", "--parsable", *map(str, words)],
            env={**self.environ, "PYTHON": sys.executable, **variables},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, states: tuple[str, ...], limit_seconds: float = 180) -> dict[str, str]:
        """The job once it is in one of these states."""
        deadline = time.monotonic() + limit_seconds
        while (found := self.job(number)).get("JobState") not in states:
            assert time.monotonic() < deadline, f"job {number} is {found.get('JobState')}, wanted {states}\n{found}"
            time.sleep(0.3)
        return found

    def ranks(self) -> dict[int, int]:
        """The training processes of all running jobs: rank -> pid."""
        import psutil

        found = {}
        for daemon in self._daemons:
            for process in psutil.Process(daemon.pid).children(recursive=True):
                if process.cmdline()[1:3] == ["-m", "noloco_mega.train"]:
                    found[int(process.environ()["SLURM_PROCID"])] = process.pid
        # Step daemons leave slurmd's family; their processes name this cluster.
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [])[1:3] == ["-m", "noloco_mega.train"]:
                environ = process.environ()
                if environ.get("SLURM_CONF") == self.environ["SLURM_CONF"] and "SLURM_STEP_ID" in environ:
                    found[int(environ["SLURM_PROCID"])] = process.pid
        return found

    def close(self) -> None:
        self.run("scancel", "--user=root")
        deadline = time.monotonic() + 20
        while self.run("squeue", "-h", "-t", "running,completing") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, *words: str) -> None:
        log = open(self.folder / "log" / f"{words[0]}.{len(self._daemons)}", "w")  # noqa: SIM115 (the daemon's for life)
        self._daemons.append(subprocess.Popen(words, env=self.environ, stdout=log, stderr=subprocess.STDOUT))

    def _until(self, ready, what: str) -> None:
        deadline = time.monotonic() + 60
        while not ready():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"{what} did not come up; ended: {ended}"
            time.sleep(0.1)

    def _write_settings(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (folder / "munge").chmod(0o755)
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 "
            f"Gres=gpu:{GPUS_PER_NODE}"
            for node, port in zip(NODES, ports, strict=True)
        )
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-{GPUS_PER_NODE - 1}]\n")
        (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1,requeue_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmdTimeout=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
{nodes}
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
""")


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports
