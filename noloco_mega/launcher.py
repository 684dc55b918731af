"""What did the launcher tell this process? Rank variables of every launcher, and the run's own NOLOCO_* variables.

    NOLOCO_REPLICA      this launch is one replica, and this is its number; absent: one launch for the whole run
    NOLOCO_RENDEZVOUS   host:port of a running rendezvous; absent: rank 0 of a one-launch run serves it
    NOLOCO_HOST         the address this process listens on and is reached at; absent: loopback; "auto": the one from
                        which this host reaches the rendezvous (or the launcher's MASTER_ADDR)
    NOLOCO_IFNAME       or the network interface whose address that is
    NOLOCO_RANKS        "mpi4py": ask MPI itself who this process is, where its launcher sets no variables known here
    NOLOCO_SECRET, NOLOCO_SECRET_FILE    the run's secret; absent: a file of the user's own (see `secret`)

Nothing here opens a connection or sends anything, but for MPI's own start-up where it is asked for.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from noloco_mega.comm.channel import read_secret
from noloco_mega.comm.wire import Address
from noloco_mega.grid import Grid, Place

LOOPBACK = "127.0.0.1"


class LaunchError(ValueError):
    """The process was not started the way the config needs it; the message says how to start it."""


@dataclass(frozen=True)
class RankVariables:
    """How one launcher names rank, world size and local rank; `inside` must also be set (see SLURM)."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    inside: str | None = None


# In this order: torchrun under srun, or under mpirun, means torchrun's own variables.
LAUNCHERS = (
    RankVariables("torchrun or deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    RankVariables("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    # Before MPICH: srun --mpi=pmi2 sets the variables of both, and its local rank only in its own.
    # A batch script has SLURM_PROCID too, though srun started nothing there; only a step has SLURM_STEP_ID.
    RankVariables("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", inside="SLURM_STEP_ID"),
    RankVariables("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True)
class Launch:
    """Where this process stands in its launch."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    replica: int | None
    """The replica that this launch is, or None when one launch starts the whole run."""
    rendezvous: Address | None
    master: Address | None
    """MASTER_ADDR and MASTER_PORT, where the launcher sets them."""
    agent_store: bool
    """torchrun's agent already serves a store on `master`."""
    host: str
    interface: str | None
    sigterm_leaves: bool
    """SIGTERM ends this replica alone (NOLOCO_SIGTERM=leave), and not the run."""


def read(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launcher's variables. Raises LaunchError where no launcher started this process or they make no sense."""
    if environ.get("NOLOCO_RANKS") == "mpi4py":
        environ = {**environ, **_ask_mpi()}
    elif "NOLOCO_RANKS" in environ:
        raise LaunchError(f'NOLOCO_RANKS = {environ["NOLOCO_RANKS"]!r}: the one known value is "mpi4py"; or unset it')
    for variables in LAUNCHERS:
        if variables.rank in environ and (variables.inside is None or variables.inside in environ):
            break
    else:
        raise LaunchError(
            "no launcher started this process: none of "
            + ", ".join(v.rank for v in LAUNCHERS)
            + " is set. Start it with launch/local.sh CONFIG, torchrun, deepspeed, srun or mpirun"
        )
    rank = _integer(environ, variables.rank)
    world_size = _integer(environ, variables.world_size)
    local_rank = _integer(environ, variables.local_rank)
    master = None
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        master = (environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT"))
    interface = environ.get("NOLOCO_IFNAME")
    rendezvous = address(environ["NOLOCO_RENDEZVOUS"]) if "NOLOCO_RENDEZVOUS" in environ else None
    host = _host(environ.get("NOLOCO_HOST"), interface, rendezvous or master)
    _refuse_unreachable(host, rendezvous or master)
    return Launch(
        launcher=variables.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        replica=_integer(environ, "NOLOCO_REPLICA") if "NOLOCO_REPLICA" in environ else None,
        rendezvous=rendezvous,
        master=master,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        host=host,
        interface=interface,
        sigterm_leaves=_sigterm_leaves(environ),
    )


def _sigterm_leaves(environ: Mapping[str, str]) -> bool:
    wanted = environ.get("NOLOCO_SIGTERM", "stop")
    if wanted not in ("stop", "leave"):
        raise LaunchError(f'NOLOCO_SIGTERM = {wanted!r}: "stop" ends the run, and "leave" this replica alone')
    if wanted == "leave" and "NOLOCO_REPLICA" not in environ:
        raise LaunchError("NOLOCO_SIGTERM = leave needs a launch of its own for each replica, with NOLOCO_REPLICA set")
    return wanted == "leave"


def place(launch: Launch, grid: Grid) -> Place:
    """This process's place in the run. Raises LaunchError if the launch does not match the topology."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in grid.sizes().items())
    if launch.replica is None:
        if launch.world_size != grid.size:
            raise LaunchError(
                f"{launch.launcher} started {launch.world_size} processes, but the topology ({sizes}) has "
                f"{grid.size} ranks. Start {grid.size}; or, with one launch per replica, start {grid.replica_size} "
                f"and set NOLOCO_REPLICA to the replica's number"
            )
        return grid.place(launch.rank)
    if launch.world_size != grid.replica_size:
        raise LaunchError(
            f"NOLOCO_REPLICA = {launch.replica} says that this launch is one replica, of {grid.replica_size} ranks in "
            f"the topology ({sizes}); {launch.launcher} started {launch.world_size} processes"
        )
    if not 0 <= launch.replica < grid.replicas:
        raise LaunchError(f"NOLOCO_REPLICA = {launch.replica}, but the topology has replicas 0 to {grid.replicas - 1}")
    return grid.place(launch.replica * grid.replica_size + launch.rank)


def address(text: str) -> Address:
    """ "host:port" as an Address. Raises LaunchError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"NOLOCO_RENDEZVOUS takes HOST:PORT, e.g. 127.0.0.1:29400; got {text!r}")
    return host, int(port)


def secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret that every peer of a run proves.

    Without NOLOCO_SECRET or NOLOCO_SECRET_FILE it is the user's own file, ~/.config/noloco_mega/secret, made on first
    use with mode 0600: enough wherever all nodes share the home folder, and different for every user.
    Raises ValueError for a file that others can read.
    """
    if "NOLOCO_SECRET" in environ or "NOLOCO_SECRET_FILE" in environ:
        return read_secret(environ)
    path = _own_secret(environ)
    home = path.parent
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        draft = home / f"secret.{os.getpid()}.{secrets.token_hex(4)}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # the first of several processes wins; a rename would give them different secrets
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return read_secret({"NOLOCO_SECRET_FILE": str(path)})


def secret_source(environ: Mapping[str, str] = os.environ) -> str:
    """Where `secret` reads it, for messages."""
    if "NOLOCO_SECRET" in environ:
        return "NOLOCO_SECRET"
    return environ.get("NOLOCO_SECRET_FILE") or str(_own_secret(environ))


def _own_secret(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "noloco_mega" / "secret"


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise LaunchError(f"the launcher set a rank but not {name}") from None
    except ValueError:
        raise LaunchError(f"{name} must be a number; it is {environ[name]!r}") from None


def _refuse_unreachable(host: str, meeting: Address | None) -> None:
    """Raise LaunchError for a rank that would listen on loopback while its run meets on another machine."""
    if meeting is None or not host.startswith("127."):
        return
    here = {item.address for items in psutil.net_if_addrs().values() for item in items}
    try:
        there = {str(info[4][0]) for info in socket.getaddrinfo(meeting[0], meeting[1], type=socket.SOCK_STREAM)}
    except OSError as error:
        raise LaunchError(f"the name of the rendezvous, {meeting[0]}, can't be looked up: {error}") from error
    if not any(found in here or found.startswith("127.") for found in there):
        raise LaunchError(
            f"the run meets at {meeting[0]}:{meeting[1]}, on another machine, but this rank would listen on {host}, "
            "where no other machine reaches it: set NOLOCO_IFNAME to the network interface to use, or NOLOCO_HOST to "
            'this machine\'s address, or to "auto" for the one on the way there'
        )


def _ask_mpi() -> dict[str, str]:
    """Rank, size and local rank as MPI knows them, under torchrun's names. Raises LaunchError without MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"NOLOCO_RANKS = mpi4py, but no MPI library can be loaded ({error}): install MPICH or Open MPI on every "
            "node (apt-get install mpich, or a cluster's `module load`), or set MPI4PY_LIBMPI=/path/libmpi.so"
        ) from error
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    return {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(node.rank)}


def _host(host: str | None, interface: str | None, meeting: Address | None) -> str:
    if host == "auto":
        if meeting is None:
            raise LaunchError("NOLOCO_HOST = auto needs NOLOCO_RENDEZVOUS or MASTER_ADDR to find the way to")
        return _source_address(meeting)
    if host is not None:
        return host
    if interface is None:
        return LOOPBACK
    found = psutil.net_if_addrs()
    if interface not in found:
        raise LaunchError(f"NOLOCO_IFNAME = {interface}: no such interface; this host has {', '.join(sorted(found))}")
    for item in found[interface]:
        if item.family == socket.AF_INET:
            return item.address
    raise LaunchError(f"NOLOCO_IFNAME = {interface} has no IPv4 address; set NOLOCO_HOST to the address to use")


def _source_address(meeting: Address) -> str:
    """This host's address on its route to `meeting`. A datagram socket is connected, which sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(meeting)
        except OSError as error:
            raise LaunchError(
                f"this host ({socket.gethostname()}) finds no route to {meeting[0]}: {error}. Correct the host in "
                "NOLOCO_RENDEZVOUS (or MASTER_ADDR), or set NOLOCO_HOST to an address or NOLOCO_IFNAME"
            ) from error
        return probe.getsockname()[0]
