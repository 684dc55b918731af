"""Train large language models over links that cannot carry an all-reduce."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noloco_mega import quiet

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.config import Noloco
    from noloco_mega.outer.connect import connect
    from noloco_mega.outer.hook import attach

quiet.expected()

__all__ = ["Noloco", "Peers", "attach", "connect"]

_PLACES = {"Noloco": "config", "Peers": "comm.membership", "attach": "outer.hook", "connect": "outer.connect"}


def __getattr__(name: str) -> Any:
    # Imported on first use: a tool that only reads a config should not wait for torch and DeepSpeed.
    if name in _PLACES:
        return getattr(importlib.import_module(f"noloco_mega.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
