"""What are the weights at step 0? Drawn from the run's seed, or read from a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.comm.groups import ReplicaWorld
from noloco_mega.config import Config
from noloco_mega.merging import differences, model_of
from noloco_mega.model import parameters

# What a run may choose for itself without changing what the weights compute.
OWN_CHOICE = ("seq_length", "init_method_std")


@torch.no_grad()
def initial_weights(model: GPTModel, world: ReplicaWorld, config: Config, *, resumed: bool = False) -> None:
    """Write θ0 into a stage's parameters: the same on every replica, whatever T, S and D are.

    A run that is `resumed` draws them from the seed, and its checkpoint will replace them; otherwise with
    run.init_from this rank's slices are taken out of that folder's tensors, one tensor at a time. Raises
    CheckpointError where the folder is damaged or holds another model, naming the fields that differ.
    """
    if config.run.init_from is None or resumed:
        parameters.initialise(model, world, config.run.seed, config.model.init_method_std)
        return
    weights = SavedReplica(Path(config.run.init_from))
    unlike = differences(config.model, model_of(weights), OWN_CHOICE)
    if unlike:
        raise CheckpointError(
            f"run.init_from {config.run.init_from} holds another model than the config describes: {'; '.join(unlike)} "
            "(the config's value first); change the config's model block"
        )
    slices = parameters.parameter_slices(model, world)
    for local_name, parameter in model.named_parameters():
        where = slices[local_name]
        shape = weights.shape(where.name)
        if shape != where.shape:
            raise CheckpointError(f"{weights.folder}: {where.name} has the shape {shape}, not {where.shape}")
        for piece in where.pieces:
            parameter[piece.local_index()].copy_(weights.box(where.name, weights.weight_kind, piece.whole))
