"""How do the ranks of a run find each other? From the launcher's variables to a connected rank.

    rendezvous  ->  the replica's own store  ->  its world and groups  ->  links  ->  the meeting with all twins

The rendezvous only carries addresses. Each replica's store is served by its own rank 0; the links between replicas
form on a store of theirs, served by the site's lowest replica and needed only while they form.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import psutil
import torch.distributed as dist

from noloco_mega import device as devices
from noloco_mega import launcher
from noloco_mega.checkpoint.donor import Donor
from noloco_mega.checkpoint.joiner import Donated, RankShape, fetch
from noloco_mega.comm import groups
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.circuits import LOCAL, Circuits
from noloco_mega.comm.collective import Collective, open_collective
from noloco_mega.comm.control import Leaders, StopAgreement
from noloco_mega.comm.coordinator import Coordinator
from noloco_mega.comm.exchange import Exchange
from noloco_mega.comm.links import LinkBroken
from noloco_mega.comm.membership import Peers
from noloco_mega.comm.orders import Orders
from noloco_mega.comm.presence import UNKNOWN
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousServer, StartFailed
from noloco_mega.comm.roster import Roster, Standing
from noloco_mega.comm.siblings import Siblings
from noloco_mega.comm.steering import Lead, Steering
from noloco_mega.comm.stores import shared_store
from noloco_mega.comm.terms import Terms
from noloco_mega.comm.wire import Address, Message
from noloco_mega.config import Config
from noloco_mega.entry import TRY_AGAIN
from noloco_mega.gathering import Gathering, run_id
from noloco_mega.grid import Place
from noloco_mega.outer import registry
from noloco_mega.plan.views import View

LOST_SECONDS = 10.0
"""How long a rank whose replica has lost another one may need to find out and say so, before its process is ended."""


class ReplicaLost(ConnectionError):  # noqa: N818
    """Another rank of this replica is gone, and the replica with it; the message says so to the user."""


class Connection:
    """One rank of a run, from its rendezvous to the run's links.

    `join` brings it into its replica and to its links, `meet` to its twins in the other replicas.
    """

    world: groups.ReplicaWorld
    steering: Steering
    """What this rank does about the other replicas while it trains."""
    donor: Donor
    """Gives this rank's state to its twins in replicas that join."""

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
        self._timeout = timedelta(seconds=config.noloco.link_timeout_seconds)
        self._circuits = Circuits(
            self._grid, place, self._device, self._host, config.noloco.seed, self._timeout
        )  # fmt: skip
        self.leaders = Leaders(place.replica, self._listener, self._secret, run_id(config))
        """News between replicas, carried by their leaders."""
        self._stopping = StopAgreement(self.leaders)
        self._coordinator: Coordinator | None = None
        self._ended = threading.Event()
        self._siblings = Siblings(
            rank=self._rank,
            size=self._grid.replica_size,
            listener=self._listener,
            secret=self._secret,
            run_id=run_id(config),
            replica=place.replica,
            heartbeat_seconds=config.noloco.heartbeat_seconds,
            lost=self._lost,
        )
        self.gathering = Gathering(config, place, self._client, self._listener.address)
        """Which ranks make up the run."""

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Around everything that a rank does: its failure before the replicas have met ends the others' wait, and a
        collective that fails later, because a sibling is gone, raises ReplicaLost."""
        try:
            yield
        except StartFailed:
            raise
        except (ValueError, OSError) as error:
            self.gathering.failed(error)
            raise
        except (RuntimeError, LinkBroken) as error:
            if isinstance(error, LinkBroken | dist.DistError) or any(w in str(error) for w in ("gloo", "NCCL")):
                raise ReplicaLost(self._farewell(str(error).splitlines()[0])) from error
            raise
        finally:
            self._ended.set()
            self.gathering.end()

    def join(self) -> None:
        """Wait for the replicas that begin the run, and connect to the own replica and to the site's links.

        Raises ValueError where ranks were started with different configurations, RendezvousTimeout naming those that
        did not come, StartFailed as soon as one of them says so, ConnectionError if links can't be made.
        """
        place, grid = self._place, self._grid
        self.gathering.start()
        store = self._store("store", place.replica, serves=self.leads)
        # A rank may enter a collective while a sibling still waits for a link: that wait must end first.
        self.world = groups.start_replica(grid, place, self._device, store, 2 * self._timeout)
        if not self.leads:
            leader = self.gathering.listens(place.replica, 0)
            self._siblings.connect(leader, self._config.noloco.rendezvous_timeout_seconds)
        column = f"links {place.data} {place.tensor}"
        # Each link group forms on a store of its own, never on the world's: see comm/links.py.
        try:
            self._circuits.start(self._store(f"local {column}", place.replica, serves=place.stage == 0))
            if self._first_circuit != LOCAL:
                lowest = self._site_members[0]
                serves = place.replica == lowest and place.stage == 0
                self._circuits.join(self._first_circuit, self._site_members, self._store(column, lowest, serves=serves))
        except LinkBroken as error:
            raise ConnectionError(str(error)) from error

    @property
    def _site_members(self) -> tuple[int, ...]:
        return tuple(r for r in self._config.topology.site_of(self._place.replica) if r in self.gathering.members)

    @property
    def _routes(self) -> bool:
        """Whether microbatches may cross to other replicas."""
        site = self._config.topology.site_of(self._place.replica)
        return self._config.noloco.routing == "random" and len(site) > 1 and self._grid.stages > 1

    @property
    def _first_circuit(self) -> int:
        """The number of the circuit that is formed before training begins."""
        if self.gathering.joins or not self._routes or len(self._site_members) < 2:
            return LOCAL
        return self._grid.replicas + self._site_members[0]

    def meet(self, theta0: str, data: str, view_log: list[View]) -> Peers:
        """Compare with this rank's twins what must be equal, and get ready to exchange with them.

        `theta0` and `data` are the hashes of this rank's initial weights and of its token files; a replica that joins
        takes over the others' `theta0`. Raises ValueError naming a replica whose own differ, otherwise as `join`.
        """
        place, gathering = self._place, self.gathering
        theta0, addresses = gathering.meet(theta0, data)
        self._exchange = Exchange(
            replica=place.replica,
            rank=self._rank,
            listener=self._listener,
            secret=self._secret,
            run_id=run_id(self._config),
            fingerprint=theta0,
        )
        self.donor = Donor(
            self._listener, self._device, run_id=run_id(self._config), replica=place.replica, rank=self._rank
        )  # fmt: skip
        peers = Peers(
            place.replica,
            view_log,
            addresses,
            self._exchange,
            self.world.replica,
            self.world.device.device,
            (self.donor, self._listener, self._client),
            [View(0, (place.replica,) if gathering.joins else gathering.members)],
            self._gather,
        )
        self._steer(peers, addresses)
        self._siblings.hear(self._heard)
        if not gathering.joins:
            gathering.trains()
        gathering.stay_known()
        return peers

    def _steer(self, peers: Peers, addresses: Mapping[int, Address]) -> None:
        """From now on this replica hears and speaks of itself, and of the others' fate."""
        settings, topology, replica = self._config.noloco, self._config.topology, self._place.replica
        joins, members = self.gathering.joins, self.gathering.members
        catches_up = registry.OUTER_OPTIMIZERS[settings.optimizer].catches_up and topology.replicas > 1
        orders = Orders(self.world.replica, self.world.device.device, self.leads)
        lead = None
        if self.leads:
            self.leaders.connect(addresses)
            roster = Roster(
                replica,
                self._standing(replica, time.time_ns(), not joins),
                settings.heartbeat_seconds,
                self.leaders.refused,
            )
            for other in members:
                if other != replica:
                    roster.hear(other, self._standing(other, 0, True))
            terms = Terms(
                replica=replica,
                replicas=topology.replicas,
                site=topology.site_of(replica),
                routes=self._routes,
                heals=catches_up,
                columns=topology.data * topology.tensor,
                ranks=self._grid.replica_size,
                inner_steps=settings.inner_steps,
                steps=self._config.run.steps,
                heartbeat_seconds=settings.heartbeat_seconds,
                form_seconds=settings.link_timeout_seconds,
                host=self._host,
            )
            coordinator = Coordinator(
                terms,
                self.leaders,
                roster,
                self._siblings,
                self._circuits,
                orders,
                peers.exchange,
                self._form,
                self._warn,
            )
            self._coordinator = coordinator
            present, number = ((replica,), UNKNOWN) if joins else (members, 0)
            coordinator.start(present, number, self._first_circuit, self._site_members)
            lead = Lead(coordinator=coordinator, roster=roster, stopping=self._stopping, donor=self.donor)
        steps = self._config.run.steps
        self.steering = Steering(
            settings, peers, self._circuits, self._siblings, orders, lead, self._rank, catches_up, steps
        )  # fmt: skip

    def _standing(self, replica: int, incarnation: int, ready: bool) -> Standing:
        where = tuple(self.gathering.listens(replica, rank) for rank in range(self._grid.replica_size))
        return Standing(incarnation=incarnation, beat=0, ranks=where, ready=ready, circuit=self._first_circuit)

    def _heard(self, rank: int, message: Message) -> None:
        """A sibling's message; from the leader it is about circuits, and about how far other replicas are."""
        if "form" in message:
            self._form(message)
        elif "break" in message:
            self._circuits.break_off(message["break"])
        elif "dead" in message:
            self._exchange.give_up(message["dead"], message["reason"])
        elif "back" in message:
            self._exchange.expect(message["back"])
        elif "reached" in message:
            self._exchange.reached(message["reached"], message["outer_step"])
        elif self._coordinator is not None:
            self._coordinator.heard(rank, message)

    def _form(self, order: Message) -> None:
        """Connect to a circuit beside training, and say how it went."""
        number, place = order["form"], self._place
        host, port = order["stores"][place.data * self._grid.tensor + place.tensor]

        def done(problem: str | None) -> None:
            if self._coordinator is not None:
                self._coordinator.formed(number, self._rank, problem)
            else:
                self._siblings.tell({"formed": number, "problem": problem})

        self._circuits.form(number, order["members"], (host, port), done)

    def _lost(self, rank: int) -> None:
        """A sibling's process has ended: this one can't go on, and nobody shall wait for it."""
        if self._ended.is_set():
            return
        self._circuits.close()

        def give_up() -> None:
            # A collective of gloo's or NCCL's may wait for the dead rank for as long as the link timeout.
            if not self._ended.wait(LOST_SECONDS):
                print(f"error: {self._farewell(f'rank {rank} has ended')}", file=sys.stderr, flush=True)
                os._exit(TRY_AGAIN)

        threading.Thread(target=give_up, name="giving up", daemon=True).start()

    def _farewell(self, seen: str) -> str:
        return (
            f"replica {self._place.replica} has lost one of its ranks (that rank's own output says why) and cannot go "
            f"on; the other replicas can. This rank saw: {seen}"
        )

    def _warn(self, text: str) -> None:
        print(f"replica {self._place.replica}: {text}", file=sys.stderr, flush=True)

    def fetch(self, donor: Address, shape: RankShape) -> Donated:
        """The state of this rank's twin that listens there, at its next outer step. Raises DonationFailed."""
        return fetch(
            donor,
            self._secret,
            shape,
            run_id=run_id(self._config),
            replica=self._place.replica,
            rank=self._rank,
            deadline_seconds=self._config.noloco.rendezvous_timeout_seconds,
        )

    def close(self) -> None:
        """Leave the replica's world. Collective over the replica."""
        groups.stop_replica()
        if self._server is not None:
            self._server.close()

    def _store(self, topic: str, replica: int, *, serves: bool) -> dist.Store:
        """The store that one rank of `replica` serves and announces under `topic`."""
        timeout = timedelta(seconds=self._config.noloco.rendezvous_timeout_seconds)
        return shared_store(self._client, topic, replica, serves=serves, host=self._host, timeout=timeout)

    def _gather(self, timeout: timedelta) -> Collective:
        """The group of this rank's twins in all replicas, for outer optimizers that wait for everybody."""
        return open_collective(
            self._client,
            replica=self._place.replica,
            replicas=self._grid.replicas,
            rank=self._rank,
            device=self._device,
            host=self._host,
            timeout=timeout,
        )


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
