"""Imported weights on 2 x 2 ranks: their logits against transformers', and the way back, bit for bit."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from noloco_mega import config, convert, merging
from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.checkpoint.weights import save_weights
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.grid import Grid, Place
from noloco_mega.model import hf, parameters
from tests import corpus
from tests.harness import replica_world, run_ranks
from tests.unit.test_hf import TOKENS, hub_logits, hub_model
from tools import convert_to_hf

GRID = Grid(replicas=1, stages=2, tensor=2)


def settings(model, folder):
    return config.Config(
        topology=config.Topology(replicas=1, stages=2, tensor=2),
        model=model,
        data=config.Data(train="", valid="", tokenizer=""),
        noloco=config.Noloco(),
        run=config.Run(name="test", steps=1, init_from=str(folder)),
    )


def forward_and_save(place, directory, folder, output):
    """Start from `folder`, give the last stage's part of the logits [B, S, V/T], save to `output`."""
    from noloco_mega import start
    from noloco_mega.model.stage import build_stage

    model = merging.model_of(SavedReplica(folder))
    run = settings(model, folder)
    world = replica_world(GRID, place, directory)
    stage = build_stage(model, run.topology, world, torch.float32).eval()
    start.initial_weights(stage, world, run)
    logits = None
    with torch.no_grad():
        if place.stage == 0:
            hidden = stage(TOKENS, None, None)
            dist.send(hidden.contiguous(), GRID.replica_rank(Place(0, 0, 1, place.tensor)))
        else:
            hidden = torch.empty(TOKENS.shape[1], TOKENS.shape[0], model.hidden_size)
            dist.recv(hidden, GRID.replica_rank(Place(0, 0, 0, place.tensor)))
            stage.set_input_tensor(hidden)
            logits = stage(TOKENS, None, None).numpy()
    slices = parameters.parameter_slices(stage, world)
    facts = {"step": 0, "replica": 0, "model": asdict(model)}
    save_weights(output, dict(stage.named_parameters()), slices, world, facts)
    unlike = replace(model, num_attention_heads=4, norm_epsilon=1e-3)
    with pytest.raises(CheckpointError, match="num_attention_heads: 4 against 8; norm_epsilon: 0.001 against 1e-06"):
        start.initial_weights(stage, world, settings(unlike, folder))
    return logits


def check_family(tmp_path, family):
    hub_model(family, tmp_path / "hub")
    convert.import_model(tmp_path / "hub", tmp_path / "ours")
    parts = run_ranks(forward_and_save, GRID, tmp_path, tmp_path / "ours", tmp_path / "saved")
    found = np.concatenate([part for part in parts if part is not None], -1)
    assert np.abs(found - hub_logits(tmp_path / "hub").numpy()).max() < 1e-4
    tokenizer = corpus.write_tokenizer(tmp_path / "t.model", corpus.texts(300))
    source = convert_to_hf.source_of([SavedReplica(tmp_path / "saved")])
    kind = hf.read_config(tmp_path / "hub").architecture.model_type
    convert.export(source, tmp_path / "again", tokenizer=Tokenizer(tokenizer), architecture=kind)
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("hub", "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_imported_weights_on_two_by_two_ranks(tmp_path):
    check_family(tmp_path, "qwen3_bias")
