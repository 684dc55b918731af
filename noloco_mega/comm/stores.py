"""How does one rank serve a torch.distributed store to a few others?"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from noloco_mega.comm.rendezvous import RendezvousClient
from noloco_mega.comm.wire import Address


def serve_store(host: str, timeout: timedelta) -> tuple[dist.TCPStore, Address]:
    """A store on a free port of `host` alone, and where it is; it ends with the object."""
    # The port is bound here and handed over, on the one address that the others are told.
    bound = socket.create_server((host, 0))
    port = bound.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=bound.detach()
    )
    return store, (host, port)


def shared_store(
    client: RendezvousClient, topic: str, replica: int, *, serves: bool, host: str, timeout: timedelta
) -> dist.Store:
    """The store that one rank of `replica` serves and announces under `topic`.

    Raises RendezvousTimeout if nobody serves it in time, StartFailed if a rank of the run fails at its start.
    """
    if serves:
        store, address = serve_store(host, timeout)
        client.announce(topic, replica, 0, {"address": list(address)})
        return store
    host, port = client.wait_for(topic, [(replica, 0)])[(replica, 0)]["address"]
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
