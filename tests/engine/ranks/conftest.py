"""Fixtures: ranks that start fast, and models that can be split."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engine_forks import forking
from tests.support.engine_process import Start

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes a tiny model once; its arguments are those of tests/support/tiny_model.py."""

    def function(*flags: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / "-".join(["split", *flags]).replace("--", "")
        if not folder.is_dir():
            command = [sys.executable, "-m", "tests.support.tiny_model", str(folder), "--endless"]
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
        return folder

    return function


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory, blas_cache: Path) -> Iterator[Start]:
    """Return a function that starts ranks; the fixture ends those that still run."""
    with forking(tmp_path_factory.mktemp("ranks"), blas_cache) as function:
        yield function
