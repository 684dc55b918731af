"""lm-evaluation-harness on an exported folder, offline, with the task in docs/evaluation.md, against our own figure."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from noloco_mega import convert
from noloco_mega.checkpoint.reader import SavedReplica
from noloco_mega.data.tokenizer import Tokenizer
from tests import corpus
from tests.unit.test_hf import hub_model
from tools import convert_to_hf

TASK = """\
task: local_text
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
"""


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm-eval is not there: run `make test-slow`")
def test_the_documented_command_gives_our_loss(tmp_path):
    from transformers import AutoModelForCausalLM

    hub_model("llama", tmp_path / "hub")
    convert.import_model(tmp_path / "hub", tmp_path / "ours")
    path = corpus.write_tokenizer(tmp_path / "t.model", corpus.texts(300))
    source = convert_to_hf.source_of([SavedReplica(tmp_path / "ours")])
    convert.export(source, tmp_path / "export", tokenizer=Tokenizer(path))
    texts = [text[:60] for text in corpus.texts(30)[10:]]
    data = corpus.write_jsonl(tmp_path / "held_out.jsonl", texts)
    (tmp_path / "local_text.yaml").write_text(TASK.format(data=data))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf",
        "--model_args", f"pretrained={tmp_path / 'export'},dtype=float32",
        "--tasks", "local_text", "--include_path", tmp_path, "--device", "cpu", "--output_path", tmp_path / "out",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([*map(str, command)], env=os.environ | offline, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(result.read_text())["results"]["local_text"]["byte_perplexity,none"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    tokenizer, nats, count = Tokenizer(path), 0.0, 0
    for text in texts:
        ids = torch.tensor([[tokenizer.eod if tokenizer.bos is None else tokenizer.bos, *tokenizer.encode(text)]])
        assert ids.shape[1] <= 96
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        nats -= float(logits.gather(1, ids[0, 1:, None]).sum())
        count += len(text.encode())
    assert found == pytest.approx(torch.tensor(nats / count).exp().item(), rel=1e-4)
