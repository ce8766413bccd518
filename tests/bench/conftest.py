"""The programs in C that benches of the gateway share."""

import shutil
from pathlib import Path

import pytest

from bench.gateway.load import compiled


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the stand-in engine and the load generator; without a compiler the test is skipped."""
    if shutil.which("cc") is None:
        pytest.skip("cc is not on PATH")
    return compiled(tmp_path_factory.mktemp("native"))
