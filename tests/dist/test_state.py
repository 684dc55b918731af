"""The state of a rank, saved under one topology and loaded under others: every tensor, every bit.

The reference is the unsharded tensors themselves, drawn by name, and where the model's own definition cuts them.
"""

import zlib

import pytest
import torch

from noloco_mega import config
from noloco_mega.grid import Grid
from tests.harness import replica_world, run_ranks

MODEL = {
    "vocab_size": 256, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "num_query_groups": 4,
    "ffn_hidden_size": 48, "seq_length": 16,
}  # fmt: skip
FLAT = ["master", "exp_avg", "exp_avg_sq", "outer.phi", "outer.delta"]
SAVED = Grid(replicas=1, stages=2, tensor=2)
OTHERS = {
    "1x1": Grid(replicas=1),
    "1x4": Grid(replicas=1, tensor=4),
    "2x1": Grid(replicas=1, stages=2),
    "data": Grid(replicas=1, stages=2, data=2),
    "tensor-data": Grid(replicas=1, tensor=2, data=2),
    "same": SAVED,
}


def reference(kind, name, shape):
    """The unsharded tensor of a kind; some are negative zeros, which must stay such."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    values = torch.randn(shape, generator=generator)
    values[values.abs() < 0.05] = -0.0
    return values


def make_config(grid, bf16):
    return config.parse(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "bf16": {"enabled": bf16},
            "topology": {"replicas": 1, "stages": grid.stages, "tensor": grid.tensor, "data": grid.data},
            "model": MODEL,
            "data": {"train": "-", "valid": "-", "tokenizer": "-"},
            "noloco": {},
            "run": {"name": "test", "steps": 5},
        }
    )


class Alone:
    """Peers of a replica that exchanges with nobody."""

    replica = 0


def _build(grid, place, directory, name, bf16):
    from noloco_mega.checkpoint.state import RankState
    from noloco_mega.engine import deepspeed as engines
    from noloco_mega.model import parameters
    from noloco_mega.model.stage import build_stage
    from noloco_mega.outer.hook import attach

    world = replica_world(grid, place, directory, name=name)
    settings = make_config(grid, bf16)
    model = build_stage(settings.model, settings.topology, world, torch.bfloat16 if bf16 else torch.float32)
    parameters.initialise(model, world, 1, 0.02)
    engine = engines.build_engine(model, settings, world)
    outer = attach(engine, settings, Alone())
    return settings, world, engine, outer, RankState(engine, outer, world)


def _draw(engine, outer, world):
    """Fill the state with the reference, at the places where θ0's definition would put it."""
    from noloco_mega.engine.weights import Masters
    from noloco_mega.model.parameters import parameter_slices

    masters = Masters(engine)
    (master,) = masters.tensors
    inner = engine.basic_optimizer.state[master]
    inner |= {"step": torch.tensor(7.0), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
    phi, delta = outer.optimizer.phi[0], outer.optimizer.delta[0]
    live = dict(zip(FLAT, (master, inner["exp_avg"], inner["exp_avg_sq"], phi, delta), strict=True))
    slices = parameter_slices(engine.module, world)
    shapes = {name: parameter.shape for name, parameter in engine.module.named_parameters()}
    for kind, tensor in live.items():
        for segment in masters.segments():
            where = slices[segment.parameter]
            local = torch.empty(shapes[segment.parameter])
            for piece in where.pieces:
                local[piece.local_index()] = reference(kind, where.name, where.shape)[piece.whole_index()]
            part = local.flatten()[segment.parameter_offset : segment.parameter_offset + segment.numel]
            with torch.no_grad():
                tensor[segment.master_offset : segment.master_offset + segment.numel] = part
    outer.step, outer.outer_step, engine.global_steps = 7, 3, 7
    masters.publish()


def _write(folder, state, settings, world, losses):
    import torch.distributed as dist

    from noloco_mega.checkpoint.format import commit, write_rank

    rank, size = world.grid.replica_rank(world.place), world.grid.replica_size
    draft = folder.with_name(folder.name + ".draft")
    draft.mkdir(exist_ok=True)
    write_rank(draft, rank, state.collect(losses))
    dist.barrier()
    if rank == 0:
        commit(draft, folder, range(size), {"step": 7, "config": settings.to_json()})
    dist.barrier()


def _cycle(place, directory, bf16):
    """Save under one topology; load under each other one and save again. Ranks outside a topology wait."""
    from noloco_mega.checkpoint.reader import SavedReplica
    from noloco_mega.comm import groups

    rank = place
    settings, world, engine, outer, state = _build(SAVED, SAVED.place(rank), directory, "first", bf16)
    torch.manual_seed(123 + rank)
    _draw(engine, outer, world)
    last = world.place.stage == SAVED.stages - 1
    _write(directory / "saved", state, settings, world, [(2.5, 1), (0.25, 1)] if last else [(0.0, 0)])
    drawn = torch.rand(3)
    groups.stop_replica()
    answers = {}
    for name, grid in OTHERS.items():
        if rank >= grid.replica_size:
            continue
        settings, world, engine, outer, state = _build(grid, grid.place(rank), directory, name, bf16)
        losses = state.restore([SavedReplica(directory / "saved")])
        state.publish()
        _write(directory / name, state, settings, world, losses)
        weights = {n: p.detach().float() for n, p in engine.module.named_parameters()}
        from noloco_mega.model.parameters import parameter_slices

        where = parameter_slices(engine.module, world)
        for local, weight in weights.items():
            for piece in where[local].pieces:
                whole = reference("master", where[local].name, where[local].shape)[piece.whole_index()]
                dtype = torch.bfloat16 if bf16 else torch.float32
                assert torch.equal(weight[piece.local_index()], whole.to(dtype).float()), (name, local)
        counters = (outer.step, outer.outer_step, engine.global_steps)
        steps = [float(s["step"]) for s in engine.basic_optimizer.state.values()]
        answers[name] = (losses, counters, steps, bool(torch.equal(torch.rand(3), drawn)))
        groups.stop_replica()
    return answers


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_any_topology_takes_over_every_bit(tmp_path, bf16):
    from noloco_mega.checkpoint.reader import SavedReplica

    answers = run_ranks(_cycle, 4, tmp_path, bf16, limit_seconds=200)
    shapes = {}
    for name in ["saved", *OTHERS]:
        saved = SavedReplica(tmp_path / name)
        assert sorted(saved.kinds) == sorted(FLAT) and len(saved.names) == 4 * 6 + 3
        for parameter in saved.names:
            for kind in FLAT:
                mine = saved.tensor(parameter, kind)
                theirs = reference(kind, parameter, mine.shape)
                assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), (name, parameter, kind)
            shapes.setdefault(parameter, set()).add(tuple(mine.shape))
    assert all(len(each) == 1 for each in shapes.values())
    for name, grid in OTHERS.items():
        # Σ total and Σ count over a replica give the journal's mean.
        losses = [loss for rank in range(grid.replica_size) for loss in answers[rank][name][0]]
        assert sum(total for total, _ in losses) / sum(count for _, count in losses) == 2.75 / 2
        assert sum(total for total, _ in losses) == 2.75 * grid.tensor, "and weigh as much beside the losses to come"
        for rank in range(grid.replica_size):
            _, counters, steps, same_random = answers[rank][name]
            assert counters == (7, 3, 7) and steps == [7.0]
            assert same_random == (name == "same"), "generators are taken over by ranks of the same topology"
