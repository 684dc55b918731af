"""Rank variables of every launcher, and refusals that say how to start the run."""

import multiprocessing
import os
import socket
import stat
import sys

import psutil
import pytest

from noloco_mega import launcher
from noloco_mega.grid import Grid, Place
from noloco_mega.launcher import LaunchError

GRID = Grid(replicas=4, stages=2)


def torchrun(rank, world_size, **more):
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", **more}


@pytest.mark.parametrize(
    "environ, name",
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "torchrun or deepspeed"),
        (
            {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "Open MPI",
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}, "MPICH"),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}, "srun"),
    ],
)
def test_every_launchers_variables(environ, name):
    launch = launcher.read(environ)
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == (name, 5, 8, 1)
    assert launcher.place(launch, GRID) == Place(2, 0, 1, 0)


def test_torchrun_inside_srun_means_torchrun():
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
    assert launcher.read({**environ, **torchrun(3, 8)}).rank == 3


def test_srun_with_pmi2_means_srun():
    """Slurm's pmi2 plugin sets MPICH's variables too, but not its local rank."""
    environ = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}
    launch = launcher.read({**environ, "PMI_RANK": "9", "PMI_SIZE": "16"})
    assert (launch.launcher, launch.rank, launch.local_rank) == ("srun", 9, 1)


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_no_launcher_is_refused(environ):
    """A batch script's own environment has SLURM_PROCID, but nothing started there is one of several ranks."""
    with pytest.raises(LaunchError, match="no launcher started this process"):
        launcher.read(environ)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "LOCAL_RANK"),
        (torchrun("x", 8), "RANK must be a number"),
        (torchrun(0, 8, NOLOCO_RENDEZVOUS="host"), "HOST:PORT"),
        (torchrun(0, 8, NOLOCO_RENDEZVOUS="no-such-host.invalid:1"), "can't be looked up"),
        (torchrun(0, 8, NOLOCO_IFNAME="no-such-if"), "no such interface"),
        (torchrun(0, 8, NOLOCO_RENDEZVOUS="192.0.2.1:29400"), "set NOLOCO_IFNAME"),
        (torchrun(0, 8, MASTER_ADDR="192.0.2.1", MASTER_PORT="29400"), "set NOLOCO_IFNAME"),
    ],
)
def test_variables_that_make_no_sense(environ, message):
    with pytest.raises(LaunchError, match=message):
        launcher.read(environ)


@pytest.mark.parametrize(
    "environ, message",
    [
        (torchrun(0, 1), "started 1 processes, but the topology .* has 8 ranks"),
        (torchrun(0, 2), "set NOLOCO_REPLICA"),
        (torchrun(0, 8, NOLOCO_REPLICA="0"), "one replica, of 2 ranks"),
        (torchrun(0, 2, NOLOCO_REPLICA="4"), "replicas 0 to 3"),
    ],
)
def test_a_world_that_does_not_match_the_topology(environ, message):
    with pytest.raises(LaunchError, match=message):
        launcher.place(launcher.read(environ), GRID)


def test_one_launch_per_replica():
    launch = launcher.read(torchrun(1, 2, NOLOCO_REPLICA="3", NOLOCO_RENDEZVOUS="127.0.0.1:1"))
    assert launcher.place(launch, GRID) == Place(3, 0, 1, 0) and launch.rendezvous == ("127.0.0.1", 1)


def test_interfaces_name_their_address():
    assert launcher.read(torchrun(0, 1, NOLOCO_IFNAME="lo")).host == "127.0.0.1"
    assert launcher.read(torchrun(0, 1)).host == launcher.LOOPBACK
    elsewhere = {"NOLOCO_RENDEZVOUS": "192.0.2.1:29400", "NOLOCO_HOST": "192.0.2.3"}
    assert launcher.read(torchrun(0, 1, **elsewhere)).host == "192.0.2.3"


def test_the_way_to_the_others_gives_the_address_where_it_is_asked_for():
    """Checked against the interfaces' own list: an address of this host is the source for reaching itself."""
    auto = {"NOLOCO_HOST": "auto"}
    for items in psutil.net_if_addrs().values():
        for item in items:
            if item.family == socket.AF_INET:
                there = {"NOLOCO_RENDEZVOUS": f"{item.address}:29400"}
                assert launcher.read(torchrun(0, 1, **auto, **there)).host == item.address
                there = {"MASTER_ADDR": item.address, "MASTER_PORT": "1"}
                assert launcher.read(torchrun(0, 1, **auto, **there)).host == item.address
    with pytest.raises(LaunchError, match=r"no route to nowhere\.invalid.*set NOLOCO_HOST"):
        launcher.read(torchrun(0, 1, **auto, NOLOCO_RENDEZVOUS="nowhere.invalid:1"))
    with pytest.raises(LaunchError, match="to find the way to"):
        launcher.read(torchrun(0, 1, **auto))


def test_mpi_is_asked_only_when_it_should_be(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # importing it now fails
    with pytest.raises(LaunchError, match=r"no MPI library can be loaded.*MPI4PY_LIBMPI"):
        launcher.read(torchrun(0, 1, NOLOCO_RANKS="mpi4py"))
    with pytest.raises(LaunchError, match='the one known value is "mpi4py"'):
        launcher.read(torchrun(0, 1, NOLOCO_RANKS="mpi"))
    assert launcher.read(torchrun(0, 1)).rank == 0


def _secret(home):
    return launcher.secret({"XDG_CONFIG_HOME": str(home)})


def test_the_users_own_secret_is_made_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        found = set(pool.map(_secret, [tmp_path] * 32))
    assert len(found) == 1 and len(found.pop()) == 64
    path = tmp_path / "noloco_mega" / "secret"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(path.parent) == ["secret"]
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        _secret(tmp_path)


def test_sigterm_leaves_only_where_a_replica_has_a_launch_of_its_own():
    replica = torchrun(0, 2, NOLOCO_REPLICA="1")
    assert not launcher.read(replica).sigterm_leaves
    assert launcher.read({**replica, "NOLOCO_SIGTERM": "leave"}).sigterm_leaves
    with pytest.raises(LaunchError, match="a launch of its own for each replica"):
        launcher.read(torchrun(0, 8, NOLOCO_SIGTERM="leave"))
    with pytest.raises(LaunchError, match='"stop" ends the run, and "leave" this replica alone'):
        launcher.read({**replica, "NOLOCO_SIGTERM": "quit"})
