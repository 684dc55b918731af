"""The fixtures of the end-to-end tests, for runs that real launchers and a real scheduler start.

These tests take minutes and need programs that `make test-cluster` installs, so only it runs them.
"""

from pathlib import Path

from tests.e2e.conftest import text_data, tiny
from tests.e2e.test_launchers import config_file
from tests.gates import skip_unless

__all__ = ["config_file", "text_data", "tiny"]


def pytest_collection_modifyitems(items):
    skip_unless(
        "NOLOCO_TEST_CLUSTER", Path(__file__).parent, items, "`make test-cluster` installs what this needs, and runs it"
    )
