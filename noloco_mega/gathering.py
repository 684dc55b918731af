"""Which ranks make up this run, where do they listen, and do they belong together? What the rendezvous tells a rank.

start    every rank's address, versions and settings, compared before anything is built on them
muster   the replicas that the run begins with, or that it is under way
ready    the hashes of every rank's data and initial weights, compared before anything is exchanged
running  this replica can be joined
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from noloco_mega import versions
from noloco_mega.comm.membership import addresses_of, refuse_differences
from noloco_mega.comm.muster import LOOK_SECONDS, Muster
from noloco_mega.comm.rendezvous import Record, RendezvousClient, RendezvousTimeout
from noloco_mega.comm.wire import Address
from noloco_mega.config import Config
from noloco_mega.entry import USER_MUST_ACT, exit_status
from noloco_mega.grid import Place
from noloco_mega.outer import registry

SETTLE_SECONDS = 5.0
"""How long a run that may begin with fewer replicas waits for more, and for news of one that is under way."""
RENEW_BEATS = 2
"""Heartbeats between two looks whether the rendezvous still knows this rank."""


class Gathering:
    """One rank's line to the rendezvous: what it says there, and what it hears of the others."""

    members: tuple[int, ...]
    """The replicas that the run begins with; where it is under way, those that were found training."""
    joins: bool
    """Whether the run is under way and this replica joins it."""

    def __init__(self, config: Config, place: Place, client: RendezvousClient, address: Address) -> None:
        """`address` is where this rank listens."""
        self._config, self._place, self._client, self._address = config, place, client, address
        grid = config.topology.grid()
        self._rank, self._ranks = grid.replica_rank(place), range(grid.replica_size)
        self.leads = self._rank == 0
        """Whether this rank is its replica's leader."""
        enough = config.topology.start_replicas or config.topology.replicas
        self._counted_on = enough == config.topology.replicas
        """Whether the run can't begin without this replica, so that its failure is everybody's."""
        self._met = False
        self._ended = threading.Event()
        self._muster = Muster(
            client,
            replica=place.replica,
            replicas=config.topology.replicas,
            ranks=grid.replica_size,
            enough=enough,
            settle_seconds=max(SETTLE_SECONDS, self._news_seconds),
            timeout_seconds=config.noloco.rendezvous_timeout_seconds,
        )

    def under_way(self) -> bool:
        """Whether other replicas of this run are training already.

        Where this replica has been here before and is not to resume, they must be: a rendezvous that was started anew
        is given time to hear of them.
        """
        folder = self._config.replica_folder(self._place.replica)
        patient = self._config.run.resume == "no" and folder.exists() and any(folder.iterdir())
        deadline: float | None = None
        while not (running := bool(self._muster.running())):
            # From its first answer on: this look may itself have waited for it to come back.
            deadline = deadline or time.monotonic() + patient * self._news_seconds
            if time.monotonic() >= deadline:
                break
            time.sleep(LOOK_SECONDS)
        if running:
            self._counted_on = False
        return running

    def start(self) -> None:
        """Learn everybody's address, and which replicas begin the run.

        Raises ValueError where ranks were started with different configurations, RendezvousTimeout naming those that
        did not come, StartFailed as soon as one of them says so.
        """
        settings = json.dumps(self._config.to_json() | {"data": None}, sort_keys=True)
        record = {
            "address": list(self._address),
            "versions": versions.here(),
            "config": run_id(self._config),
            "settings": hashlib.sha256(settings.encode()).hexdigest(),
        }
        own, ranks = self._place.replica, self._ranks
        self._client.announce("start", own, self._rank, record)
        self._find_members()
        replicas = sorted({own, *self.members})
        records = self._wait_for("start", [(replica, rank) for replica in replicas for rank in ranks])
        refuse_differences(own, record, {replica: records[(replica, self._rank)] for replica in replicas})
        if any(records[(own, rank)]["settings"] != record["settings"] for rank in ranks):
            raise ValueError(
                f"the ranks of replica {own} were started with different configurations: give all of them the same "
                "file and the same --set"
            )
        self._started = records

    def listens(self, replica: int, rank: int) -> Address:
        """Where a rank of a replica that has started listens."""
        host, port = self._started[(replica, rank)]["address"]
        return str(host), int(port)

    def meet(self, theta0: str, data: str) -> tuple[str, dict[int, Address]]:
        """Compare the hashes of this rank's initial weights and token files with its twins'.

        Returns the initial weights that the run has begun with, which a replica that joins takes over, and where this
        rank's twins listen. Raises ValueError naming a replica whose own differ, otherwise as `start`.
        """
        own, twins = self._place.replica, [(replica, self._rank) for replica in self.members]
        if self.joins:
            # This one's weights will be a live replica's; exchanges go by what the others have begun with.
            theta0 = str(self._wait_for("ready", twins)[twins[0]]["theta0"])
        record = {"data": data, "theta0": theta0}
        self._client.announce("ready", own, self._rank, record)
        records = self._wait_for("ready", twins)
        refuse_differences(own, record, {replica: records[(replica, self._rank)] for replica, _ in twins})
        self._met = True
        return theta0, addresses_of(own, {replica: self._started[(replica, rank)] for replica, rank in twins})

    def trains(self) -> None:
        """Let others join this replica: its state is the run's."""
        if self.leads:
            self._client.announce("running", self._place.replica, 0, {"members": list(self.members)})

    def stay_known(self) -> None:
        """From now on, until `end`, let the rendezvous, which may be started anew, know this rank: others can join."""
        threading.Thread(target=self._renew, name="rendezvous", daemon=True).start()

    def failed(self, error: Exception) -> None:
        """This rank has failed. Before the replicas have met that ends the others' wait."""
        if not self._met:
            lasting = exit_status(error) == USER_MUST_ACT
            self._client.fail(self._place.replica, self._rank, str(error), of_run=self._counted_on, lasting=lasting)

    def end(self) -> None:
        """This rank is done, or has failed."""
        self._ended.set()

    def ask_leaders(self, topic: str, record: Mapping[str, Any]) -> dict[int, Record]:
        """What the leader of each replica that begins the run says under `topic`; this replica's says `record`.

        Needs no meeting. Raises RendezvousTimeout, or StartFailed as `start` does.
        """
        if self.leads:
            self._client.announce(topic, self._place.replica, 0, dict(record))
        found = self._client.wait_for(topic, [(replica, 0) for replica in self.members])
        return {replica: record for (replica, _), record in found.items()}

    def ask_siblings(self, topic: str, record: Mapping[str, Any]) -> list[Record]:
        """What each rank of this replica says under `topic`, once all have. Raises as `ask_leaders` does."""
        replica, ranks = self._place.replica, self._ranks
        self._client.announce(topic, replica, self._rank, dict(record))
        found = self._client.wait_for(topic, [(replica, rank) for rank in ranks])
        return [found[(replica, rank)] for rank in ranks]

    def _wait_for(self, topic: str, places: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], Record]:
        """RendezvousClient.wait_for. Who joins raises ConnectionError instead of RendezvousTimeout: some of those that
        it found training have died meanwhile, and its next start will not count on them."""
        try:
            return self._client.wait_for(topic, places)
        except RendezvousTimeout as error:
            if not self.joins:
                raise
            raise ConnectionError(f"{error}; they may have died since this replica came. Start it again") from error

    def _find_members(self) -> None:
        """Find out which replicas begin the run, or that it is under way: the leader looks, its siblings are told."""
        own = self._place.replica
        if self.leads:
            members, joins = self._muster.wait()
            if joins:
                self._counted_on = False
                self._refuse_to_join()
            self._client.announce("muster", own, 0, {"members": list(members), "joins": joins})
        # Twice as long as the leader, which may have started later: it is the one that knows who has not come.
        seconds = 2 * self._config.noloco.rendezvous_timeout_seconds
        record = self._client.wait_for("muster", [(own, 0)], timeout_seconds=seconds)[(own, 0)]
        self.members, self.joins = tuple(record["members"]), record["joins"]
        self._counted_on = not self.joins

    def _refuse_to_join(self) -> None:
        """Raise ValueError where a run under way can't take anybody in."""
        name = self._config.noloco.optimizer
        if not registry.OUTER_OPTIMIZERS[name].catches_up:
            raise ValueError(
                f'the run {self._config.run.name} is under way, and with noloco.optimizer "{name}" no replica can join '
                "it; stop all of it and start it again with --resume auto"
            )

    @property
    def _news_seconds(self) -> float:
        """What a rendezvous that was started anew needs to hear of everybody who trains."""
        return (RENEW_BEATS + 2) * self._config.noloco.heartbeat_seconds

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_BEATS * self._config.noloco.heartbeat_seconds):
            self._client.renew()


def run_id(config: Config) -> str:
    """A hash of everything that all replicas must agree on; where output goes and what is printed may differ."""
    settings: dict[str, Any] = config.to_json()
    agreed = ("name", "seed", "steps", "final_consensus", "consensus_tolerance", "consensus_rounds")
    settings["run"] = {key: settings["run"][key] for key in agreed}
    settings.pop("data")  # paths may differ between sites; what they hold is compared when replicas meet
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
