"""Routed pipelines on real processes, against the plain composition of the stages along the same routes."""

from __future__ import annotations

import dataclasses
import zlib
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from noloco_mega import config
from noloco_mega.grid import Grid
from noloco_mega.plan.routing import IdentityRoutes, RandomRoutes
from tests.dist import reference
from tests.harness import replica_world, run_ranks

SEQ, MICRO_BATCH, EVAL = 12, 2, 5
# Generous, for a machine that is busy with other things; nothing here waits for a limit when all is well.
LINK_TIMEOUT, HANG_LIMIT = timedelta(seconds=120), 200
MODEL = config.Model(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    seq_length=SEQ,
)


VARIANT = {
    "attention_bias": "all",
    "mlp_bias": True,
    "qk_norm": True,
    "kv_channels": 16,
    "rope_scaling": config.RopeScaling(type="linear", factor=3.0),
}


class Setting(NamedTuple):
    """One thing that a layout goes through."""

    microbatches: int
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    varied: bool = False
    tied: bool = False
    variant: bool = False
    """With every part that other model families add."""

    @property
    def model(self) -> config.Model:
        changes = VARIANT if self.variant else {}
        return dataclasses.replace(MODEL, tied_embeddings=self.tied, **changes)

    def config(self, grid: Grid) -> config.Config:
        return config.Config(
            topology=config.Topology(
                replicas=grid.replicas,
                stages=grid.stages,
                tensor=grid.tensor,
                data=grid.data,
                sequence_parallel=self.sequence_parallel,
            ),
            model=self.model,
            data=config.Data(train="", valid="", tokenizer=""),
            noloco=config.Noloco(),
            run=config.Run(name="test", steps=1, eval_microbatches=EVAL),
            deepspeed={
                "train_micro_batch_size_per_gpu": MICRO_BATCH,
                "gradient_accumulation_steps": self.microbatches,
            },
        )


class Loader:
    """Random samples by index; with `varied`, of lengths that differ between samples."""

    def __init__(self, varied: bool = False) -> None:
        self.varied = varied

    def train(self, step, microbatch, replica):
        generator = torch.Generator().manual_seed(step * 10007 + microbatch * 101 + replica)
        length = SEQ + 4 * ((step + 2 * microbatch + replica) % 3) if self.varied else SEQ
        text = torch.randint(0, MODEL.vocab_size, (MICRO_BATCH, length + 1), generator=generator)
        mask = (torch.rand(MICRO_BATCH, length, generator=generator) > 0.2).float()
        return SimpleNamespace(tokens=text[:, :-1], labels=text[:, 1:].contiguous(), loss_mask=mask)

    def valid(self, microbatch, domain=None):
        return self.train(777, microbatch, 0)


class OwnTokensOnly:
    """Refuses reads that a stage has no business with."""

    def __init__(self, inner, place, stages) -> None:
        self.inner, self.place, self.stages = inner, place, stages

    def train(self, step, microbatch, replica):
        assert self.place.stage in (0, self.stages - 1), "a middle stage read a sample"
        assert self.place.stage or replica == self.place.replica, "a first stage read another replica's tokens"
        return self.inner.train(step, microbatch, replica)

    def valid(self, microbatch, domain):
        assert self.place.stage in (0, self.stages - 1), "a middle stage read a sample"
        return self.inner.valid(microbatch, domain)


class BreaksAfter:
    """Links that fail at their n-th exchange, as if their connections had gone."""

    def __init__(self, inner, exchanges) -> None:
        self.inner, self.left = inner, exchanges

    def exchange(self, sends, recvs):
        from noloco_mega.comm.links import LinkBroken

        self.left -= 1
        if self.left < 0:
            self.inner.close()
            raise LinkBroken("cut by the test")
        self.inner.exchange(sends, recvs)


class Rank:
    """One process of a test: its world, links and the settings it goes through."""

    def __init__(self, place, directory, grid) -> None:
        from noloco_mega.comm import links

        self.place, self.grid, self.directory = place, grid, directory
        self.world = replica_world(grid, place, directory, timeout_seconds=LINK_TIMEOUT.total_seconds())
        column = f"{place.data}.{place.tensor}"
        store = dist.FileStore(str(directory / f"local_{place.replica}_{column}"), grid.stages)
        self.local = links.open_links(self.world.device, store, place.stage, grid.stages, LINK_TIMEOUT)
        self.open_routed("first")

    def open_routed(self, name) -> None:
        from noloco_mega.comm import links

        place, grid = self.place, self.grid
        ranks = grid.replicas * grid.stages
        store = dist.FileStore(str(self.directory / f"{name}_{place.data}.{place.tensor}"), ranks)
        rank = place.replica * grid.stages + place.stage
        self.routed = links.open_links(self.world.device, store, rank, ranks, LINK_TIMEOUT)

    def build(self, setting):
        from noloco_mega.model import parameters, stage

        model = stage.build_stage(
            setting.model,
            setting.config(self.grid).topology,
            self.world,
            setting.dtype,
            variable_seq_lengths=setting.varied,
        )
        parameters.initialise(model, self.world, seed=7, std=0.05)
        theta0 = self.tensors(model, lambda p: p)
        # Replicas differ, so that a wrong route shows; biases and norms differ too, the same on every tensor rank.
        parameters.initialise(model, self.world, seed=100 + self.place.replica, std=0.05)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and setting.variant:
                where = parameters.parameter_slices(model, self.world)[name]
                generator = torch.Generator().manual_seed(zlib.crc32(where.name.encode()) + self.place.replica)
                noise = 0.1 * torch.randn(where.shape, generator=generator)
                with torch.no_grad():
                    for piece in where.pieces:
                        parameter[piece.local_index()] += noise[piece.whole_index()]
        return model, theta0

    def tensors(self, model, of):
        from noloco_mega.model import parameters

        where = parameters.parameter_slices(model, self.world)
        # Arrays, because a queue would hand tensors over as shared memory of a process that may have ended.
        return [(where[name], of(p).detach().float().numpy().copy()) for name, p in model.named_parameters()]

    def pipeline(self, model, setting):
        from noloco_mega.pipeline import Pipeline

        loader = OwnTokensOnly(Loader(setting.varied), self.place, self.grid.stages)
        return Pipeline(model, setting.config(self.grid), self.world, loader)

    def step(self, pipeline, model, circuit, step):
        """Losses and gradients of one inner step along a circuit, the gradients summed over a split sequence."""
        from noloco_mega.model import stage

        model.zero_grad(set_to_none=True)
        loss = pipeline.forward_backward(step, circuit)
        stage.sum_partial_gradients(model, self.world, lambda p: p.grad)
        return {
            "loss": loss.total.item(),
            "microbatches": loss.microbatches,
            "gradients": self.tensors(model, lambda p: p.grad),
        }

    def circuits(self):
        from noloco_mega.comm.routed_p2p import local_circuit, site_circuit

        members = range(self.grid.replicas)
        routes = RandomRoutes(3, list(members))
        return local_circuit(self.local), site_circuit(routes, self.routed, members, self.grid.stages)


def routed_steps(place, directory, grid, settings):
    """For each setting: weights, the results of a step along random routes, and an evaluation."""
    rank = Rank(place, directory, grid)
    local, routed = rank.circuits()
    results = []
    for number, setting in enumerate(settings):
        model, theta0 = rank.build(setting)
        pipeline = rank.pipeline(model, setting)
        result = rank.step(pipeline, model, routed, number)
        valid = pipeline.evaluate(local)
        assert model.training
        result |= {"theta0": theta0, "weights": rank.tensors(model, lambda p: p)}
        result["valid"] = (valid.total.item(), valid.microbatches)
        results.append(result)
    return results


def relative(value, expected) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


def check(grid, ranks, index, setting, step):
    """One setting's results of all ranks against the composition."""
    tolerance = 1e-5 if setting.dtype == torch.float32 else 2e-2
    of = {place: result[index] for place, result in zip(grid.places(), ranks, strict=True)}
    loader, routes = Loader(setting.varied), RandomRoutes(3, range(grid.replicas))

    def gathered(kind, replica, data):
        mine = [of[place] for place in grid.places() if (place.replica, place.data) == (replica, data)]
        return reference.assemble([part for result in mine for part in result[kind]])

    replicas = [gathered("weights", replica, 0) for replica in range(grid.replicas)]
    assert ("output_layer.weight" in replicas[0]) != setting.tied
    for data in range(grid.data):
        numbers = list(range(data, setting.microbatches * grid.data, grid.data))
        expected = reference.run(replicas, setting.model, grid.stages, routes, step, numbers, loader.train)
        for place, result in of.items():
            if place.data == data:
                last = place.stage == grid.stages - 1
                losses = expected.losses[place.replica] if last else []
                assert result["loss"] == pytest.approx(sum(losses), rel=tolerance)
                assert result["microbatches"] == len(losses)
        for replica in range(grid.replicas):
            gradients = gathered("gradients", replica, data)
            assert gradients.keys() == expected.gradients[replica].keys()
            for name, gradient in gradients.items():
                assert relative(gradient, expected.gradients[replica][name]) < tolerance, (replica, name)
    for place, result in of.items():
        numbers = range(place.data, EVAL, grid.data) if place.stage == grid.stages - 1 else ()
        own = [replicas[place.replica]]
        read = lambda _, number, __: loader.valid(number)  # noqa: E731
        expected = reference.run(own, setting.model, grid.stages, IdentityRoutes(), 0, list(numbers), read).losses[0]
        assert result["valid"] == (pytest.approx(sum(expected), rel=tolerance), len(expected))


BF16 = torch.bfloat16
LAYOUTS = [
    (Grid(replicas=4, stages=2), [Setting(1), Setting(4), Setting(3, BF16)]),
    (Grid(replicas=2, stages=4), [Setting(2), Setting(6)]),
    (Grid(replicas=3, stages=2), [Setting(4, varied=True)]),
    (
        Grid(replicas=2, stages=2, tensor=2),
        [
            Setting(3),
            Setting(3, sequence_parallel=True),
            Setting(2, BF16, sequence_parallel=True),
            Setting(2, variant=True),
            Setting(2, sequence_parallel=True, variant=True),
        ],
    ),
    (Grid(replicas=2, stages=2, data=2), [Setting(3)]),
    (Grid(replicas=1, tensor=2), [Setting(2), Setting(2, tied=True)]),
]


@pytest.mark.parametrize(("grid", "settings"), LAYOUTS, ids=["N4S2", "N2S4", "N3S2", "N2S2T2", "N2S2D2", "T2"])
def test_routed_steps_equal_the_composition(tmp_path, grid, settings):
    from noloco_mega.model import parameters

    ranks = run_ranks(routed_steps, grid, tmp_path, grid, settings, limit_seconds=HANG_LIMIT)
    for index, setting in enumerate(settings):
        check(grid, ranks, index, setting, step=index)
        # θ0 is the one of an uncut model, bit for bit, on every replica and data coordinate.
        for pair in {(place.replica, place.data) for place in grid.places()}:
            mine = [r[index] for p, r in zip(grid.places(), ranks, strict=True) if (p.replica, p.data) == pair]
            for name, tensor in reference.assemble([part for result in mine for part in result["theta0"]]).items():
                whole = torch.empty(tensor.shape, dtype=setting.dtype)
                parameters.fill(whole, parameters.slices_of(name, tensor.shape, 0, 1), 7, 0.05, MODEL.num_layers)
                assert torch.equal(tensor, whole.float()), name


def fixed_steps(place, directory, grid):
    """The ordinary pipeline through our links and through the stock communicator."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from noloco_mega.pipeline import Pipeline

    class Stock(P2PCommunicator):
        failure = None

        def begin(self, step, circuit):
            pass

    rank = Rank(place, directory, grid)
    local, _ = rank.circuits()
    setting = Setting(5)
    results = []
    for stock in (False, True):
        model, _ = rank.build(setting)
        pipeline = Pipeline(model, setting.config(grid), rank.world, Loader())
        if stock:
            pipeline._communicator = Stock(rank.world.pipeline, model.config)
        loss = pipeline.forward_backward(0, local)
        results.append((loss.total.item(), rank.tensors(model, lambda p: p.grad)))
    return results


def test_fixed_routing_is_bitwise_the_stock_pipeline(tmp_path):
    grid = Grid(replicas=1, stages=4)
    for ours, stock in run_ranks(fixed_steps, grid, tmp_path, grid, limit_seconds=HANG_LIMIT):
        assert ours[0] == stock[0]
        for (_, mine), (_, theirs) in zip(ours[1], stock[1], strict=True):
            assert np.array_equal(mine, theirs)


def broken_steps(place, directory, grid, cut):
    """A routed step whose links fail on rank `cut` alone, then the same step along identity routes, then again along
    new links."""
    from noloco_mega.comm.links import LinkBroken
    from noloco_mega.comm.routed_p2p import Circuit

    rank = Rank(place, directory, grid)
    local, routed = rank.circuits()
    setting = Setting(4)
    model, _ = rank.build(setting)
    pipeline = rank.pipeline(model, setting)
    expected = rank.step(pipeline, model, local, 0), rank.step(pipeline, model, routed, 0)
    broken = False
    links = BreaksAfter(rank.routed, 3) if place == cut else rank.routed
    try:
        rank.step(pipeline, model, Circuit(routed.routes, links, routed.link_rank), 0)
    except LinkBroken:
        broken = True
    alone = rank.step(pipeline, model, local, 0)
    rank.open_routed("second")
    again = rank.step(pipeline, model, rank.circuits()[1], 0)
    for after, before in ((alone, expected[0]), (again, expected[1])):
        assert after["loss"] == before["loss"]
        for (_, one), (_, other) in zip(after["gradients"], before["gradients"], strict=True):
            assert np.array_equal(one, other)
    return broken


@pytest.mark.parametrize("grid", [Grid(replicas=2, stages=4), Grid(replicas=2, stages=2, tensor=2)], ids=str)
def test_a_broken_link_ends_the_step_everywhere_and_the_step_can_be_redone(tmp_path, grid):
    cut = grid.place(grid.tensor)
    broken = run_ranks(broken_steps, grid, tmp_path, grid, cut, limit_seconds=HANG_LIMIT)
    # Tensor siblings of the broken link finish their schedule (on links of their own, which are whole).
    assert broken == [place.tensor == 0 for place in grid.places()]
