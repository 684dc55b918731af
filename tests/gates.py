"""Folders of tests that `make test` leaves out, for their time or for the programs that they need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def skip_unless(variable: str, folder: Path, items: list[pytest.Item], reason: str) -> None:
    """Skip the tests that lie in `folder`, for `reason`, unless the environment variable is 1."""
    if os.environ.get(variable) == "1":
        return
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if folder in item.path.parents:
            item.add_marker(skip)
