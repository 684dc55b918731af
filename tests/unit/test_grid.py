"""The rank order of a run, against the formula in the module's docstring and by enumeration."""

import itertools

import pytest

from noloco_mega.grid import Grid, Place


def test_rank_order_is_replica_data_stage_tensor():
    grid = Grid(replicas=3, data=2, stages=4, tensor=5)
    places = list(itertools.product(range(3), range(2), range(4), range(5)))
    assert [tuple(grid.place(rank)) for rank in range(grid.size)] == places
    for rank, place in enumerate(places):
        assert grid.rank(Place(*place)) == rank
        assert grid.replica_rank(Place(*place)) == rank % 40


def test_bad_ranks_and_sizes_are_refused():
    with pytest.raises(ValueError, match="rank 8 is outside a run of 8"):
        Grid(replicas=4, stages=2).place(8)
    with pytest.raises(ValueError, match="stages axis"):
        Grid(replicas=1, stages=0)
