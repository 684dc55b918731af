"""The fixtures of the end-to-end tests, for runs that real launchers and a real scheduler start."""

from tests.e2e.conftest import text_data, tiny
from tests.e2e.test_launchers import config_file

__all__ = ["config_file", "text_data", "tiny"]
