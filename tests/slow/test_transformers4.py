"""Exported folders in transformers 4.57, in an environment of its own: the same logits and ids."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from noloco_mega import convert
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.tokenizer import Tokenizer
from tests import corpus
from tests.strings import strings
from tests.unit.test_hf import FAMILIES, TOKENS, hub_model, own_logits
from tools import convert_to_hf

FOLDER = os.environ.get("NOLOCO_TRANSFORMERS4")
LOAD = """
import json, sys
import numpy, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4.57"), transformers.__version__
folder, texts, tokens, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, torch_dtype=torch.float32).eval()
with torch.no_grad():
    numpy.save(out, model(torch.from_numpy(numpy.load(tokens))).logits.numpy())
tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
print(json.dumps(tokenizer(json.load(open(texts)))["input_ids"]))
"""


@pytest.mark.skipif(FOLDER is None, reason="transformers 4.57 is not there: run `make test-slow`")
@pytest.mark.parametrize("family", FAMILIES)
def test_version_four_reads_the_same_model(tmp_path, family):

    hub_model(family, tmp_path / "hub")
    model, _ = convert.import_model(tmp_path / "hub", tmp_path / "ours")
    ours = SavedReplica(tmp_path / "ours")
    path = corpus.write_tokenizer(tmp_path / "t.model", corpus.texts(300))
    kind = convert.origin_of(ours)["architecture"]
    convert.export(convert_to_hf.source_of([ours]), tmp_path / "again", tokenizer=Tokenizer(path), architecture=kind)
    texts = strings(2000, corpus.texts(100))
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    np.save(tmp_path / "tokens.npy", TOKENS.numpy())
    words = [tmp_path / "again", tmp_path / "texts.json", tmp_path / "tokens.npy", tmp_path / "logits.npy"]
    environment = os.environ | {"PYTHONPATH": FOLDER, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    logits = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert (logits - own_logits(model, ours.tensor)).abs().max() < 1e-4
    tokenizer = Tokenizer(path)
    assert json.loads(done.stdout) == [tokenizer.encode(text).tolist() for text in texts]
