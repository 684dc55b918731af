"""Which versions run here? What must be equal in all processes of a run, because numbers or protocols depend on it."""

from __future__ import annotations

import platform
from importlib.metadata import version

PACKAGES = ("noloco_mega", "torch", "megatron-core", "deepspeed", "numpy")


def here() -> dict[str, str]:
    """Package (and "python") -> version; a build's local part, as +cpu or +cu126, counts."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def differences(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """ "torch 2.13.0 against 2.12.1, ..."; empty where both agree."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return ", ".join(
        f"{name} {mine.get(name, 'absent')} against {theirs.get(name, 'absent')}"
        for name in names
        if mine.get(name) != theirs.get(name)
    )
