"""The programs in C that benches of the gateway share."""

import shutil

import pytest

from bench.gateway.parts import Programs, compiled


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Return the stand-in engine and the load generator; without a compiler the test is skipped."""
    if shutil.which("cc") is None:
        pytest.skip("cc is not on PATH")
    return compiled(tmp_path_factory.mktemp("native"))
