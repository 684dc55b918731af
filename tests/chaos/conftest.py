"""The fixtures of the end-to-end tests, and the rule that only `make test-chaos` runs what takes many minutes."""

from pathlib import Path

from tests.e2e.conftest import text_data, tiny
from tests.gates import skip_unless

__all__ = ["text_data", "tiny"]


def pytest_collection_modifyitems(items):
    skip_unless("NOLOCO_TEST_CHAOS", Path(__file__).parent, items, "many minutes: `make test-chaos` runs it")
