"""Fixtures: models for whole fleets, a tiny one that never stops by itself and a real one."""

from pathlib import Path

import pytest

from tests.support.commands import run_module


@pytest.fixture(scope="session")
async def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models folder with `tiny`, whose answers are as long as max_tokens says."""
    folder = tmp_path_factory.mktemp("models")
    await run_module("tests.support.tiny_model", str(folder / "tiny"), "--endless")
    return folder


@pytest.fixture(scope="session")
async def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models folder with SmolLM2-135M-Instruct, made as the demo makes it."""
    folder = tmp_path_factory.mktemp("real-models")
    await run_module("examples.models.smollm2", str(folder / "SmolLM2-135M-Instruct"))
    return folder
