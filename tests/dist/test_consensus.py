"""Rounds of averaging at the end of a run: over real connections, with everybody there and with a killed replica."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import numpy as np
import torch

from noloco_mega.config import Noloco
from noloco_mega.grid import Grid
from tests.harness import Ranks, replica_world, run_ranks

TOLERANCE = 1e-4
SIZES = (37, 1000)
SETTINGS = Noloco(exchange_deadline_seconds=20.0, link_timeout_seconds=60.0, seed=3)


@dataclasses.dataclass
class Weights:
    tensors: list[torch.Tensor]
    published: int = 0

    def publish(self):
        self.published += 1


def start_of(grid, place):
    """What a rank holds at first: 5 % apart from what its twins do."""
    shared = np.random.default_rng([7, grid.replica_rank(place)])
    own = np.random.default_rng([8, grid.rank(place)])
    return [(shared.normal(size=n) + 0.05 * own.normal(size=n)).astype(np.float32) for n in SIZES]


def average(place, directory, grid, tolerance, most_rounds, killed, spoilt=None):
    """`killed`: the replica that dies, and in which round. `spoilt`: the replica that holds a NaN."""
    from noloco_mega.comm.seats import AFTER_TRAINING
    from noloco_mega.outer import consensus
    from tests.dist.test_outer import make_peers

    world = replica_world(grid, place, directory)
    peers = make_peers(grid, place, directory, "consensus", world.replica)
    weights = Weights([torch.from_numpy(values) for values in start_of(grid, place)])
    if place.replica == spoilt:
        weights.tensors[0][3] = torch.nan
    launch = peers.exchange.launch
    gone, last_round = killed if spoilt is None else (spoilt, 0)

    def dying(outer_step, *arguments):
        if outer_step - AFTER_TRAINING == last_round:
            if (place.replica, last_round) == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            # In a run the heartbeats find out.
            threading.Timer(1.0, peers.exchange.give_up, (gone, "no sign of life")).start()
        return launch(outer_step, *arguments)

    peers.exchange.launch = dying
    done = consensus.reach(weights, peers, SETTINGS, tolerance=tolerance, most_rounds=most_rounds)
    assert weights.published == (place.replica != spoilt)
    # A partner may still be in the round that ended here.
    torch.distributed.barrier(world.replica)
    peers.exchange.close()
    return [tensor.numpy() for tensor in weights.tensors], done


def flat(tensors):
    return np.concatenate(tensors).astype(np.float64)


def furthest(ends, grid):
    """The largest ‖θ_i − θ_j‖ / ‖θ_i‖ of two replicas."""
    per_replica = {}
    for place, tensors in ends.items():
        per_replica.setdefault(place.replica, []).append(flat(tensors))
    whole = [np.concatenate(parts) for parts in per_replica.values()]
    return max(np.linalg.norm(one - other) / np.linalg.norm(one) for one in whole for other in whole)


def check_equal_and_mean(grid, tmp_path):
    places = list(grid.places())
    results = run_ranks(average, grid, tmp_path, grid, TOLERANCE, 64, (None, None), limit_seconds=180)
    ends = {place: tensors for place, (tensors, _) in zip(places, results, strict=True)}
    starts = {place: start_of(grid, place) for place in places}
    assert furthest(starts, grid) > 100 * TOLERANCE > 100 * furthest(ends, grid)
    for rank in range(grid.replica_size):
        twins = [place for place in places if grid.replica_rank(place) == rank]
        mean = np.mean([flat(starts[place]) for place in twins], axis=0)
        for place in twins:
            np.testing.assert_allclose(flat(ends[place]), mean, atol=3 * TOLERANCE * np.abs(mean).max())
    reports = [done for _, done in results]
    assert len({done.rounds for done in reports}) == 1 and all(done.reached and not done.missed for done in reports)
    assert all(done.spread <= TOLERANCE for done in reports if done.spread is not None)
    return reports[0].rounds


def test_four_replicas_end_equal_at_their_mean(tmp_path):
    rounds = check_equal_and_mean(Grid(replicas=4), tmp_path)
    # Two rounds with different pairs are enough for four; then 5 quiet ones.
    assert 7 <= rounds < 20


def test_an_odd_number_of_replicas_of_two_ranks(tmp_path):
    check_equal_and_mean(Grid(replicas=3, data=2), tmp_path)


def test_a_killed_replica_holds_nobody(tmp_path):
    grid = Grid(replicas=4)
    ranks = Ranks(average, list(grid.places()), tmp_path, (grid, TOLERANCE, 64, (2, 1)))
    results = ranks.wait(180, expect_missing=frozenset({2}))
    ends = {place: results[rank][0] for rank, place in enumerate(grid.places()) if rank != 2}
    assert furthest(ends, grid) < TOLERANCE
    reports = [done for _, done in results.values()]
    assert all(done.reached and set(done.missed) <= {2} and len(done.missed) <= 2 for done in reports), reports
    assert any(done.missed for done in reports)


def test_it_ends_unreached_after_the_rounds_allowed(tmp_path):
    grid = Grid(replicas=4)
    results = run_ranks(average, grid, tmp_path, grid, 1e-9, 4, (None, None), limit_seconds=120)
    assert all(done.rounds == 4 and not done.reached for _, done in results)


def test_weights_that_are_not_finite_reach_nobody(tmp_path):
    grid = Grid(replicas=4)
    results = run_ranks(average, grid, tmp_path, grid, TOLERANCE, 64, (None, None), 1, limit_seconds=180)
    ends = {place: tensors for place, (tensors, _) in zip(grid.places(), results, strict=True) if place.replica != 1}
    assert furthest(ends, grid) < TOLERANCE and all(done.reached for _, done in results[:1] + results[2:])
    assert not results[1][1].reached and not results[1][1].rounds
