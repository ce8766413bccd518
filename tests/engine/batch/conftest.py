"""Fixtures: tiny models, loaded once a process, and batches on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_batches import load_once, new_batch

NewBatch = Callable[..., Any]


@pytest.fixture
def loaded(tiny: Path) -> Any:
    return load_once(tiny)


@pytest.fixture
def new(loaded: Any, tiny: Path) -> NewBatch:
    """Return a function that makes batches on the tiny model."""

    def function(**changes: Any) -> Any:
        return new_batch(loaded, tiny, **changes)

    return function


@pytest.fixture
def batch(new: NewBatch) -> Any:
    return new()
