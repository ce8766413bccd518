"""The package: cheap to import."""

import subprocess
import sys

import pytest

MODULES = ("headers", "exit_codes", "connections", "streams", "metrics", "errors")


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_does_not_import_pydantic(module: str) -> None:
    """Fleetctl imports these modules, and importing pydantic would cost 0.2 s."""
    code = f"import sys, schemas.wire.{module}; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
