"""Outer steps of whole replicas, over real engines and connections, against the printed formula in NumPy.

DiLoCo's are the same with one group of everybody, whose φ are equal.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from noloco_mega.grid import Grid, Place
from noloco_mega.plan import pairing
from tests.dist.test_engine import make_config, make_stage, run_schedule
from tests.harness import replica_world, run_ranks
from tests.unit.test_outer_formula import printed_step

OUTER_STEPS, INNER_STEPS, DEADLINE_SECONDS = 3, 2, 8.0
SECRET = b"a test's own secret"


def make_peers(grid: Grid, place: Place, directory: Path, name: str, group: Any) -> Any:
    """This rank's Peers in a run of `grid`, its twins' addresses read from files in `directory`."""
    from noloco_mega.comm.channel import Listener
    from noloco_mega.comm.collective import Everybody
    from noloco_mega.comm.exchange import Exchange
    from noloco_mega.comm.links import gloo_group
    from noloco_mega.comm.membership import Peers
    from noloco_mega.plan import views

    listener = Listener(SECRET)
    rank = grid.replica_rank(place)
    exchange = Exchange(
        replica=place.replica, rank=rank, listener=listener, secret=SECRET, run_id=name, fingerprint=name
    )
    directory_of_addresses = dist.FileStore(str(directory / f"addresses_{name}"), grid.size)
    directory_of_addresses.set(f"{place.replica}/{rank}", json.dumps(listener.address))
    others = [replica for replica in range(grid.replicas) if replica != place.replica]

    def gather(timeout: timedelta) -> Everybody:
        store = dist.FileStore(str(directory / f"everybody_{name}_{rank}"), grid.replicas)
        group = gloo_group(store, place.replica, grid.replicas, timeout, "127.0.0.1")
        return Everybody(group, place.replica, grid.replicas, timeout)

    return Peers(
        replica=place.replica,
        view_log=views.initial(grid.replicas),
        addresses={other: tuple(json.loads(directory_of_addresses.get(f"{other}/{rank}"))) for other in others},
        exchange=exchange,
        group=group,
        device=torch.device("cpu"),
        gather=gather,
    )


def closed_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


def flat(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy().copy()


def _weights_follow(engine, masters, phi) -> bool:
    """Whether this data rank's part of the model equals φ, cast to the model's dtype."""
    parameters = dict(engine.module.named_parameters())
    return all(
        torch.equal(
            parameters[s.parameter].detach().flatten()[s.parameter_offset :][: s.numel],
            phi[s.master][s.master_offset :][: s.numel].to(parameters[s.parameter].dtype),
        )
        for s in masters.segments()
    )


def _train(place, directory, grid, cases):
    """For each case: per outer step this rank's θ, φ and δ, its report, and whether the model's weights follow φ."""
    from noloco_mega import attach
    from noloco_mega.engine import deepspeed as engines
    from noloco_mega.engine.weights import Masters

    world = replica_world(grid, place, directory)
    answers = []
    for number, (bf16, options, cut) in enumerate(cases):
        run = make_config(grid, bf16=bf16, clip=1.0)
        run = dataclasses.replace(
            run,
            noloco=dataclasses.replace(
                run.noloco, inner_steps=INNER_STEPS, exchange_deadline_seconds=DEADLINE_SECONDS, **options
            ),
        )
        engine = engines.build_engine(make_stage(run, world), run, world)
        masters = Masters(engine)
        peers = make_peers(grid, place, directory, f"case{number}", world.replica)
        hook = attach(engine, run, peers)
        start, history = flat(masters.tensors), []
        for step in range(OUTER_STEPS * INNER_STEPS):
            outer_step, last = divmod(step, INNER_STEPS)
            engines.begin(engine)
            run_schedule(engine.module, step, place.data + grid.data * place.replica, world)
            if last == INNER_STEPS - 1:
                thetas, twins = _spy(hook, masters), peers.addresses
                if cut == (outer_step, grid.rank(place)):
                    peers.addresses = dict.fromkeys(twins, closed_address())
                engines.apply(engine, world)
                peers.addresses = twins
                history.append(
                    {
                        "start": start,
                        "theta": thetas[0],
                        "phi": flat(hook.optimizer.phi),
                        "delta": flat(hook.optimizer.delta),
                        "report": hook.last_report,
                        "follows": _weights_follow(engine, masters, hook.optimizer.phi)
                        and np.array_equal(flat(masters.tensors), flat(hook.optimizer.phi)),
                    }
                )
            else:
                engines.apply(engine, world)
        assert (hook.step, hook.outer_step) == (OUTER_STEPS * INNER_STEPS, OUTER_STEPS)
        answers.append(history)
        peers.exchange.close()
    return answers


def _spy(hook, masters):
    """Record θ as the next launch finds it."""
    thetas, launch = [], hook.optimizer.launch

    def recording(outer_step):
        thetas.append(flat(masters.tensors))
        hook.optimizer.launch = launch
        launch(outer_step)

    hook.optimizer.launch = recording
    return thetas


# bf16?, options of the noloco block, (outer step, rank in run) whose connections fail
PAIRS = [
    (False, {}, None),
    (True, {}, None),
    (False, {"weight_decay": 0.1}, (1, 2)),
    (True, {"optimizer": "diloco", "outer_momentum": 0.9}, None),
]
ODD = [
    (False, {}, None),
    (True, {"group_size": 3, "gamma": 1.0}, None),
    (False, {"optimizer": "diloco"}, None),
]


@pytest.mark.parametrize(
    ("grid", "cases"),
    [(Grid(replicas=2, stages=2, tensor=2), PAIRS), (Grid(replicas=3, data=2), ODD)],
    ids=["two replicas of S2T2", "three replicas of D2"],
)
def test_outer_steps_equal_the_printed_formula(tmp_path, grid, cases):
    answers = run_ranks(_train, grid, tmp_path, grid, cases)
    for number, (_, options, cut) in enumerate(cases):
        settings = dataclasses.replace(make_config(grid).noloco, **options)
        for rank in range(grid.replica_size):
            twins = [answers[replica * grid.replica_size + rank][number] for replica in range(grid.replicas)]
            _check_twins(twins, settings, cut)
        for outer_step in range(OUTER_STEPS):
            if settings.optimizer == "noloco":
                _check_spread([answer[number] for answer in answers], grid, outer_step, settings)


def _check_spread(histories, grid, outer_step, settings):
    """All ranks of a replica report one spread, that of the whole replica."""

    def contribution(rank):
        step = histories[rank][outer_step]
        phi = histories[rank][outer_step - 1]["phi"] if outer_step else step["start"]
        return settings.outer_lr * (step["theta"].astype(np.float64) - phi) + settings.gamma * phi

    whole = [
        np.concatenate([contribution(replica * grid.replica_size + rank) for rank in range(grid.replica_size)])
        for replica in range(grid.replicas)
    ]
    for replica, own in enumerate(whole):
        reports = [
            histories[replica * grid.replica_size + rank][outer_step]["report"] for rank in range(grid.replica_size)
        ]
        ratios = [np.linalg.norm(own - whole[j]) / np.linalg.norm(own) for j in reports[0].received]
        expected = pytest.approx(np.mean(ratios), rel=1e-4) if ratios else None
        assert all(report.spread == expected for report in reports)


def _check_twins(twins, settings, cut):
    """The ranks that hold one slice of the model, over all replicas."""
    phi = np.stack([twin[0]["start"] for twin in twins]).astype(np.float64)
    delta = np.zeros_like(phi)
    assert all(np.array_equal(phi[0], other) for other in phi), "the replicas start apart"
    for outer_step in range(OUTER_STEPS):
        theta = np.stack([twin[outer_step]["theta"] for twin in twins]).astype(np.float64)
        assert np.abs(theta - phi).max() > 1e-3, "nothing was trained"
        groups = {}
        for replica in range(len(twins)):
            partners = pairing.partners(settings.seed, outer_step, range(len(twins)), settings.group_size, replica)
            if settings.optimizer == "diloco":
                partners = tuple(other for other in range(len(twins)) if other != replica)
            report = twins[replica][outer_step]["report"]
            alone = cut is not None and cut[0] == outer_step
            assert report.asked == partners and report.received == (() if alone else partners)
            assert set(report.missed) == (set(partners) if alone else set())
            if not alone:
                times = len(partners) if settings.optimizer == "noloco" else 1
                assert report.received_bytes == report.sent_bytes == 4 * theta.shape[1] * times
            groups[replica] = (replica,) if alone else (replica, *partners)
        phi, delta = printed_step(theta, phi, delta, groups, settings)
        for replica, twin in enumerate(twins):
            np.testing.assert_allclose(twin[outer_step]["phi"], phi[replica], atol=1e-6)
            np.testing.assert_allclose(twin[outer_step]["delta"], delta[replica], atol=1e-6)
            assert twin[outer_step]["follows"], "the next inner step would not start from φ"
