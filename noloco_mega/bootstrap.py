"""How do the ranks of a run find each other? From the launcher's variables to a connected rank.

    rendezvous  ->  the replica's own store  ->  its world and groups  ->  links  ->  the meeting with all twins

The rendezvous only carries addresses. Each replica's store is served by its own rank 0; the links between replicas
form on a store of theirs, served by the site's lowest replica and needed only while they form.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from noloco_mega import device as devices
from noloco_mega import launcher
from noloco_mega.comm import groups
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.control import NEVER, StopAgreement
from noloco_mega.comm.exchange import Exchange
from noloco_mega.comm.links import LinkBroken, Links, open_links
from noloco_mega.comm.membership import Peers
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousServer
from noloco_mega.comm.routed_p2p import Circuit, local_circuit, site_circuit
from noloco_mega.config import Config
from noloco_mega.grid import Place
from noloco_mega.plan.routing import RandomRoutes
from noloco_mega.plan.views import View


class Connection:
    """One rank of a run, connected to its replica and, through its site's links, to the routes."""

    world: groups.ReplicaWorld
    local: Circuit
    """The ordinary pipeline of this replica."""
    circuit: Circuit
    """What training takes: the site's random routes, or `local`."""

    def __init__(self, config: Config, launch: launcher.Launch, place: Place) -> None:
        """Bring this rank up to its links. Raises ValueError or RendezvousTimeout with what to change."""
        self._config, self._place, self._host = config, place, launch.host
        self._grid = config.topology.grid()
        self._leads = self._grid.replica_rank(place) == 0
        self._secret = launcher.secret()
        device = devices.select(launch.local_rank)
        _bind_collectives(launch)
        self._server, address = _find_rendezvous(launch, self._grid.rank(place), self._secret, config)
        self._client = RendezvousClient(address, self._secret, config.noloco.rendezvous_timeout_seconds)
        self._listener = Listener(self._secret, launch.host)
        self._stopping = StopAgreement(place.replica, self._listener, self._secret, run_id(config))

        timeout = timedelta(seconds=config.noloco.link_timeout_seconds)
        store = self._store("store", place.replica, serves=self._leads)
        # A rank may enter a collective while a sibling still waits for a link: that wait must end first.
        self.world = groups.start_replica(self._grid, place, device, store, 2 * timeout)
        self._refuse_other_settings()
        column = f"links {place.data} {place.tensor}"
        # Each link group forms on a store of its own, never on the world's: see comm/links.py.
        local_store = self._store(f"local {column}", place.replica, serves=place.stage == 0)
        self.local = self.circuit = local_circuit(self._links(local_store, place.stage, self._grid.stages, timeout))
        site = config.topology.site_of(place.replica)
        if config.noloco.routing == "random" and len(site) > 1 and self._grid.stages > 1:
            site_store = self._store(column, site[0], serves=place.replica == site[0] and place.stage == 0)
            rank = site.index(place.replica) * self._grid.stages + place.stage
            links = self._links(site_store, rank, len(site) * self._grid.stages, timeout)
            self.circuit = site_circuit(RandomRoutes(config.noloco.seed, site), links, site, self._grid.stages)

    def _links(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Links:
        try:
            return open_links(self.world.device, store, rank, size, timeout, self._host)
        except LinkBroken as error:
            raise ConnectionError(str(error)) from error

    def _refuse_other_settings(self) -> None:
        """Raise ValueError on a rank whose config differs from its replica's leader's in anything but `data` paths.

        Ranks of one replica must agree even on when to log: their sums are collective.
        """
        settings = self._config.to_json() | {"data": None}
        mine = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        if self._leads:
            self.world.store.set("noloco_mega/config", mine)
        if self.world.store.get("noloco_mega/config").decode() != mine:
            raise ValueError(
                f"the ranks of replica {self._place.replica} were started with different configurations: give all of "
                "them the same file and the same --set"
            )

    def meet(self, theta0: str, data: str, view_log: list[View]) -> Peers:
        """Learn the addresses of this rank's twins and compare what must be equal.

        `theta0` and `data` are the hashes of this rank's initial weights and of its token files. Raises ValueError
        naming a replica whose own, or whose configuration, differ, RendezvousTimeout naming those that did not come.
        """
        place, rank = self._place, self._grid.replica_rank(self._place)
        hashes = {"config": run_id(self._config), "data": data, "theta0": theta0}
        record = {"address": list(self._listener.address), **hashes}
        self._client.announce("rank", place.replica, rank, record)
        records = self._client.wait_for("rank", [(replica, rank) for replica in range(self._grid.replicas)])
        twins = {replica: records[(replica, rank)] for replica in range(self._grid.replicas)}
        refuse_differences(place.replica, record, twins)
        addresses = {
            replica: (str(twin["address"][0]), int(twin["address"][1]))
            for replica, twin in twins.items()
            if replica != place.replica
        }
        self._stopping.connect(addresses)
        exchange = Exchange(
            replica=place.replica,
            rank=rank,
            listener=self._listener,
            secret=self._secret,
            run_id=run_id(self._config),
            fingerprint=theta0,
        )
        return Peers(place.replica, view_log, addresses, exchange, self.world.replica, self.world.device.device)

    def leave_routes(self) -> None:
        """From now on identity routes: a routed link of this replica broke.

        Closing the links tells the neighbours at once, which would otherwise wait until their own timeout. Raises
        RuntimeError where the broken links were the replica's own: then a rank of it is gone, and so is the replica.
        """
        if self.circuit is self.local:
            raise RuntimeError(
                f"replica {self._place.replica} has lost one of its own ranks and cannot go on; the other replicas can"
            )
        self.circuit.links.close()
        self.circuit = self.local

    def stop_step(self, step: int) -> int:
        """For `Peers.agree` in inner step `step`: the step to stop at as the replica's leader knows it, else NEVER."""
        return self._stopping.decide(step) if self._leads else NEVER

    def propose_stop(self, step: int) -> None:
        """Somebody in this replica was asked to stop; `step` inner steps are done."""
        if self._leads:
            self._stopping.propose(step)

    def confirm_stop(self, step: int) -> bool:
        """For `Peers.agree` at stop step `step`: whether all replicas stop here, as the replica's leader knows."""
        return not self._leads or self._stopping.confirm(step, self._config.noloco.exchange_deadline_seconds)

    def close(self) -> None:
        self.circuit.links.close()
        self.local.links.close()
        self._listener.close()
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


def refuse_differences(replica: int, own: Mapping[str, Any], twins: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError naming the replicas whose configuration, data or initial weights differ from `replica`'s own."""
    complaints = {
        "config": "another configuration (compare their config files: only paths and logging may differ)",
        "data": "other token files (the last stage reads a sample that another replica's first stage has read)",
        "theta0": "other initial weights (same versions of torch and noloco_mega everywhere?)",
    }
    for key, complaint in complaints.items():
        others = [other for other, twin in twins.items() if twin[key] != own[key]]
        if others:
            names = ", ".join(map(str, others))
            raise ValueError(f"replica {replica} and replica {names} do not belong together: {complaint}")


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


def _find_rendezvous(
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
