"""Would this launch work? All ranks of a launch meet, measure their links, and rank 0 says what it found.

    torchrun | deepspeed | srun | mpirun ...  -m noloco_mega.preflight --config FILE

The way in is that of training: the launcher's variables, the rendezvous, one listener per rank. Each pair of ranks that
training would connect is measured once, in rounds in which a rank has at most one partner, while all other pairs
measure theirs: contention is part of the answer, as it is in training. Everything ends by a deadline; whoever is
missing is a finding. `python -m noloco_mega check --live` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from noloco_mega import device, findings, launcher, versions
from noloco_mega.bootstrap import find_rendezvous
from noloco_mega.comm.channel import Listener, dial
from noloco_mega.comm.rendezvous import RendezvousClient, RendezvousTimeout
from noloco_mega.comm.wire import Channel, Message
from noloco_mega.config import Config
from noloco_mega.entry import add_config_arguments, guarded, rank_of_run
from noloco_mega.gathering import run_id
from noloco_mega.grid import Place

TOPIC = "preflight"
PINGS = 20
FIRST_BYTES = 1 << 20
MOST_BYTES = 1 << 27
ABOUT_SECONDS = 0.2
"""How long one direction of a measured transfer is meant to take."""
PROBE_SECONDS = 30.0
"""When one measurement is given up."""
DISK_BYTES = 16 << 20


class CheckFailed(ValueError):  # noqa: N818
    """The launch would not work; the report above says why."""


def check(config: Config, launch: launcher.Launch, place: Place, wait_seconds: float) -> None:
    """One rank's part. Raises CheckFailed on every rank if the verdict is bad; rank 0 prints the report."""
    rank = config.topology.grid().rank(place)
    secret = launcher.secret()
    server, address = find_rendezvous(launch, rank, secret, config)
    # A run of its own for the rendezvous: a training run of the same name that has failed is no concern of the check.
    client = RendezvousClient(address, secret, wait_seconds, run=f"{config.run.name} preflight")
    visit = _Visit(config, launch, rank, secret, client, wait_seconds)
    try:
        good = visit.lead() if rank == 0 else visit.follow()
    finally:
        visit.close()
        if server is not None:
            server.close()
    if not good:
        raise CheckFailed("this launch would not work; rank 0 has printed why")


def facts(config: Config, launch: launcher.Launch) -> Message:
    """What a rank says of itself."""
    names = [n for n, items in psutil.net_if_addrs().items() if any(item.address == launch.host for item in items)]
    interface = launch.interface or (names[0] if names else "?")
    state = psutil.net_if_stats().get(interface)
    try:
        chosen, problem = str(device.select(launch.local_rank, config.run.device).device), ""
    except ValueError as error:
        chosen, problem = "none", str(error)
    return {
        "host": socket.gethostname(),
        "address": launch.host,
        "interface": interface,
        "interface_mbit": state.speed if state else 0,
        "versions": versions.here(),
        "config": run_id(config),
        "device": chosen,
        "device_problem": problem,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "disk": _disk(Path(config.run.directory)),
    }


def _disk(folder: Path) -> Message:
    """Free bytes, and the speed of one synchronised write into the folder of all runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        block = os.urandom(DISK_BYTES)
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.monotonic() - began
        return {"free": shutil.disk_usage(folder).free, "bytes_per_second": DISK_BYTES / seconds, "problem": ""}
    except OSError as error:
        return {"free": 0, "bytes_per_second": 0.0, "problem": f"cannot write to {folder}: {error.strerror}"}


def edges(config: Config) -> set[tuple[int, int]]:
    """The pairs of ranks (lower, higher) that training connects: twins, stage neighbours, and a replica's leader with
    its other ranks."""
    grid, found = config.topology.grid(), set()
    for place in grid.places():
        rank = grid.rank(place)
        found |= {(rank, grid.rank(place._replace(replica=other))) for other in range(grid.replicas)}
        found.add((rank, place.replica * grid.replica_size))
        if place.stage + 1 < grid.stages:
            routed = config.noloco.routing == "random"
            for other in config.topology.site_of(place.replica) if routed else (place.replica,):
                found.add((rank, grid.rank(place._replace(replica=other, stage=place.stage + 1))))
    return {(min(pair), max(pair)) for pair in found if pair[0] != pair[1]}


def rounds(rank: int, size: int) -> Iterator[int]:
    """The partners of a rank, one per round of a tournament of all ranks (the circle method); itself: a round off."""
    even = size + size % 2
    for number in range(even - 1):
        if rank == even - 1:
            # The fixed seat plays whoever stands still in this round.
            partner = number * (even // 2) % (even - 1)
        else:
            partner = (number - rank) % (even - 1)
            partner = even - 1 if partner == rank else partner
        yield partner if partner < size else rank


class _Visit:
    """One rank's way through the check."""

    def __init__(
        self,
        config: Config,
        launch: launcher.Launch,
        rank: int,
        secret: bytes,
        client: RendezvousClient,
        wait_seconds: float,
    ) -> None:
        self._config, self._rank, self._secret, self._client = config, rank, secret, client
        self._wait_seconds = wait_seconds
        self._deadline = time.monotonic() + wait_seconds
        self._grid = config.topology.grid()
        self._arrived: dict[tuple[str, int], Channel] = {}
        self._changed = threading.Condition()
        self._listener = Listener(secret, launch.host)
        self._listener.register("probe", self._arrive)
        self._listener.register("report", self._arrive)
        self._facts = facts(config, launch)
        self._client.announce(TOPIC, *self._key(rank), {"address": list(self._listener.address)})

    def close(self) -> None:
        self._listener.close()
        self._client.close()

    def follow(self) -> bool:
        """Measure, report to rank 0, and return its verdict."""
        report = {"facts": self._facts, "links": self._measure()}
        channel = self._dial("report", 0)
        try:
            channel.expire_in(self._wait_seconds + PROBE_SECONDS)
            channel.send(report)
            return bool(channel.receive()["good"])
        finally:
            channel.close()

    def lead(self) -> bool:
        """Measure, gather everybody's report, print and spread the verdict."""
        reports: dict[int, Message] = {0: {"facts": self._facts, "links": self._measure()}}
        channels = []
        self._deadline = max(self._deadline, time.monotonic() + PROBE_SECONDS)
        for rank in range(1, self._grid.size):
            channel = self._await("report", rank)
            if channel is None:
                continue
            try:
                channel.expire_in(PROBE_SECONDS)
                reports[rank] = channel.receive()
                channels.append(channel)
            except OSError:
                channel.close()  # it died while it spoke: it is missing
        text, good = findings.judge(self._config, reports, self._wait_seconds)
        print(text, flush=True)
        for channel in channels:
            with contextlib.suppress(OSError):  # it did not wait for the verdict
                channel.send({"good": good})
            channel.close()
        return good

    def _measure(self) -> list[Message]:
        """This rank's measurements, as the dialing (lower) side of its pairs, and the failures of the others."""
        wanted, found = edges(self._config), []
        for partner in rounds(self._rank, self._grid.size):
            pair = (min(self._rank, partner), max(self._rank, partner))
            if pair not in wanted:
                continue
            row: Message = {"from": pair[0], "to": pair[1]}
            try:
                if self._rank == pair[0]:
                    found.append(row | self._call(partner))
                else:
                    self._answer(partner)
            except OSError as error:
                found.append(row | {"problem": str(error)})
        return found

    def _call(self, partner: int) -> Message:
        channel = self._dial("probe", partner)
        try:
            channel.expire_in(PROBE_SECONDS)
            best, offset = float("inf"), 0.0
            for _ in range(PINGS):
                began, told = time.monotonic(), time.time()
                channel.send({"kind": "ping"})
                there = channel.receive()["time"]
                seconds = time.monotonic() - began
                if seconds < best:
                    best, offset = seconds, there - (told + seconds / 2)
            there, back = self._transfer(channel, FIRST_BYTES)
            size = int(FIRST_BYTES / max(there, back) * ABOUT_SECONDS)
            size = max(FIRST_BYTES, min(MOST_BYTES, size))
            there, back = self._transfer(channel, size)
            channel.send({"kind": "end"})
        finally:
            channel.close()
        return {
            "latency_seconds": best / 2,
            "clock_seconds": offset,
            "there_gbit": size * 8 / there / 1e9,
            "back_gbit": size * 8 / back / 1e9,
        }

    @staticmethod
    def _transfer(channel: Channel, size: int) -> tuple[float, float]:
        """Seconds that `size` bytes take there, and back."""
        buffer = memoryview(bytearray(size))
        channel.send({"kind": "bytes", "size": size})
        began = time.monotonic()
        channel.send_view(buffer)
        channel.receive()
        middle = time.monotonic()
        channel.send({"kind": "back"})
        channel.receive_into(buffer)
        return middle - began, time.monotonic() - middle

    def _answer(self, partner: int) -> None:
        channel = self._await("probe", partner)
        if channel is None:
            raise TimeoutError(f"rank {partner} did not connect in {self._wait_seconds:g} s")
        try:
            channel.expire_in(PROBE_SECONDS)
            while (message := channel.receive())["kind"] != "end":
                if message["kind"] == "ping":
                    channel.send({"time": time.time()})
                    continue
                buffer = memoryview(bytearray(min(int(message["size"]), MOST_BYTES)))
                channel.receive_into(buffer)
                channel.send({"kind": "done"})
                channel.receive()
                channel.send_view(buffer)
        finally:
            channel.close()

    def _arrive(self, channel: Channel, hello: Message) -> None:
        if hello.get("to") != self._rank:
            channel.close()  # it followed an old address
            return
        channel.expire_in(PROBE_SECONDS)
        channel.send({"welcome": True})
        with self._changed:
            self._arrived[(str(hello["kind"]), int(hello["from"]))] = channel
            self._changed.notify_all()

    def _await(self, kind: str, rank: int) -> Channel | None:
        with self._changed:
            self._changed.wait_for(
                lambda: (kind, rank) in self._arrived, timeout=max(0.0, self._deadline - time.monotonic())
            )
            return self._arrived.pop((kind, rank), None)

    def _dial(self, kind: str, rank: int) -> Channel:
        """A connection to `rank` that it has welcomed. Raises OSError at the deadline."""
        reason = "it has not announced itself"
        while True:
            remaining = self._deadline - time.monotonic()
            try:
                record = self._client.wait_for(TOPIC, [self._key(rank)], max(0.1, remaining))[self._key(rank)]
                hello: dict[str, Any] = {"kind": kind, "from": self._rank, "to": rank}
                channel = dial(tuple(record["address"]), self._secret, hello, min(5.0, max(0.1, remaining)))
                channel.expire_in(max(0.1, remaining))
                channel.receive()
                return channel
            except RendezvousTimeout:
                pass
            except OSError as error:
                reason = str(error)
            if time.monotonic() >= self._deadline:
                raise TimeoutError(f"rank {rank} was not reached in {self._wait_seconds:g} s: {reason}")
            time.sleep(0.2)

    def _key(self, rank: int) -> tuple[int, int]:
        return divmod(rank, self._grid.replica_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="how long ranks may take to appear (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> None:
    """The command, with the arguments of `add_config_arguments` and `add_arguments`."""
    check(*rank_of_run(arguments), arguments.wait_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m noloco_mega.preflight", description="Check a launch.")
    add_config_arguments(parser)
    add_arguments(parser)
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
