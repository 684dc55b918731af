"""How does a model go into a Hugging Face folder, and out of one? Tensor by tensor, by the table in model/hf.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from noloco_mega import config as configs
from noloco_mega import streamed
from noloco_mega.checkpoint.format import MANIFEST
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data import tokenizer_json
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.model import hf
from noloco_mega.model.hf import ConversionError
from noloco_mega.streamed import Planned

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Buffers that old files hold and that are computed from config.json.
COMPUTED = (".rotary_emb.inv_freq",)
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {title}

{story}

| | |
|---|---|
{facts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```
{run}"""


@dataclass(frozen=True)
class Source:
    """Weights to export, already chosen or merged: `planned` what there is, `tensor` one of them, unsharded."""

    model: configs.Model
    planned: Sequence[Planned]
    tensor: Callable[[str], torch.Tensor]
    story: str
    """A sentence for the model card: which run, which step, which replicas."""
    run: Mapping[str, Any] | None = None
    """The run's configuration, as JSON."""
    facts: Mapping[str, Any] | None = None
    """Lines of the model card's table."""


def export(
    source: Source,
    output: Path,
    *,
    tokenizer: Tokenizer,
    architecture: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tie: bool | None = None,
) -> list[str]:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; remarks for the user.

    `tie`: whether an output layer equal to the embedding is written as a tied one; None: where they are equal. Raises
    ValueError where the model has no equal in transformers, the tokenizer does not fit, or a weight is not finite;
    nothing is left at `output` then.
    """
    model = source.model
    chosen = hf.fitting(model, architecture)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConversionError(
            f"the tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, the model's embedding only "
            f"{model.vocab_size} rows; give the tokenizer that the model was trained with"
        )
    dtypes = {plan.name: plan.dtype for plan in source.planned}
    _compare_names({row.ours for row in hf.table(model)}, set(dtypes), "the checkpoint")
    dtype = _only_dtype(dtypes.values())
    tied, remarks = _tied(source, tie)
    rows = [row for row in hf.table(model) if not (tied and row == hf.OUTPUT)]
    planned = [
        Planned(name, shape, dtype)
        for row in rows
        for name, shape in zip(row.theirs, hf.shapes(row, model)[1], strict=True)
    ]

    def tensors() -> Iterator[torch.Tensor]:
        for row in rows:
            yield from hf.split(row, _finite(row.ours, source.tensor(row.ours)), model)

    with streamed.new_folder(output) as draft:
        _write_hub_weights(draft, planned, tensors(), max_shard_bytes, output.name)
        name = str(dtype).removeprefix("torch.")
        fields = hf.config_json(model, chosen, tied=tied, dtype=name)
        fields |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
        _write_json(draft / "config.json", fields)
        ends = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
        _write_json(draft / "generation_config.json", {key: value for key, value in ends.items() if value is not None})
        tokenizer_json.write(tokenizer.path, draft, model.seq_length)
        facts = {
            "architecture": chosen.class_name,
            "parameters": f"{sum(plan.size_bytes for plan in planned) // dtype.itemsize:,}",
            "dtype": name,
            "context": f"{model.seq_length} tokens",
            "tokenizer": f"{tokenizer.vocab_size} tokens, SHA-256 {tokenizer.digest[:16]}…",
            **(source.facts or {}),
        }
        (draft / "README.md").write_text(_card(output.name, source, facts))
    return remarks


def _write_hub_weights(
    folder: Path, planned: Sequence[Planned], tensors: Iterator[torch.Tensor], max_bytes: int, title: str
) -> None:
    shards = streamed.into_shards(planned, max_bytes)
    with streamed.progress(title, planned) as advance:
        if len(shards) == 1:
            streamed.write_shard(folder / WEIGHTS, planned, tensors, advance)
            return
        places: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            streamed.write_shard(folder / file, shard, tensors, advance)
            places |= {plan.name: file for plan in shard}
    total = sum(plan.size_bytes for plan in planned)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _tied(source: Source, tie: bool | None) -> tuple[bool, list[str]]:
    """Whether to write one matrix for both embeddings, and what to tell about it."""
    if source.model.tied_embeddings:
        return True, []
    if tie is False:
        return False, []
    equal = torch.equal(source.tensor(hf.EMBEDDING.ours), source.tensor(hf.OUTPUT.ours))
    if tie and not equal:
        return False, ["the embeddings were tied when they were imported and are no longer equal: written untied"]
    return equal, ["input and output embedding are equal: written tied"] if equal else []


def _card(title: str, source: Source, facts: Mapping[str, Any]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    run = ""
    if source.run is not None:
        run = f"\nThe run's configuration:\n\n```json\n{json.dumps(source.run, indent=1)}\n```\n"
    return CARD.format(title=title, story=source.story, facts=rows, run=run)


class HubFolder:
    """The safetensors weights of a Hugging Face folder, read tensor by tensor.

    Raises ConversionError for a folder without them, or with files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Path] = {}
        if (self.folder / INDEX).exists():
            places = json.loads((self.folder / INDEX).read_text())["weight_map"]
            files = sorted(set(places.values()))
        elif (self.folder / WEIGHTS).exists():
            places, files = None, [WEIGHTS]
        else:
            raise ConversionError(
                f"{folder} holds neither {WEIGHTS} nor {INDEX}; pickled weights (.bin) are not read: load them with "
                "transformers and save_pretrained them as safetensors"
            )
        self.planned: dict[str, Planned] = {}
        for file in files:
            with self._open(self.folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    if name.endswith(COMPUTED):
                        continue
                    view = opened.get_slice(name)
                    dtype = streamed.DTYPES.get(view.get_dtype())
                    if dtype is None:
                        raise ConversionError(f"{self.folder / file}: {name} is {view.get_dtype()}, not a float dtype")
                    self.planned[name] = Planned(name, tuple(view.get_shape()), dtype)
                    self._files[name] = self.folder / file
        if places is not None:
            _compare_names({name for name in places if not name.endswith(COMPUTED)}, set(self.planned), str(folder))

    def tensor(self, name: str) -> torch.Tensor:
        with self._open(self._files[name]) as opened:
            return opened.get_tensor(name)

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        try:
            with safe_open(path, "pt") as opened:
                yield opened
        except ConversionError:
            raise
        except Exception as error:  # safetensors raises its own, undocumented kinds
            raise ConversionError(f"{path} can't be read: {error}") from error


class HubModel:
    """A Hugging Face folder as the model that it holds: our tensors by our names, each made when it is asked for.

    Raises ConversionError naming what is missing, has the wrong shape or is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.described = hf.read_config(folder)
        self._source = HubFolder(folder)
        model, tied = self.described.model, self.described.tied
        self._rows = {row.ours: row for row in hf.table(model)}
        expected = {
            name: shape
            for row in self._rows.values()
            if not (tied and row == hf.OUTPUT)
            for name, shape in zip(row.theirs, hf.shapes(row, model)[1], strict=True)
        }
        held = self._source.planned
        _compare_names(set(expected), set(held) - (set(hf.OUTPUT.theirs) if tied else set()), str(folder))
        for name, shape in expected.items():
            if held[name].shape != shape:
                raise ConversionError(
                    f"{folder}: {name} has the shape {list(held[name].shape)}, config.json makes it {list(shape)}"
                )
        self.dtype = _only_dtype(held[name].dtype for name in expected)

    def tensor(self, name: str) -> torch.Tensor:
        """Our tensor of this name. Raises ConversionError if it is not finite."""
        row = self._rows[name]
        theirs = hf.EMBEDDING.theirs if self.described.tied and row == hf.OUTPUT else row.theirs
        return hf.join(row, [_finite(name, self._source.tensor(name)) for name in theirs], self.described.model)


def import_model(folder: Path, output: Path, *, max_shard_bytes: int = 5 * 10**9) -> tuple[configs.Model, list[str]]:
    """Write the weights of a Hugging Face folder as a folder that `run.init_from` starts from; the model's
    configuration, and remarks for the user.

    The tokenizer's files go to OUTPUT/tokenizer. Raises ConversionError naming what is missing, has the wrong shape, is
    not finite or is not supported; nothing is left at `output` then.
    """
    hub = HubModel(folder)
    described, model = hub.described, hub.described.model
    planned = [Planned(row.ours, hf.shapes(row, model)[0], hub.dtype) for row in hf.table(model)]
    tensors = (hub.tensor(plan.name) for plan in planned)
    origin = {"architecture": described.architecture.model_type, "tied": described.tied, "folder": str(folder)}
    facts = {"step": 0, "replica": 0, "model": asdict(model), "huggingface": origin}
    remarks = []
    with streamed.new_folder(output) as draft:
        streamed.write_weights(draft, planned, tensors, facts, max_shard_bytes, folder.name)
        if tokenizer_json.copy(folder, draft / "tokenizer"):
            size = Tokenizer(draft / "tokenizer").vocab_size
            if size > model.vocab_size:
                raise ConversionError(
                    f"{folder}: its tokenizer has {size} tokens, its embedding {model.vocab_size} rows"
                )
        else:
            remarks.append(f"{folder} holds no tokenizer that can be used: name one in data.tokenizer")
    if described.tied:
        remarks.append("the embeddings were tied; the run trains an output layer of its own, which starts equal")
    return model, remarks


def origin_of(weights: SavedReplica) -> Mapping[str, Any]:
    """What is known of the Hugging Face model that weights were imported from, themselves or through run.init_from."""
    if "huggingface" in weights.manifest:
        return weights.manifest["huggingface"]
    before = weights.manifest.get("config", {}).get("run", {}).get("init_from")
    return origin_of(SavedReplica(Path(before))) if before and (Path(before) / MANIFEST).exists() else {}


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(tensor)  # NaN if there is one; no mask of the tensor's size is made
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ConversionError(f"{name} holds values that are not finite; nothing was written")
    return tensor


def _only_dtype(dtypes: Any) -> torch.dtype:
    found = set(dtypes)
    if len(found) > 1:
        raise ConversionError(f"the weights are of different dtypes, {', '.join(map(str, found))}: convert them first")
    return found.pop()


def _compare_names(expected: set[str], found: set[str], where: str) -> None:
    """Raise ConversionError naming the tensors that are missing or that nothing here would read."""
    for names, complaint in ((expected - found, "lacks"), (found - expected, "holds, and its config does not have,")):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ConversionError(f"{where} {complaint} {len(names)} tensors: {some}{', …' if len(names) > 3 else ''}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
