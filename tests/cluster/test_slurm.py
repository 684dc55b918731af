"""launch/slurm/ on a real SLURM of four nodes: jobs, arrays, lost nodes, the time limit, killed tasks."""

import dataclasses
import os
import signal
import time

import pytest

from noloco_mega import config as configs
from tests.cluster.slurm import Cluster, missing
from tests.cluster.test_launch_scripts import rendezvous
from tests.e2e.runs import rows_of
from tests.e2e.test_launchers import finished

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(400),
]
SCRIPT, ARRAY = "launch/slurm/train.sbatch", "launch/slurm/replica_array.sbatch"
CAN_RESUME = "resume" in {field.name for field in dataclasses.fields(configs.Run)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture
def submit(cluster, config_file, tmp_path):
    """A function that submits a job of two replicas of two stages, on two nodes; (job, its config)."""

    def call(script, *options, start_replicas=None, **changes):
        topology = {"replicas": 2, "stages": 2, "start_replicas": start_replicas}
        path, raw = config_file(topology=topology, **changes)
        output = tmp_path / ("batch-%a.out" if script == ARRAY else "batch-%j.out")
        job = cluster.submit(
            f"--output={output}", "--chdir=.", *options, script, path,
            NOLOCO_LOGS=str(tmp_path / "logs"), XDG_CONFIG_HOME=str(tmp_path), **variables,
        )  # fmt: skip
        return job, raw

    variables: dict[str, str] = {}
    call.variables = variables
    yield call
    cluster.run("scancel", "--user=root")
    deadline = time.monotonic() + 60
    while cluster.run("squeue", "-h") and time.monotonic() < deadline:
        time.sleep(0.3)


TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def logs(tmp_path):
    """All that a job wrote, for messages."""
    return "\n".join(
        f"--- {path}\n{path.read_text()}" for path in sorted(tmp_path.rglob("*")) if path.suffix in (".out", ".log")
    )


def wait_for_step(raw, step, tmp_path, limit_seconds=150):
    rows = configs.parse(raw).output / "metrics.jsonl"
    deadline = time.monotonic() + limit_seconds
    while not (rows.exists() and any(row["step"] >= step and "loss" in row for row in rows_of(raw))):
        assert time.monotonic() < deadline, f"no step {step} in {limit_seconds} s\n{logs(tmp_path)}"
        time.sleep(0.3)


def test_a_run_as_one_job(cluster, submit, tmp_path):
    job, raw = submit(SCRIPT, *TWO_NODES, "--gpus-per-node=2")
    found = cluster.wait(job, ENDED)
    assert found["JobState"] == "COMPLETED", logs(tmp_path)
    assert finished(raw) == 2 and max(row["step"] for row in rows_of(raw)) == 6
    assert len(list((tmp_path / "logs" / job).glob("rank_[0-3].log"))) == 4
    assert "2 replicas of 2 ranks on n[1-2], rendezvous at 127.0.0.1:" in (tmp_path / f"batch-{job}.out").read_text()


def test_the_check_of_a_job_sees_its_gpus(cluster, submit, tmp_path):
    submit.variables["NOLOCO_CHECK"] = "1"
    job, raw = submit(SCRIPT, *TWO_NODES, "--gpus-per-node=2")
    assert cluster.wait(job, ENDED)["JobState"] == "COMPLETED", logs(tmp_path)
    text = (tmp_path / "logs" / job / "rank_0.log").read_text()
    assert "VERDICT: this launch works: all 4 ranks are here" in text
    # rank, replica, stage, tensor, data, host, address, interface, device, GPUs
    rows = [line.split() for line in text.splitlines() if " free, " in line]
    assert [row[:3] + row[9:10] for row in rows] == [
        ["0", "0", "0", "0,1"], ["1", "0", "1", "0,1"], ["2", "1", "0", "0,1"], ["3", "1", "1", "0,1"],
    ]  # fmt: skip
    assert finished(raw) == 0


def test_the_wrong_number_of_tasks_is_refused(cluster, submit, tmp_path):
    job, raw = submit(SCRIPT, "--nodes=1", "--ntasks-per-node=3")
    assert cluster.wait(job, ENDED)["JobState"] == "FAILED"
    assert "this job has 3 tasks, but the config needs 4" in logs(tmp_path) and finished(raw) == 0


def test_an_array_of_replicas(cluster, submit, tmp_path):
    with rendezvous() as variables:
        submit.variables |= variables
        job, raw = submit(ARRAY, "--array=0-1", "--nodes=1", "--ntasks-per-node=2")
        for replica in range(2):
            assert cluster.wait(f"{job}_{replica}", ENDED)["JobState"] == "COMPLETED", logs(tmp_path)
    assert finished(raw) == 2
    assert len(list((tmp_path / "logs" / job).glob("replica_[01]/rank_[01].log"))) == 4


def until(happened, tmp_path, limit_seconds=300):
    deadline = time.monotonic() + limit_seconds
    while not happened():
        assert time.monotonic() < deadline, f"not in {limit_seconds} s\n{logs(tmp_path)}"
        time.sleep(0.3)


def trains(raw, replica, present):
    """Whether the newest row of an outer step is of a step with these replicas present, and of `replica` that it has
    been paired with the other one."""
    rows = configs.parse(raw).output / "metrics.jsonl"
    own = [row for row in rows_of(raw) if row["replica"] == replica and row["outer_step"]] if rows.exists() else []
    return bool(own) and own[-1]["present"] == present and (len(present) == 1 or own[-1]["missed"] == 0)


@pytest.mark.timeout(900)
def test_replicas_of_an_array_come_leave_and_return_on_their_own(cluster, submit, tmp_path):
    """The first one begins; the second one joins when there is a node for it, and again after a lost node and its time
    limit, for which it alone is requeued."""

    def nodes(names, state):
        cluster.run("scontrol", "update", f"nodename={names}", f"state={state}", "reason=test")

    def both_again(restarts):
        until(lambda: cluster.job(f"{job}_1").get("Restarts") == str(restarts), tmp_path)
        if cluster.job(f"{job}_1")["JobState"] == "PENDING":  # SLURM makes what it requeues wait for two minutes
            cluster.run("scontrol", "update", f"jobid={job}_1", "starttime=now")
        until(lambda: trains(raw, 0, [0, 1]) and trains(raw, 1, [0, 1]), tmp_path)
        assert cluster.job(f"{job}_0")["Restarts"] == "0", "the other replica has gone on"

    with rendezvous() as variables:
        submit.variables |= variables
        nodes("n[2-4]", "drain")
        try:
            job, raw = submit(
                ARRAY, "--array=0-1", "--nodes=1", "--ntasks-per-node=2", "--exclusive",
                run__steps=100_000, noloco__heartbeat_seconds=0.5, run__save_every=1_000_000, start_replicas=1,
            )  # fmt: skip
            until(lambda: trains(raw, 0, [0]), tmp_path)
            assert cluster.job(f"{job}_1")["JobState"] == "PENDING"
            nodes("n[2-4]", "resume")
            both_again(0)
            lost = cluster.job(f"{job}_1")["NodeList"]
            nodes(lost, "down")
            nodes(lost, "drain")
            until(lambda: trains(raw, 0, [0]), tmp_path)
            both_again(1)
            assert cluster.job(f"{job}_1")["NodeList"] != lost
            cluster.run("scancel", "--signal=USR1", "--batch", f"{job}_1")
            until(lambda: trains(raw, 0, [0]), tmp_path)
            both_again(2)
            assert "the time limit of replica 1 is near" in (tmp_path / "batch-1.out").read_text()
            cluster.run("scancel", "--signal=INT", f"{job}_0")
            for replica in range(2):
                assert cluster.wait(f"{job}_{replica}", ENDED)["JobState"] == "COMPLETED", logs(tmp_path)
        finally:
            nodes("n[2-4]", "resume")
    assert finished(raw) == 2


def test_a_killed_task_ends_no_other(cluster, submit, tmp_path):
    job, raw = submit(
        SCRIPT, *TWO_NODES, run__steps=100_000, noloco__routing="fixed",
        noloco__exchange_deadline_seconds=3.0, noloco__heartbeat_seconds=0.5, noloco__link_timeout_seconds=8.0,
    )  # fmt: skip
    wait_for_step(raw, 4, tmp_path)
    ranks = cluster.ranks()
    assert set(ranks) == {0, 1, 2, 3}
    os.kill(ranks[3], signal.SIGKILL)
    reached = max(row["step"] for row in rows_of(raw))
    wait_for_step(raw, reached + 10, tmp_path)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    found = cluster.wait(job, ENDED)
    # The killed rank's replica failed, and with it the job: it is not requeued, but what survived has saved.
    assert found["JobState"] == "FAILED" and found["Restarts"] == "0", logs(tmp_path)
    assert finished(raw) == 1


def test_the_time_limit_saves_and_requeues(cluster, submit, tmp_path):
    """SLURM's own signal, as it counts: a warning 60 s before the end of 2 minutes, up to half a minute early."""
    job, raw = submit(SCRIPT, *TWO_NODES, "--time=2", "--signal=B:USR1@60", run__steps=100_000)
    wait_for_step(raw, 4, tmp_path)
    deadline = time.monotonic() + 180
    while cluster.job(job)["Restarts"] == "0":
        assert time.monotonic() < deadline and cluster.job(job)["JobState"] not in ENDED, logs(tmp_path)
        time.sleep(0.5)
    assert finished(raw) == 2 and "the time limit is near" in logs(tmp_path) and "saved; requeued" in logs(tmp_path)


def test_a_lost_node_requeues_the_job(cluster, submit, tmp_path):
    job, raw = submit(SCRIPT, *TWO_NODES, run__steps=100_000)
    wait_for_step(raw, 4, tmp_path)
    lost = cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()[1]
    cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        deadline = time.monotonic() + 120
        while cluster.job(job)["Restarts"] == "0":
            assert time.monotonic() < deadline, logs(tmp_path)
            time.sleep(0.3)
        if not CAN_RESUME:
            pytest.skip("requeued as it should be; that it resumes needs checkpoints (the key run.resume)")
        reached = max(row["step"] for row in rows_of(raw))
        wait_for_step(raw, reached + 4, tmp_path)
        assert lost not in cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
    finally:
        cluster.run("scontrol", "update", f"nodename={lost}", "state=resume")


def test_survivors_go_on_without_a_lost_node(cluster, submit, tmp_path):
    job, raw = submit(
        SCRIPT, "--no-kill", *TWO_NODES, run__steps=100_000, noloco__routing="fixed",
        noloco__exchange_deadline_seconds=3.0, noloco__heartbeat_seconds=0.5, noloco__link_timeout_seconds=8.0,
    )  # fmt: skip
    wait_for_step(raw, 4, tmp_path)
    lost = cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()[1]
    cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        # SLURM has ended what ran there; on one machine it could not lose it otherwise.
        deadline = time.monotonic() + 60
        while set(cluster.ranks()) != {0, 1}:
            assert time.monotonic() < deadline, f"{cluster.ranks()}\n{logs(tmp_path)}"
            time.sleep(0.3)
        reached = max(row["step"] for row in rows_of(raw))
        wait_for_step(raw, reached + 10, tmp_path)
        found = cluster.job(job)
        assert found["JobState"] == "RUNNING" and found["Restarts"] == "0", found
    finally:
        cluster.run("scontrol", "update", f"nodename={lost}", "state=resume")
