"""What does microbatch m of inner step t hold? Planned sample numbers, read into tensors.

Shapes: B = samples of one microbatch, S = tokens of one sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from noloco_mega.config import Config
from noloco_mega.data.blend import Blend, Samples
from noloco_mega.data.dataset import open_dataset
from noloco_mega.data.tokenizer import Tokenizer
from noloco_mega.plan import keys, sampling
from noloco_mega.plan.views import View, ViewLog

# A rank asks for a microbatch at most twice in a row: for its tokens, and as last stage for its labels.
KEPT_BATCHES = 8


class Batch(NamedTuple):
    """One microbatch on the CPU. May be handed out again: copy before writing into it."""

    tokens: torch.Tensor
    """int64 [B, S]"""
    labels: torch.Tensor
    """int64 [B, S]: the token after each token."""
    loss_mask: torch.Tensor
    """float32 [B, S]: the weight of each position in the loss. Samples are cut from one stream without padding, so
    all are 1; the token after an end-of-document token counts like any other."""


class Loader:
    """Microbatches of a run, by number. A microbatch is counted over the whole replica, 0 <= m < M·D, so what it
    holds depends on neither D, T nor S; any rank may ask for any replica's, as the last stage of a route must.

    `view_log` is read anew at every call; the caller appends to it.
    """

    def __init__(
        self,
        config: Config,
        train: Samples,
        valid: Samples,
        view_log: ViewLog,
        domains: Mapping[str, Samples] | None = None,
    ) -> None:
        """`domains` is further validation data by name. Raises ValueError where validation data has fewer samples than
        one evaluation takes."""
        self._train, self._view_log = train, view_log
        self._valid: dict[str | None, Samples] = {None: valid}
        self._valid.update(domains or {})
        self._seed, self._seq_length = config.run.seed, config.model.seq_length
        self._micro_batch, self._replica_batch = config.micro_batch_size, config.replica_batch_size
        self._valid_samples = {name: self._chosen(config, samples) for name, samples in self._valid.items()}
        self._read_train = lru_cache(maxsize=KEPT_BATCHES)(self._train_batch)

    def digest(self) -> str:
        """The same for all replicas of a run: they read each other's samples by number. Further validation data does
        not count: a run may go on with other domains."""
        return hashlib.sha256((self._train.digest() + self._valid[None].digest()).encode()).hexdigest()

    def train(self, step: int, microbatch: int, replica: int) -> Batch:
        """Microbatch `microbatch` of `replica` at inner step `step`."""
        return self._read_train(tuple(self._view_log), step, microbatch, replica)

    def valid(self, microbatch: int, domain: str | None = None) -> Batch:
        """Microbatch 0 <= m < run.eval_microbatches of every evaluation, of the validation data or of a domain: the
        same for all steps and replicas."""
        first = microbatch * self._micro_batch
        chosen = self._valid_samples[domain][first : first + self._micro_batch]
        assert microbatch >= 0 and len(chosen) == self._micro_batch, f"an evaluation has no microbatch {microbatch}"
        return _batch(self._valid[domain].read(chosen))

    def _chosen(self, config: Config, valid: Samples) -> np.ndarray:
        """The numbers of an evaluation's samples."""
        count = config.run.eval_microbatches
        needed = count * self._micro_batch
        if len(valid) < needed:
            raise ValueError(
                f"run.eval_microbatches = {count} of {self._micro_batch} samples need {needed} samples, but "
                f"{valid.prefix} has {len(valid)}; lower it to at most {len(valid) // self._micro_batch}, or give more "
                "validation data"
            )
        # One seed for all runs, so that evaluations of differently seeded runs compare.
        return sampling.shuffled(keys.key("valid"), np.arange(needed), len(valid))

    def _train_batch(self, view_log: Sequence[View], step: int, microbatch: int, replica: int) -> Batch:
        chosen = sampling.samples(
            view_log,
            step,
            replica,
            first=microbatch * self._micro_batch,
            count=self._micro_batch,
            replica_batch=self._replica_batch,
            length=len(self._train),
            seed=self._seed,
        )
        return _batch(self._train.read(chosen))


def open_loader(config: Config, view_log: ViewLog) -> Loader:
    """The loader of a run, its files opened and checked against each other. Raises ValueError.

    Needs no process group; every process of every replica may call it at the same time.
    """
    tokenizer = Tokenizer(config.data.tokenizer)
    fits = tokenizer.vocab_size <= config.model.vocab_size
    if not (fits if tokenizer.padded else tokenizer.vocab_size == config.model.vocab_size):
        raise ValueError(
            f"model.vocab_size = {config.model.vocab_size}, but the tokenizer {tokenizer.path} has "
            f"{tokenizer.vocab_size} tokens; set model.vocab_size to that"
        )
    data = config.data

    def opened(prefix: str) -> Samples:
        return open_dataset(
            prefix,
            config.model.seq_length,
            vocab_size=config.model.vocab_size,
            tokenizer_digest=tokenizer.digest,
            cache=data.cache,
        )

    valid, train = opened(data.valid), opened(data.train)
    if data.blend:
        shares = [1 - sum(data.blend.values()), *data.blend.values()]
        train = Blend([train, *map(opened, data.blend)], shares)
    domains = {name: opened(prefix) for name, prefix in data.valid_domains.items()}
    return Loader(config, train, valid, view_log, domains)


def _batch(rows: np.ndarray) -> Batch:
    """rows: int64 [B, S + 1]"""
    both = torch.from_numpy(rows)
    tokens, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    return Batch(tokens, labels, torch.ones(tokens.shape, dtype=torch.float32))
