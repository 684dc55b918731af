"""Each replica's store is its own: what one replica writes, DeepSpeed's and megatron-core's keys included, no other sees."""

import os

from noloco_mega import config as configs
from noloco_mega import launcher
from noloco_mega.comm.rendezvous import RendezvousServer
from noloco_mega.grid import Grid
from tests.harness import Ranks
from tests.unit.test_config import changed

SECRET = "a secret for these tests only"


def _keys(place, directory, raw, address):
    from noloco_mega.bootstrap import Connection

    config = configs.parse(raw)
    os.environ.update(
        RANK=str(place.stage), WORLD_SIZE="2", LOCAL_RANK="0", NOLOCO_REPLICA=str(place.replica), NOLOCO_RENDEZVOUS=address,
        NOLOCO_SECRET=SECRET,
    )  # fmt: skip
    connection = Connection(config, launcher.read(), place)
    connection.join()
    store = connection.world.store
    store.set(f"written by replica {place.replica} stage {place.stage}", "x")
    connection.world.replica.barrier().wait()
    keys = sorted(store.list_keys())
    connection.world.replica.barrier().wait()
    connection.close()
    return (store.host, store.port), [key for key in keys if "written by" in key], len(keys)


def test_no_key_is_shared_between_two_replicas_stores(tmp_path):
    raw = changed(topology={"replicas": 2, "stages": 2}, noloco={"rendezvous_timeout_seconds": 60.0})
    server = RendezvousServer(SECRET.encode())
    try:
        ranks = Ranks(
            _keys, list(Grid(replicas=2, stages=2).places()), tmp_path, (raw, "{}:{}".format(*server.address))
        )
        answers = ranks.wait(90)
    finally:
        server.close()
    addresses = {answers[rank][0] for rank in range(4)}
    assert len(addresses) == 2, "two replicas, two stores"
    for rank, (_, written, total) in answers.items():
        replica = rank // 2
        assert written == [f"/written by replica {replica} stage {stage}" for stage in range(2)] or written == [
            f"written by replica {replica} stage {stage}" for stage in range(2)
        ]
        assert total > 2  # the groups' own keys are there too, so the list is the whole store
