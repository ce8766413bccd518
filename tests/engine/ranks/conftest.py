"""Ranks that start fast, and models that can be split."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Start
from tests.engine.ranks.forks import forking

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Give a function that makes a tiny model once: flags of tests/support/tiny_model.py."""

    def function(*flags: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / "-".join(["split", *flags]).replace("--", "")
        if not folder.is_dir():
            command = [sys.executable, "-m", "tests.support.tiny_model", str(folder), "--endless"]
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
        return folder

    return function


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory, blas_cache: Path) -> Iterator[Start]:
    """Give a function that starts ranks, each of which a test may leave running."""
    with forking(tmp_path_factory.mktemp("ranks"), blas_cache) as function:
        yield function
