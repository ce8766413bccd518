"""Golden files of values: what a parser makes of a capture lies beside the capture."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

Golden: TypeAlias = Callable[[Path, str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a check that a file holds a text; `--update-golden` writes the file instead."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(f"{text}\n")
        assert path.read_text() == f"{text}\n"

    return check
