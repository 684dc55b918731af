"""Which weights come out of several replicas, and how good are they? Read one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from noloco_mega import config as configs
from noloco_mega.checkpoint.format import MANIFEST, CheckpointError
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.loader import Loader
from noloco_mega.model.whole import whole_model
from noloco_mega.streamed import Planned


def weights_of(folder: Path) -> list[SavedReplica]:
    """The weights in `folder`: one replica's, or all replicas' of a run, final or of one step's checkpoint.

    Raises ValueError if there are none.
    """
    many = (sorted(folder.glob(pattern)) for pattern in ("replica_*/weights", "replica_*"))
    for folders in ([folder], [folder / "weights"], *many):
        if folders and all((inside / MANIFEST).exists() for inside in folders):
            return [SavedReplica(inside) for inside in folders]
    raise ValueError(f"{folder} is no folder of weights, and holds no replica_*/weights: not a finished run")


def model_of(weights: SavedReplica) -> configs.Model:
    """The model that these weights are for. Raises CheckpointError where the manifest does not say."""
    run = weights.manifest.get("config")
    block = run["model"] if run else weights.manifest.get("model")
    if block is None:
        raise CheckpointError(f"{weights.folder} does not say which model it holds")
    return TypeAdapter(configs.Model).validate_json(json.dumps(block))


def run_of(weights: SavedReplica) -> configs.Config | None:
    """The run that these weights come from; None for imported ones."""
    raw: dict[str, Any] | None = weights.manifest.get("config")
    return None if raw is None else configs.parse(raw)


def differences(one: configs.Model, other: configs.Model, ignored: Sequence[str] = ()) -> list[str]:
    """The fields in which two models differ, with both values; a default written out is no difference."""

    def value(model: configs.Model, name: str) -> Any:
        if name == "num_query_groups":
            return model.num_query_groups or model.num_attention_heads
        if name == "kv_channels":
            return model.kv_channels or model.hidden_size // model.num_attention_heads
        return getattr(model, name)

    return [
        f"{field.name}: {value(one, field.name)} against {value(other, field.name)}"
        for field in fields(one)
        if field.name not in ignored and value(one, field.name) != value(other, field.name)
    ]


def refuse_other_models(replicas: Sequence[SavedReplica]) -> None:
    """Raise ValueError, naming two folders and what differs, unless all weights are of one model."""
    for other in replicas[1:]:
        unlike = differences(model_of(other), model_of(replicas[0]))
        if unlike:
            raise ValueError(f"{other.folder} holds another model than {replicas[0].folder}: {'; '.join(unlike)}")


def refuse_mixture(replicas: Sequence[SavedReplica]) -> None:
    """Raise ValueError, naming two folders and what differs, unless all weights are of one run and step."""
    refuse_other_models(replicas)
    one = _origin(replicas[0].manifest)
    for weights in replicas[1:]:
        other = _origin(weights.manifest)
        keys = [key for key in one | other if one.get(key) != other.get(key)]
        if keys:
            told = "; ".join(f"{key}: {other.get(key)} against {one.get(key)}" for key in keys[:5])
            raise ValueError(f"{weights.folder} is not of the run and step of {replicas[0].folder}: {told}")


def _origin(manifest: dict[str, Any]) -> dict[str, Any]:
    """What all replicas' weights of one run and step have in common; paths and logging may differ."""
    config: dict[str, Any] = manifest.get("config") or {}
    origin = {"step": manifest.get("step"), "token files": manifest.get("data")}
    origin |= {f"run.{key}": config["run"].get(key) for key in ("name", "seed", "steps") if config}
    for block, settings in config.items():
        if block in ("run", "data"):
            continue
        if isinstance(settings, dict):
            origin |= {f"{block}.{key}": value for key, value in settings.items()}
        else:
            origin[block] = settings
    return origin


def planned(weights: SavedReplica) -> list[Planned]:
    """What these weights hold, in the order of the model, without reading it."""
    return [Planned(name, weights.shape(name), weights.dtype(name)) for name in weights.names]


def weighted_tensor(replicas: Sequence[SavedReplica], factors: Sequence[float], name: str) -> torch.Tensor:
    """Σ factor·tensor over replicas of one parameter, accumulated in fp32 in their order, in the parameter's dtype.

    `factors` add up to 1. Holds two tensors at a time.
    """
    total: torch.Tensor | None = None
    dtype = torch.float32
    for weights, factor in zip(replicas, factors, strict=True):
        part = weights.tensor(name)
        dtype = part.dtype
        part = part.float() * factor
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def deviation(replicas: Sequence[SavedReplica]) -> float:
    """sqrt(mean_i ‖θ_i − θ̄‖²) / ‖θ̄‖ over all parameters; 0 for one replica."""
    squares = norm = 0.0
    for name in replicas[0].names:
        mean = sum(weights.tensor(name).double() for weights in replicas) / len(replicas)
        assert isinstance(mean, torch.Tensor)
        for weights in replicas:
            squares += float((weights.tensor(name).double() - mean).square().sum()) / len(replicas)
        norm += float(mean.square().sum())
    return math.sqrt(squares / norm)


@torch.no_grad()
def loss_of(
    config: configs.Config, loader: Loader, tensor_of: Callable[[str], torch.Tensor], domain: str | None = None
) -> float:
    """Nats per token over the run's validation samples, or over those of one of data.valid_domains."""
    total = 0.0
    with whole_model(config.model, tensor_of) as model:
        device = next(model.parameters()).device
        for microbatch in range(config.run.eval_microbatches):
            batch = loader.valid(microbatch, domain)
            losses = model(batch.tokens.to(device), None, None, labels=batch.labels.to(device))
            mask = batch.loss_mask.to(device)
            total += float((losses * mask).sum() / mask.sum())
    return total / config.run.eval_microbatches
