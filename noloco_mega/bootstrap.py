"""How do the ranks of a run find each other? From the launcher's variables to a connected rank.

    rendezvous  ->  the replica's own store  ->  its world and groups  ->  links  ->  the meeting with all twins

The rendezvous only carries addresses. Each replica's store is served by its own rank 0; the links between replicas
form on a store of theirs, served by the site's lowest replica and needed only while they form.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from noloco_mega import device as devices
from noloco_mega import launcher, versions
from noloco_mega.comm import groups
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.control import NEVER, Leaders, StopAgreement
from noloco_mega.comm.exchange import Exchange
from noloco_mega.comm.links import LinkBroken, Links, open_links
from noloco_mega.comm.membership import Peers, addresses_of, refuse_differences
from noloco_mega.comm.rendezvous import Record, RendezvousClient, RendezvousServer, StartFailed
from noloco_mega.comm.routed_p2p import Circuit, local_circuit, site_circuit
from noloco_mega.config import Config
from noloco_mega.grid import Place
from noloco_mega.plan.routing import RandomRoutes
from noloco_mega.plan.views import View

CONFIRM_SECONDS = 15.0
"""How long a stopping replica waits for silent ones: launchers kill what has not ended 30 s after their own SIGTERM."""


class ReplicaLost(ConnectionError):  # noqa: N818
    """Another rank of this replica is gone, and the replica with it; the message says so to the user."""


class Connection:
    """One rank of a run, from its rendezvous to the run's links.

    `join` brings it into its replica and to its links, `meet` to its twins in the other replicas.
    """

    world: groups.ReplicaWorld
    local: Circuit
    """The ordinary pipeline of this replica."""
    circuit: Circuit
    """What training takes: the site's random routes, or `local`."""

    def __init__(self, config: Config, launch: launcher.Launch, place: Place) -> None:
        """Choose the device and find the rendezvous. Raises ValueError with what to change."""
        self._config, self._place, self._host = config, place, launch.host
        self._grid = config.topology.grid()
        self._rank = self._grid.replica_rank(place)
        self.leads = self._rank == 0
        """Whether this rank is its replica's leader."""
        self._secret = launcher.secret()
        self._device = devices.select(launch.local_rank, config.run.device)
        devices.bound_nccl(config.noloco.link_timeout_seconds)
        _bind_collectives(launch)
        self._server, address = find_rendezvous(launch, self._grid.rank(place), self._secret, config)
        self._client = RendezvousClient(
            address,
            self._secret,
            config.noloco.rendezvous_timeout_seconds,
            run=config.run.name,
            place=(place.replica, self._rank),
        )
        self._listener = Listener(self._secret, launch.host)
        self.leaders = Leaders(place.replica, self._listener, self._secret, run_id(config))
        """News between replicas, carried by their leaders."""
        self._stopping = StopAgreement(self.leaders)
        self._met = False

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Around everything that a rank does: its failure before the replicas have met ends the others' wait, and a
        collective that fails later, because a sibling is gone, raises ReplicaLost."""
        try:
            yield
        except StartFailed:
            raise
        except (ValueError, OSError) as error:
            if not self._met:
                self._client.fail(self._place.replica, self._rank, str(error))
            raise
        except (RuntimeError, LinkBroken) as error:
            if isinstance(error, LinkBroken | dist.DistError) or any(w in str(error) for w in ("gloo", "NCCL")):
                raise ReplicaLost(
                    f"replica {self._place.replica} has lost one of its ranks (that rank's own output says why) and "
                    f"cannot go on; the other replicas can. This rank saw: {str(error).splitlines()[0]}"
                ) from error
            raise

    def join(self) -> None:
        """Wait for all ranks of the run, and connect to the own replica and to the site's links.

        Raises ValueError where ranks were started with different configurations, RendezvousTimeout naming those that
        did not come, StartFailed as soon as one of them says so, ConnectionError if links can't be made.
        """
        config, place, grid = self._config, self._place, self._grid
        self._started = self._gather_starts()
        timeout = timedelta(seconds=config.noloco.link_timeout_seconds)
        store = self._store("store", place.replica, serves=self.leads)
        # A rank may enter a collective while a sibling still waits for a link: that wait must end first.
        self.world = groups.start_replica(grid, place, self._device, store, 2 * timeout)
        column = f"links {place.data} {place.tensor}"
        # Each link group forms on a store of its own, never on the world's: see comm/links.py.
        local_store = self._store(f"local {column}", place.replica, serves=place.stage == 0)
        beside = [stage for stage in (place.stage - 1, place.stage + 1) if 0 <= stage < grid.stages]
        self.local = self.circuit = local_circuit(self._links(local_store, place.stage, grid.stages, timeout, beside))
        site = config.topology.site_of(place.replica)
        if config.noloco.routing == "random" and len(site) > 1 and grid.stages > 1:
            site_store = self._store(column, site[0], serves=place.replica == site[0] and place.stage == 0)
            rank = site.index(place.replica) * grid.stages + place.stage
            peers = [position * grid.stages + stage for position in range(len(site)) for stage in beside]
            links = self._links(site_store, rank, len(site) * grid.stages, timeout, peers)
            self.circuit = site_circuit(RandomRoutes(config.noloco.seed, site), links, site, grid.stages)

    def _gather_starts(self) -> dict[tuple[int, int], Record]:
        """Everybody's address and settings, compared before anything is built on them."""
        settings = json.dumps(self._config.to_json() | {"data": None}, sort_keys=True)
        record = {
            "address": list(self._listener.address),
            "versions": versions.here(),
            "config": run_id(self._config),
            "settings": hashlib.sha256(settings.encode()).hexdigest(),
        }
        self._client.announce("start", self._place.replica, self._rank, record)
        everybody = [
            (replica, rank) for replica in range(self._grid.replicas) for rank in range(self._grid.replica_size)
        ]
        records = self._client.wait_for("start", everybody)
        refuse_differences(
            self._place.replica, record, {replica: records[(replica, self._rank)] for replica, _ in everybody}
        )
        if any(
            records[(self._place.replica, rank)]["settings"] != record["settings"]
            for rank in range(self._grid.replica_size)
        ):
            raise ValueError(
                f"the ranks of replica {self._place.replica} were started with different configurations: give all of "
                "them the same file and the same --set"
            )
        return records

    def _links(self, store: dist.Store, rank: int, size: int, timeout: timedelta, peers: Sequence[int]) -> Links:
        try:
            return open_links(self._device, store, rank, size, timeout, self._host, peers)
        except LinkBroken as error:
            raise ConnectionError(str(error)) from error

    def meet(self, theta0: str, data: str, view_log: list[View]) -> Peers:
        """Compare with this rank's twins what must be equal, and get ready to exchange with them.

        `theta0` and `data` are the hashes of this rank's initial weights and of its token files. Raises ValueError
        naming a replica whose own differ, otherwise as `join`.
        """
        place, twins = self._place, [(replica, self._rank) for replica in range(self._grid.replicas)]
        record = {"data": data, "theta0": theta0}
        self._client.announce("ready", place.replica, self._rank, record)
        records = self._client.wait_for("ready", twins)
        refuse_differences(place.replica, record, {replica: records[(replica, self._rank)] for replica, _ in twins})
        self._met = True
        addresses = addresses_of(place.replica, {replica: self._started[(replica, rank)] for replica, rank in twins})
        if self.leads:
            self.leaders.connect(addresses)
        exchange = Exchange(
            replica=place.replica,
            rank=self._rank,
            listener=self._listener,
            secret=self._secret,
            run_id=run_id(self._config),
            fingerprint=theta0,
        )
        return Peers(
            place.replica,
            view_log,
            addresses,
            exchange,
            self.world.replica,
            self.world.device.device,
            (self._listener, self._client),
        )

    def ask_leaders(self, topic: str, record: Mapping[str, Any]) -> dict[int, Record]:
        """What the leader of each replica says under `topic`, once all have; this replica's says `record`.

        Needs no meeting. Raises RendezvousTimeout, or StartFailed as `join` does.
        """
        if self.leads:
            self._client.announce(topic, self._place.replica, 0, dict(record))
        found = self._client.wait_for(topic, [(replica, 0) for replica in range(self._grid.replicas)])
        return {replica: record for (replica, _), record in found.items()}

    def ask_siblings(self, topic: str, record: Mapping[str, Any]) -> list[Record]:
        """What each rank of this replica says under `topic`, once all have. Raises as `ask_leaders` does."""
        replica, ranks = self._place.replica, range(self._grid.replica_size)
        self._client.announce(topic, replica, self._rank, dict(record))
        found = self._client.wait_for(topic, [(replica, rank) for rank in ranks])
        return [found[(replica, rank)] for rank in ranks]

    def leave_routes(self) -> None:
        """From now on identity routes: a routed link of this replica broke.

        Raises LinkBroken where the broken links were the replica's own: then a rank of it is gone, and so is the
        replica.
        """
        if self.circuit is self.local:
            raise LinkBroken("a link between stages of the same replica broke")
        self.circuit.links.close()
        self.circuit = self.local

    def stop_step(self, step: int) -> int:
        """For `Peers.agree` in inner step `step`: the step to stop at as the replica's leader knows it, else NEVER."""
        return self._stopping.decide(step) if self.leads else NEVER

    def propose_stop(self, step: int) -> None:
        """Somebody in this replica was asked to stop; `step` inner steps are done."""
        if self.leads:
            self._stopping.propose(step)

    def confirm_stop(self, step: int) -> bool:
        """For `Peers.agree` at stop step `step`: whether all replicas stop here, as the replica's leader knows."""
        return not self.leads or self._stopping.confirm(step, CONFIRM_SECONDS)

    def close(self) -> None:
        self.circuit.links.close()
        self.local.links.close()
        groups.stop_replica()
        if self._server is not None:
            self._server.close()

    def _store(self, topic: str, replica: int, *, serves: bool) -> dist.Store:
        """The store that one rank of `replica` serves and announces under `topic`."""
        timeout = timedelta(seconds=self._config.noloco.rendezvous_timeout_seconds)
        if serves:
            # The port is bound here and handed over, on the one address that the others are told.
            bound = socket.create_server((self._host, 0))
            port = bound.getsockname()[1]
            store = dist.TCPStore(
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=bound.detach(),
            )
            self._client.announce(topic, replica, 0, {"address": [self._host, port]})
            return store
        host, port = self._client.wait_for(topic, [(replica, 0)])[(replica, 0)]["address"]
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def run_id(config: Config) -> str:
    """A hash of everything that all replicas must agree on; where output goes and what is printed may differ."""
    settings: dict[str, Any] = config.to_json()
    settings["run"] = {key: settings["run"][key] for key in ("name", "seed", "steps")}
    settings.pop("data")  # paths may differ between sites; what they hold is compared when replicas meet
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _bind_collectives(launch: launcher.Launch) -> None:
    """Keep gloo and NCCL on the interface that this process was told to use."""
    interface = launch.interface
    if interface is None:
        names = [
            name for name, items in psutil.net_if_addrs().items() if any(item.address == launch.host for item in items)
        ]
        interface = names[0] if names else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def find_rendezvous(
    launch: launcher.Launch, rank: int, secret: bytes, config: Config
) -> tuple[RendezvousServer | None, tuple[str, int]]:
    """The address of the run's rendezvous, and the server if this process is the one that serves it."""
    if launch.rendezvous is not None:
        return None, launch.rendezvous
    if launch.replica is not None or launch.master is None:
        raise launcher.LaunchError(
            "no rendezvous: start one with `python -m noloco_mega rendezvous --host HOST --port PORT` and set "
            "NOLOCO_RENDEZVOUS=HOST:PORT for every process"
        )
    if not launch.agent_store:
        # Nothing else listens on the launcher's port (deepspeed's): rank 0 serves there.
        server = RendezvousServer(secret, launch.host, launch.master[1]) if rank == 0 else None
        return server, launch.master
    timeout = timedelta(seconds=config.noloco.rendezvous_timeout_seconds)
    agent = dist.TCPStore(*launch.master, is_master=False, wait_for_workers=False, timeout=timeout)
    server = None
    if rank == 0:
        server = RendezvousServer(secret, launch.host)
        agent.set("noloco_mega/rendezvous", json.dumps(server.address))
    host, port = json.loads(agent.get("noloco_mega/rendezvous"))
    return server, (host, port)
