"""Text from trained weights: continue a prompt with one replica's, with the mean of several, or an exported folder's.

    python tools/generate.py runs/NAME/replica_00/weights [MORE ...] --prompt "def main(" [--tokens 100]

Weights that are averaged must be of one run and step, unless --any-runs says that they need not be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from noloco_mega import config as configs
from noloco_mega import merging
from noloco_mega.checkpoint.reader import SavedReplica, mean_tensor
from noloco_mega.convert import HubModel
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.entry import guarded
from noloco_mega.model.whole import whole_model

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@torch.no_grad()
def continue_text(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    context: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """`prompt` and up to `tokens` more tokens, sampled; stops early at the end of the text.

    Each token is drawn from the smallest set of tokens that holds `top_p` of the probability; temperature 0 takes the
    likeliest. The model sees the last `context` tokens.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.eod]
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        logits = model(window, None, None)[0, -1].float().cpu()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
            outside = probabilities.cumsum(-1) - probabilities >= top_p
            chosen = int(order[torch.multinomial(probabilities.masked_fill(outside, 0), 1, generator=generator)])
        if chosen == tokenizer.eod:
            break
        ids.append(chosen)
    return tokenizer.decode(ids)


def source_of(folders: list[Path], any_runs: bool = False) -> tuple[configs.Model, Callable[[str], torch.Tensor], Path]:
    """The model in these folders, its weights by name, and its tokenizer.

    Raises ValueError, also for weights of several runs or steps unless `any_runs`.
    """
    if any((folder / "config.json").exists() for folder in folders):
        if len(folders) > 1:
            raise ValueError("give one Hugging Face folder; only folders of a run's weights are averaged")
        hub = HubModel(folders[0])
        return hub.described.model, hub.tensor, folders[0]
    replicas = [SavedReplica(folder) for folder in folders]
    if any_runs:
        merging.refuse_other_models(replicas)
    else:
        merging.refuse_mixture(replicas)
    config = merging.run_of(replicas[0])
    tokenizer = replicas[0].folder / "tokenizer" if config is None else Path(config.data.tokenizer)
    return merging.model_of(replicas[0]), lambda name: mean_tensor(replicas, name), tokenizer


def run(arguments: argparse.Namespace) -> None:
    if arguments.temperature < 0 or not 0 < arguments.top_p <= 1:
        raise ValueError("--temperature must be at least 0, --top-p in (0, 1]")
    described, tensor_of, path = source_of(arguments.weights, arguments.any_runs)
    tokenizer = Tokenizer(arguments.tokenizer or path)
    with whole_model(described, tensor_of) as model:
        for prompt in arguments.prompt:
            text = continue_text(
                model,
                tokenizer,
                prompt,
                tokens=arguments.tokens,
                context=described.seq_length,
                temperature=arguments.temperature,
                top_p=arguments.top_p,
                seed=arguments.seed,
            )
            print(text, end="\n\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="+", help="folders of weights (averaged), or a Hugging Face folder")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue (repeatable)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to add at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default: %(default)s; 0: the likeliest")
    parser.add_argument("--top-p", type=float, default=0.95, help="default: %(default)s")
    parser.add_argument("--any-runs", action="store_true", help="average weights of different runs or steps, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", metavar="FILE", help="default: the run's own")
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
