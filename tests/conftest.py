"""What every test gets: a fixed hypothesis profile, models for whole fleets, and its turn."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from engine.linux import blas
from tests.support import forker, turns

pytest_plugins = ["tests.support.models"]

settings.register_profile("ci", derandomize=True, max_examples=200, deadline=None)
settings.register_profile("nightly", max_examples=5000, deadline=None)
settings.load_profile("ci")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first, after all else has been shuffled."""
    items.sort(key=lambda item: turns.turn(item.path.relative_to(config.rootpath)))


def pytest_collection_finish() -> None:
    """Keep what the collection made out of every later search for garbage: it stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_blas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give models that tests run in their own process the BLAS that engines have, before MLX is imported."""
    if any(item.get_closest_marker("mlx") for item in request.session.items):
        base = tmp_path_factory.getbasetemp()
        blas.install((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "blas")


@pytest.fixture(scope="session", autouse=True)
def no_forks_stay() -> Iterator[None]:
    yield
    forker.SHARED.end()
