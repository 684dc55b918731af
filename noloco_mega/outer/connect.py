"""How does a rank of a user's own training loop find its twins in the other replicas?"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from noloco_mega import launcher
from noloco_mega.comm.channel import Listener
from noloco_mega.comm.collective import Collective, open_collective
from noloco_mega.comm.exchange import Exchange
from noloco_mega.comm.membership import Peers, addresses_of, refuse_differences
from noloco_mega.comm.rendezvous import RendezvousClient
from noloco_mega.device import Device
from noloco_mega.engine.weights import fingerprint
from noloco_mega.plan import views

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def connect(
    engine: DeepSpeedEngine,
    *,
    replicas: int,
    run: str,
    timeout_seconds: float = 600.0,
    environ: Mapping[str, str] | None = None,
) -> Peers:
    """Meet the ranks that hold the same part of the model in the other replicas, for `attach`.

    Each replica is a launch, and a torch.distributed world, of its own, with NOLOCO_REPLICA, NOLOCO_RENDEZVOUS and the
    secret in its environment as for a run of `noloco_mega train`. `run` names the run at the rendezvous. All replicas
    must start from equal weights (the same seed): that is compared. Call `close` on the result at the end.

    Raises LaunchError for missing or wrong variables, ValueError if a replica starts from other weights,
    RendezvousTimeout naming who did not come.
    """
    launch = launcher.read() if environ is None else launcher.read(environ)
    rank = dist.get_rank()
    if launch.replica is None or launch.rendezvous is None:
        raise launcher.LaunchError(
            "start every replica as a launch of its own, with NOLOCO_REPLICA set to its number and NOLOCO_RENDEZVOUS "
            "to the HOST:PORT of `python -m noloco_mega rendezvous`"
        )
    if not 0 <= launch.replica < replicas:
        raise launcher.LaunchError(f"NOLOCO_REPLICA = {launch.replica}, but there are replicas 0 to {replicas - 1}")
    secret = launcher.secret() if environ is None else launcher.secret(environ)
    listener = Listener(secret, launch.host)
    client = RendezvousClient(launch.rendezvous, secret, timeout_seconds, run=run, place=(launch.replica, rank))
    record = {"address": list(listener.address), "theta0": fingerprint(engine.module)}
    client.announce("start", launch.replica, rank, record)
    records = client.wait_for("start", [(replica, rank) for replica in range(replicas)])
    twins = {replica: found for (replica, _), found in records.items()}
    refuse_differences(launch.replica, {"theta0": record["theta0"]}, twins)
    addresses = addresses_of(launch.replica, twins)
    exchange = Exchange(
        replica=launch.replica,
        rank=rank,
        listener=listener,
        secret=secret,
        run_id=run,
        fingerprint=str(record["theta0"]),
    )
    world = dist.group.WORLD
    assert world is not None
    gather = functools.partial(
        _gather, client, replica=launch.replica, replicas=replicas, rank=rank, device=engine.device, host=launch.host
    )
    return Peers(
        launch.replica,
        views.initial(replicas),
        addresses,
        exchange,
        world,
        engine.device,
        (listener, client),
        gather=gather,
    )


def _gather(client: RendezvousClient, timeout: timedelta, *, device: torch.device, **place: Any) -> Collective:
    """The group of this rank's twins in all replicas, for outer optimizers that wait for everybody."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    return open_collective(client, device=Device(device, backend), timeout=timeout, **place)
