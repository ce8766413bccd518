"""What tests of the agent share: one tiny model for all their engines."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the model `tiny`; made by another process, because mlx is heavy."""
    folder = tmp_path_factory.mktemp("models")
    making = [sys.executable, "-m", "tests.support.tiny_model", str(folder / "tiny"), "--endless"]
    subprocess.run(making, check=True, stdout=subprocess.DEVNULL)
    return folder
