"""The fixtures of the end-to-end tests, for runs that real launchers and a real scheduler start.

These tests take minutes and need programs that `make test-cluster` installs, so only it runs them.
"""

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import text_data, tiny
from tests.e2e.test_launchers import config_file

__all__ = ["config_file", "text_data", "tiny"]


def pytest_collection_modifyitems(items):
    if os.environ.get("NOLOCO_TEST_CLUSTER") == "1":
        return
    skip = pytest.mark.skip(reason="`make test-cluster` installs what this needs, and runs it")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
