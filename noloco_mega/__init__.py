"""Train large language models over links that cannot carry an all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noloco_mega import quiet

if TYPE_CHECKING:
    from noloco_mega.comm.membership import Peers
    from noloco_mega.outer.hook import attach

quiet.expected()

__all__ = ["Peers", "attach"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a tool that only reads a config should not wait for torch and DeepSpeed.
    if name == "attach":
        from noloco_mega.outer.hook import attach

        return attach
    if name == "Peers":
        from noloco_mega.comm.membership import Peers

        return Peers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
