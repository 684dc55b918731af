"""The fixtures of the end-to-end tests, and the rule that only `make test-chaos` runs what takes many minutes."""

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import text_data, tiny

__all__ = ["text_data", "tiny"]


def pytest_collection_modifyitems(items):
    if os.environ.get("NOLOCO_TEST_CHAOS") == "1":
        return
    skip = pytest.mark.skip(reason="many minutes: `make test-chaos` runs it")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
