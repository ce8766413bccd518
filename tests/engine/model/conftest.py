"""Fixtures: an adapter of the tiny model, and a smaller model with the same tokens."""

from pathlib import Path

import pytest

from tests.support.engine_adapters import make_adapter
from tests.support.mlx_models import module


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "law", tiny)


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrower model with the same tokens, half the layers and half the context."""
    make = module("tests.support.tiny_model").make
    return Path(
        make(tmp_path_factory.mktemp("models") / "small", hidden=32, layers=1, context=2048)
    )
