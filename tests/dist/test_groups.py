"""Groups of a replica's world, against the grid's own arithmetic."""

import pytest
import torch
import torch.distributed as dist

from noloco_mega.grid import Grid
from tests.harness import replica_world, run_ranks


def _sum_ranks(place, directory, grid):
    world = replica_world(grid, place, directory)
    answer = {}
    for axis in ("tensor", "pipeline", "data", "model", "replica"):
        group = getattr(world, axis)
        mine = torch.zeros(grid.size)
        mine[grid.rank(place)] = 1
        dist.all_reduce(mine, group=group)
        answer[axis] = mine.nonzero().flatten().tolist()
    return answer


@pytest.mark.parametrize("grid", [Grid(replicas=2, data=2, stages=2), Grid(replicas=2, stages=2, tensor=2)])
def test_groups_are_the_grids_axes(tmp_path, grid):
    for rank, answer in enumerate(run_ranks(_sum_ranks, grid, tmp_path, grid)):
        place = grid.place(rank)
        same = {
            "tensor": ("replica", "data", "stage"),
            "pipeline": ("replica", "data", "tensor"),
            "data": ("replica", "stage", "tensor"),
            "model": ("replica", "data"),
            "replica": ("replica",),
        }
        for axis, fixed in same.items():
            expected = [
                grid.rank(other)
                for other in grid.places()
                if all(getattr(other, name) == getattr(place, name) for name in fixed)
            ]
            assert answer[axis] == expected, axis
