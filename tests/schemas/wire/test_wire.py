"""The package: cheap to import."""

import subprocess
import sys


def test_importing_it_does_not_import_pydantic() -> None:
    """Fleetctl imports these modules, and importing pydantic would cost 0.2 s."""
    modules = ("headers", "exit_codes", "connections", "streams", "metrics", "errors")
    names = ", ".join(f"schemas.wire.{module}" for module in modules)
    code = f"import sys, {names}; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
