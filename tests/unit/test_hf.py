"""Hugging Face folders in and out, against transformers' own models."""

import json
import shutil
import zlib
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from noloco_mega import convert, merging, streamed
from noloco_mega.checkpoint.format import CheckpointError, RankContent, Span, Stored, commit, content_crc, write_rank
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.config import Model, RopeScaling
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.model import hf, parameters
from noloco_mega.model.hf import ConversionError
from noloco_mega.model.whole import whole_model
from tests import corpus
from tests.unit.test_parameters import megatron_cut
from tools import convert_from_hf, convert_to_hf

SHAPE = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# One of the frequencies of heads of 16 lies between those that are kept and those that are divided.
LLAMA3["original_max_position_embeddings"] = 64
FAMILIES = {
    "llama": {"num_key_value_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "llama3": {"head_dim": 16, "attention_bias": True, "mlp_bias": True,
               "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "llama_linear": {"tie_word_embeddings": True,
                     "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_bias": {"head_dim": 32, "attention_bias": True},
}  # fmt: skip
TYPES = {name: name.split("_")[0].replace("llama3", "llama") for name in FAMILIES}
TOKENS = torch.randint(0, 384, (2, 80), generator=torch.Generator().manual_seed(1))


def randomise(named):
    """Every weight, biases and norms too, so that none of them may be lost unseen."""
    for name, tensor in named:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + ("norm" in name))


def hub_model(family, folder, dtype=torch.float32):
    import transformers

    settings = transformers.AutoConfig.for_model(TYPES[family], **SHAPE | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(settings)
    randomise(model.named_parameters())
    model.to(dtype).save_pretrained(folder)
    return folder


def hub_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def own_logits(model, tensor_of):
    with whole_model(model, tensor_of) as whole, torch.no_grad():
        return whole(TOKENS, None, None)


def write_cut(folder, model, tensors, size, stages, kind="weight", **facts):
    """A replica's weights as T x S ranks save them, cut by the rules of megatron-core's layers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f"{folder.name}.draft")
    draft.mkdir()
    for tensor in range(size):
        for stage in range(stages):
            held = {}
            for name, whole in tensors.items():
                layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else None
                mine = layer // (model.num_layers // stages) if layer is not None else None
                mine = {"embedding": 0, "decoder": stages - 1, "output_layer": stages - 1}.get(
                    name.split(".")[0]) if mine is None else mine  # fmt: skip
                if mine == stage:
                    part = megatron_cut(name, whole, tensor, size).contiguous()
                    held[parameters.slices_of(name, tuple(part.shape), tensor, size)] = part
            content = RankContent(
                tensors=[Stored(key=w.name, kind=kind, tensor=part, layout=w.name) for w, part in held.items()],
                layouts={w.name: [Span(w.name, 0, 0, part.numel())] for w, part in held.items()},
                slices=list(held),
                numbers={},
            )
            write_rank(draft, stage * size + tensor, content)
    commit(draft, folder, range(size * stages), {"step": 7, "replica": 0, "model": asdict(model), **facts})
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("t") / "t.model", corpus.texts(300))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A folder that transformers saved, and the weights imported from it."""
    folder = tmp_path_factory.mktemp(request.param)
    hub_model(request.param, folder / "hub")
    model, _ = convert.import_model(folder / "hub", folder / "ours", max_shard_bytes=100_000)
    return request.param, folder, model


def test_imported_models_give_transformers_logits(family):
    _, folder, model = family
    ours = SavedReplica(folder / "ours")
    assert len(list((folder / "ours").glob("rank_*.safetensors"))) > 1
    difference = (own_logits(model, ours.tensor) - hub_logits(folder / "hub")).abs().max()
    assert difference < 1e-4


def test_exported_models_give_our_logits_from_any_cut(family, tokenizer, tmp_path):
    name, folder, model = family
    tensors = {plan.name: torch.empty(plan.shape) for plan in merging.planned(SavedReplica(folder / "ours"))}
    randomise(tensors.items())
    expected = own_logits(model, tensors.__getitem__)
    first = None
    for size in (1, 2):
        for stages in (1, 2):
            cut = write_cut(tmp_path / f"{size}{stages}", model, tensors, size, stages)
            source = convert_to_hf.source_of([SavedReplica(cut)])
            convert.export(source, tmp_path / f"hub{size}{stages}", tokenizer=Tokenizer(tokenizer))
            written = load_file(tmp_path / f"hub{size}{stages}" / "model.safetensors")
            first = first or written
            assert written.keys() == first.keys()
            assert all(torch.equal(written[key], first[key]) for key in first)
    assert (hub_logits(tmp_path / "hub22") - expected).abs().max() < 1e-4
    assert hf.read_config(tmp_path / "hub22").architecture.model_type == TYPES[name].replace("mistral", "llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_round_trip_changes_no_bit(family, tokenizer, tmp_path, dtype):
    name, _, _ = family
    hub_model(name, tmp_path / "hub", dtype)
    model, _ = convert.import_model(tmp_path / "hub", tmp_path / "ours")
    ours = SavedReplica(tmp_path / "ours")
    origin = convert.origin_of(ours)
    convert.export(
        convert_to_hf.source_of([ours]), tmp_path / "again", tokenizer=Tokenizer(tokenizer),
        architecture=origin["architecture"], tie=origin["tied"],
    )  # fmt: skip
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("hub", "again"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == dtype and torch.equal(tensor, after[key]), key
    assert hf.read_config(tmp_path / "again") == hf.read_config(tmp_path / "hub")
    assert hf.read_config(tmp_path / "again").model == model


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    hub_model("qwen2", folder / "hub")
    _, remarks = convert.import_model(folder / "hub", folder / "ours")
    assert any("were tied" in remark for remark in remarks)
    return folder


def test_embeddings_are_tied_again_only_while_they_are_equal(tied, tokenizer, tmp_path):
    ours = SavedReplica(tied / "ours")
    assert convert.origin_of(ours) == {"architecture": "qwen2", "tied": True, "folder": str(tied / "hub")}
    assert torch.equal(ours.tensor(hf.OUTPUT.ours), ours.tensor(hf.EMBEDDING.ours))
    source = convert_to_hf.source_of([ours])
    moved = {plan.name: ours.tensor(plan.name) for plan in source.planned}
    moved[hf.OUTPUT.ours] = moved[hf.OUTPUT.ours] + 1e-3
    for output, given, equal in (("equal", source, True), ("moved", replace(source, tensor=moved.__getitem__), False)):
        remarks = convert.export(given, tmp_path / output, tokenizer=Tokenizer(tokenizer), tie=True)
        assert json.loads((tmp_path / output / "config.json").read_text())["tie_word_embeddings"] is equal
        assert ("lm_head.weight" in load_file(tmp_path / output / "model.safetensors")) is not equal
        assert remarks == [
            "input and output embedding are equal: written tied"
            if equal
            else "the embeddings were tied when they were imported and are no longer equal: written untied"
        ]
    logits = own_logits(source.model, moved.__getitem__)
    assert (hub_logits(tmp_path / "moved") - logits).abs().max() < 1e-4


def test_large_models_are_sharded(tied, tokenizer, tmp_path):
    limit = 120_000
    source = convert_to_hf.source_of([SavedReplica(tied / "ours")])
    convert.export(source, tmp_path / "hub", tokenizer=Tokenizer(tokenizer), max_shard_bytes=limit)
    index = json.loads((tmp_path / "hub" / convert.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        held = load_file(tmp_path / "hub" / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= limit or len(held) == 1
        assert {name for name, place in index["weight_map"].items() if place == file} == set(held)
    assert torch.equal(hub_logits(tmp_path / "hub"), hub_logits(tied / "hub"))
    convert.import_model(tmp_path / "hub", tmp_path / "again")
    again = SavedReplica(tmp_path / "again")
    assert all(torch.equal(again.tensor(name), source.tensor(name)) for name in again.names)


def test_the_folder_is_complete(tied, tokenizer, tmp_path, capsys):
    from transformers import AutoTokenizer, GenerationConfig

    command = ["--checkpoint", tied / "ours", "--output", tmp_path / "hub", "--tokenizer", tokenizer]
    assert run(convert_to_hf, command) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "hub", local_files_only=True).eos_token_id == 2
    assert GenerationConfig.from_pretrained(tmp_path / "hub").eos_token_id == 2
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "imported and not trained since" in card and "Qwen2ForCausalLM" in card
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert run(convert_to_hf, command) == 2 and "exists; choose another output folder" in capsys.readouterr().err


def run(tool, words):
    import sys

    before, sys.argv = sys.argv, [tool.__name__, *map(str, words)]
    try:
        return tool.main()
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not supported"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope type yarn"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
         "sliding_window = 16"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"logit_softcapping": 30.0}, "logit_softcapping may change"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config may change"),
        ({"num_hidden_layers": 3}, "lacks 12 tensors: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1, "layer_types": None}, "does not have, 12 tensors"),
        ({"intermediate_size": 100}, r"shape \[96, 64\], config.json makes it \[100, 64\]"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused_by_name(tied, tmp_path, change, message):
    shutil.copytree(tied / "hub", tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    content = json.loads(path.read_text()) | change
    if content["layer_types"] is None:
        del content["layer_types"]
    elif "num_hidden_layers" in change:
        content["layer_types"] = ["full_attention"] * change["num_hidden_layers"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=message):
        convert.import_model(tmp_path / "hub", tmp_path / "ours")
    assert [item.name for item in tmp_path.iterdir()] == ["hub"]


def test_mistrals_window_is_refused_where_it_hides_tokens(tmp_path):
    hub_model("mistral", tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"sliding_window": 95}))
    with pytest.raises(ConversionError, match="sliding_window = 95 is not supported"):
        hf.read_config(tmp_path / "hub")
    path.write_text(json.dumps(content | {"sliding_window": 96}))
    assert hf.read_config(tmp_path / "hub").model.seq_length == 96


def test_damaged_weights_are_refused_by_name(tied, tmp_path):
    def refused(message):
        with pytest.raises(ConversionError, match=message):
            convert.import_model(tmp_path / "hub", tmp_path / "ours")
        assert sorted(item.name for item in tmp_path.iterdir()) == ["hub"]

    shutil.copytree(tied / "hub", tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    whole = load_file(file)
    bad = whole["model.layers.1.mlp.up_proj.weight"].clone()
    bad[3, 5] = torch.nan
    save_file(whole | {"model.layers.1.mlp.up_proj.weight": bad}, file)
    refused("model.layers.1.mlp.up_proj.weight holds values that are not finite")
    save_file(whole | {"model.norm.weight": whole["model.norm.weight"].bfloat16()}, file)
    refused("different dtypes")
    file.write_bytes(file.read_bytes()[:-10])
    refused("model.safetensors can't be read")
    file.rename(file.with_name("pytorch_model.bin"))
    refused("pickled weights")


def test_exports_that_cannot_be_right_are_refused(tied, tmp_path):
    source = convert_to_hf.source_of([SavedReplica(tied / "ours")])
    large = corpus.write_tokenizer(tmp_path / "t.model", corpus.texts(400), 512)
    with pytest.raises(ConversionError, match="has 512 tokens, the model's embedding only 384 rows"):
        convert.export(source, tmp_path / "hub", tokenizer=Tokenizer(large))
    nothing = replace(source, tensor=lambda name: torch.full(source.planned[0].shape, torch.inf))
    small = corpus.write_tokenizer(tmp_path / "s.model", corpus.texts(300), 384)
    with pytest.raises(ConversionError, match="not finite"):
        convert.export(nothing, tmp_path / "hub", tokenizer=Tokenizer(small))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["s.model", "t.model"]


def test_models_without_an_architecture_are_refused_with_the_reason():
    base = Model(vocab_size=64, hidden_size=32, num_layers=1, num_attention_heads=4, ffn_hidden_size=32, seq_length=8)
    assert hf.fitting(base).model_type == "llama" and hf.fitting(base, "mistral").model_type == "mistral"
    scaled = replace(base, rope_scaling=RopeScaling(type="linear", factor=2.0), mlp_bias=True)
    assert hf.fitting(scaled).model_type == "llama"
    with pytest.raises(ConversionError, match=r'qwen3: has no model\.attention_bias = "qkv"'):
        hf.fitting(replace(base, qk_norm=True, attention_bias="qkv"))
    with pytest.raises(ConversionError, match=r"mistral: has no model\.mlp_bias"):
        hf.fitting(scaled, "mistral")


def test_the_replica_must_be_clear(tied):
    two = [SavedReplica(tied / "ours")] * 2
    with pytest.raises(ValueError, match="give --replica R, or --merge mean"):
        convert_to_hf.choose(two, None, None)
    with pytest.raises(ValueError, match="there is no replica 3; there are 0, 0"):
        convert_to_hf.choose(two, 3, None)


def test_import_prints_the_block_for_the_config(tied, tokenizer, tmp_path, capsys):
    shutil.copytree(tied / "hub", tmp_path / "hub")
    shutil.copy(tokenizer, tmp_path / "hub" / "tokenizer.model")
    assert run(convert_from_hf, ["--model", tmp_path / "hub", "--output", tmp_path / "ours"]) == 0
    printed = capsys.readouterr().out
    block = json.loads(printed[printed.index("{") :])
    assert Model(**block["model"]) == merging.model_of(SavedReplica(tmp_path / "ours"))
    assert Tokenizer(block["data"]["tokenizer"]).vocab_size == 384
    shutil.rmtree(tmp_path / "ours")
    big = corpus.write_tokenizer(tmp_path / "hub" / "tokenizer.model", corpus.texts(400), 512)
    assert big.exists() and run(convert_from_hf, ["--model", tmp_path / "hub", "--output", tmp_path / "ours"]) == 2
    assert "its tokenizer has 512 tokens" in capsys.readouterr().err and not (tmp_path / "ours").exists()


def test_weights_that_say_nothing_of_their_model(tied, tmp_path):
    shutil.copytree(tied / "ours", tmp_path / "ours")
    path = tmp_path / "ours" / "manifest.json"
    content = json.loads(path.read_text())["content"]
    del content["model"]
    path.write_text(json.dumps({"crc": content_crc(content), "content": content}))
    with pytest.raises(CheckpointError, match="does not say which model"):
        merging.model_of(SavedReplica(tmp_path / "ours"))


def test_sizes():
    assert [streamed.size_bytes(text) for text in ("5GB", "1.5MB", "2GiB", "7")] == [5 * 10**9, 1_500_000, 2**31, 7]
    for text in ("", "GB", "0MB", "5 parsecs"):
        with pytest.raises(ValueError, match="is no size"):
            streamed.size_bytes(text)
