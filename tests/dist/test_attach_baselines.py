"""connect() and attach() with outer optimizers that average over everybody, on a plain DeepSpeed loop."""

from __future__ import annotations

import os

import numpy as np

from noloco_mega.comm.rendezvous import RendezvousServer
from noloco_mega.config import Noloco
from tests.dist.test_attach import MICROBATCHES, make_engine, masters_of
from tests.harness import run_ranks

SECRET = "a secret for these tests only"
OPTIMIZERS = ("diloco", "allreduce")
STEPS, H = 6, 3


def _train(replica, directory, address):
    """Per optimizer: the masters and the bytes reported at each outer step."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import noloco_mega
    from tests.dist.test_outer import flat

    os.environ["LOCAL_RANK"] = "0"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    environ = {"NOLOCO_REPLICA": str(replica), "NOLOCO_RENDEZVOUS": address, "NOLOCO_SECRET": SECRET}
    environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    answer = {}
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        engine = make_engine(model, stage=1)
        peers = noloco_mega.connect(engine, replicas=2, run=name, environ=environ)
        hook = noloco_mega.attach(engine, Noloco(optimizer=name, inner_steps=H), peers)
        generator = torch.Generator().manual_seed(replica)
        masters, sent = [], []
        for step in range(1, STEPS + 1):
            for _ in range(MICROBATCHES):
                x = torch.randn(4, 8, generator=generator)
                engine.backward((engine(x) - x[:, :4].cumsum(1)).square().mean())
                engine.step()
            if step % H == 0:
                sent.append(hook.last_report.sent_bytes)
            masters.append(flat(masters_of(engine)))
        answer[name] = masters, sent
        hook.detach()
        peers.close()
    return answer


def test_a_users_own_loop_averages_with_everybody(tmp_path):
    server = RendezvousServer(SECRET.encode())
    try:
        first, second = run_ranks(_train, 2, tmp_path, "{}:{}".format(*server.address))
    finally:
        server.close()
    for name in OPTIMIZERS:
        (ours, sent), (theirs, _) = first[name], second[name]
        equal = [np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
        assert equal == [name == "allreduce" or step % H == 0 for step in range(1, STEPS + 1)]
        payload_bytes = 4 * ours[0].size
        assert sent == [payload_bytes * (H if name == "allreduce" else 1)] * 2
        assert np.abs(ours[-1] - ours[0]).max() > 1e-3, "nothing was trained"
