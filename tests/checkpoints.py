"""Small checkpoints made by hand, for tests that train nothing."""

from __future__ import annotations

import torch

from noloco_mega.checkpoint.folders import Checkpoints
from noloco_mega.checkpoint.format import RankContent, Span, Stored, commit, write_rank
from noloco_mega.model.parameters import ParameterSlices, Piece

NUMEL = 1000


def content(value: float, rank: int = 0, ranks: int = 1) -> RankContent:
    """One parameter of NUMEL · ranks elements, all `value`, of which a rank holds NUMEL as its master."""
    piece = Piece(((0, NUMEL),), ((rank * NUMEL, (rank + 1) * NUMEL),))
    return RankContent(
        tensors=[Stored(key="master.0", kind="master", tensor=torch.full((NUMEL,), float(value)), layout="0")],
        layouts={"0": [Span("weight", 0, 0, NUMEL)]},
        slices=[ParameterSlices("weight", (NUMEL * ranks,), (piece,))],
        numbers={"losses": []},
    )


def facts(config, step: int, replica: int, /, **changes):
    return {
        "step": step,
        "replica": replica,
        "config": config.to_json(),
        "data": "data",
        "replica_batch_size": config.replica_batch_size,
        "view_log": [[0, list(range(config.topology.replicas))]],
        "tokens": step * config.replica_batch_size * config.model.seq_length,
        "losses": {"loss": 3.5},
        **changes,
    }


def save(root, config, step: int, replica: int, value: float | None = None, /, **changes):
    """Replica `replica` saves `step`: files of all its ranks, full of step + replica unless told otherwise."""
    folders = Checkpoints(root, replica, config.topology.replicas)
    ranks = config.topology.grid().replica_size
    folders.draft(step).mkdir(parents=True)
    for rank in range(ranks):
        write_rank(folders.draft(step), rank, content(step + replica if value is None else value, rank, ranks))
    commit(folders.draft(step), folders.folder(step), range(ranks), facts(config, step, replica, **changes))
    return folders.folder(step)
