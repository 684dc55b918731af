"""What is in a checkpoint? `python -m noloco_mega inspect CHECKPOINT` in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from noloco_mega.checkpoint.folders import Checkpoints, Seen, step_name, step_of
from noloco_mega.checkpoint.format import CheckpointError
from noloco_mega.checkpoint.resume import present


def find(path: Path) -> tuple[Checkpoints, int]:
    """The step that a path means: a step's folder, or the newest of a run's or of its checkpoints folder.

    Raises CheckpointError.
    """
    path = Path(path)
    step = step_of(path.absolute().name)
    if step is not None and path.is_dir():
        return Checkpoints(path.absolute().parent, 0, 1), step
    for root in (path / "checkpoints", path):
        folders = Checkpoints(root, 0, 1)
        steps = folders.all_steps()
        if steps:
            latest = folders.latest()
            return folders, steps[-1] if latest is None else latest
    raise CheckpointError(f"{path} is no checkpoint (step_00000200), and no folder of a run that holds any")


def described(path: Path, verify: bool) -> Iterator[str]:
    """Lines about a checkpoint; with `verify` every file is read and its checksums are compared.

    Raises CheckpointError for a path without any.
    """
    folders, step = find(path)
    found = folders.look(step)
    problems = list(found.problems)
    if not found.replicas:
        raise CheckpointError(
            f"{folders.root / step_name(step)} holds nothing complete: {'; '.join(problems) or 'empty'}"
        )
    if verify:
        problems += _damage(found)
    first = next(iter(found.replicas.values())).manifest
    topology, model = first["config"]["topology"], first["config"]["model"]
    members = present(found)
    missing = [replica for replica in members if replica not in found.replicas]
    tokens = sum(saved.manifest["tokens"] for saved in found.replicas.values())
    size = sum(saved.bytes for saved in found.replicas.values())
    yield f"{folders.root / step_name(step)}"
    yield f"step         {step} of {first['config']['run']['steps']} (run {first['config']['run']['name']})"
    yield (
        f"topology     {topology['replicas']} replicas of {topology['stages']} stages x {topology['tensor']} tensor x "
        f"{topology['data']} data ranks"
    )
    yield f"views        {'; '.join(f'from step {start}: replicas {_listed(who)}' for start, who in first['view_log'])}"
    yield f"present      {_listed(list(members))}"
    yield f"model        {model['num_layers']} layers of width {model['hidden_size']}, vocabulary {model['vocab_size']}"
    yield f"tokens seen  {tokens:,} by the replicas found here"
    yield f"size         {size / 1e6:,.1f} MB in {sum(len(saved.parts) for saved in found.replicas.values())} files"
    yield f"complete     {_completeness(missing, problems, verify)}"
    yield from (f"  problem    {problem}" for problem in problems)
    for replica, saved in found.replicas.items():
        yield f"replica {replica:<4d} {_losses(saved.manifest['losses'])}, {saved.bytes / 1e6:,.1f} MB"
    others = [other for other in folders.all_steps() if other != step]
    if others:
        yield f"beside it    {', '.join(step_name(other) for other in others)}"


def _damage(found: Seen) -> Iterator[str]:
    for saved in found.replicas.values():
        for part in saved.parts:
            try:
                saved.verify(part)
            except CheckpointError as error:
                yield str(error)


def _completeness(missing: list[int], problems: list[str], verified: bool) -> str:
    if missing:
        return f"no: replica {_listed(missing)} is missing or not whole"
    if problems:
        return "no"
    return "yes, every checksum verified" if verified else "yes (sizes compared; --verify reads every file)"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _losses(losses: Mapping[str, Any]) -> str:
    names = {"loss": "loss", "val_loss": "validation loss"}
    return ", ".join(f"{name} {losses[key]:.4f}" for key, name in names.items() if key in losses) or "no loss yet"
