"""Rank variables of every launcher, and refusals that say how to start the run."""

import multiprocessing
import os
import stat

import pytest

from noloco_mega import launcher
from noloco_mega.grid import Grid, Place
from noloco_mega.launcher import LaunchError

GRID = Grid(replicas=4, stages=2)


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
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "RANK": "3", "WORLD_SIZE": "8"}
    assert launcher.read(environ).rank == 3


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_no_launcher_is_refused(environ):
    """A batch script's own environment has SLURM_PROCID, but nothing started there is one of several ranks."""
    with pytest.raises(LaunchError, match="no launcher started this process"):
        launcher.read(environ)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "8", "NOLOCO_RENDEZVOUS": "host"}, "HOST:PORT"),
        ({"RANK": "0", "WORLD_SIZE": "8", "NOLOCO_IFNAME": "no-such-if"}, "no such interface"),
    ],
)
def test_variables_that_make_no_sense(environ, message):
    with pytest.raises(LaunchError, match=message):
        launcher.read(environ)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "started 1 processes, but the topology .* has 8 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set NOLOCO_REPLICA"),
        ({"RANK": "0", "WORLD_SIZE": "8", "NOLOCO_REPLICA": "0"}, "one replica, of 2 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2", "NOLOCO_REPLICA": "4"}, "replicas 0 to 3"),
    ],
)
def test_a_world_that_does_not_match_the_topology(environ, message):
    with pytest.raises(LaunchError, match=message):
        launcher.place(launcher.read(environ), GRID)


def test_one_launch_per_replica():
    launch = launcher.read({"RANK": "1", "WORLD_SIZE": "2", "NOLOCO_REPLICA": "3", "NOLOCO_RENDEZVOUS": "h:1"})
    assert launcher.place(launch, GRID) == Place(3, 0, 1, 0) and launch.rendezvous == ("h", 1)


def test_interfaces_name_their_address():
    assert launcher.read({"RANK": "0", "WORLD_SIZE": "1", "NOLOCO_IFNAME": "lo"}).host == "127.0.0.1"
    assert launcher.read({"RANK": "0", "WORLD_SIZE": "1"}).host == launcher.LOOPBACK
    assert launcher.read({"RANK": "0", "WORLD_SIZE": "1", "NOLOCO_HOST": "10.0.0.3"}).host == "10.0.0.3"


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
