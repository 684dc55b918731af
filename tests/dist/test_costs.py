"""The predicted sizes against those of real engines: every tensor is counted where it lies."""

from dataclasses import replace

import pytest
import torch

from noloco_mega import costs
from noloco_mega.grid import Grid
from tests.dist.test_engine import make_config, make_stage, run_schedule
from tests.harness import replica_world, run_ranks


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


EVERY_VARIANT = {"attention_bias": "all", "mlp_bias": True, "qk_norm": True}


def _config(grid, bf16, variant):
    config = make_config(grid, bf16=bf16)
    return replace(config, model=replace(config.model, **variant))


def _measure(place, directory, grid, bf16, variant):
    """What a rank's engine holds after one inner step, and what a forward pass of one microbatch keeps."""
    from types import SimpleNamespace

    from noloco_mega.engine import deepspeed as engines
    from noloco_mega.engine.weights import Masters
    from noloco_mega.outer.noloco import NoLoCo

    world = replica_world(grid, place, directory)
    settings = _config(grid, bf16, variant)
    model = make_stage(settings, world)
    engine = engines.build_engine(model, settings, world)
    engines.begin(engine)
    run_schedule(engine.module, 0, place.data, world)
    accumulated = [p.grad for p in model.parameters() if p.grad is not None]
    if bf16:
        accumulated = list(engine.optimizer.fp32_groups_gradients_flat)
    engines.apply(engine, world)
    masters = Masters(engine)
    state = engine.basic_optimizer.state
    outer = NoLoCo(masters, settings.noloco, SimpleNamespace(replica=0))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": _bytes(model.parameters()),
        "accumulated": _bytes(accumulated),
        "masters": _bytes(masters.tensors),
        "adam": _bytes(state[master][key] for master in masters.tensors for key in ("exp_avg", "exp_avg_sq")),
        "phi": _bytes(outer.phi),
        "delta": _bytes(outer.delta),
        "kept": _kept(model) if grid.stages == 1 else None,
    }


def _kept(model):
    """Bytes that autograd keeps of one microbatch, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tokens = torch.randint(64, (2, 16))
        loss = model(tokens, None, None, labels=tokens)
    assert loss.shape == (2, 16)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    "grid, bf16, variant",
    [
        (Grid(replicas=1, data=2, tensor=2), True, {}),
        (Grid(replicas=1, stages=2, tensor=2), False, {}),
        (Grid(replicas=1, tensor=2), False, EVERY_VARIANT),
        (Grid(replicas=1), True, EVERY_VARIANT),
    ],
)
def test_predicted_sizes_are_those_of_an_engine(grid, bf16, variant, tmp_path):
    config = _config(grid, bf16, variant)
    measured = run_ranks(_measure, grid, tmp_path, grid, bf16, variant)
    for place, found in zip(grid.places(), measured, strict=True):
        held = costs.memory(config, place.stage, on_gpu=False)
        assert found["parameters"] == costs.stage_parameters(config, place.stage)
        assert found["weights"] == held.weights
        assert found["accumulated"] == 4 * found["parameters"] <= held.gradients
        # DeepSpeed pads the partitions to a few elements per rank.
        for name in ("masters", "adam", "phi", "delta"):
            assert getattr(held, name) <= found[name] <= getattr(held, name) * 1.01, name
        if found["kept"] is not None:
            assert held.activations == pytest.approx(found["kept"], rel=0.05)
    whole = _config(Grid(replicas=1), bf16, variant)
    assert costs.model_parameters(config) == costs.stage_parameters(whole, 0)
