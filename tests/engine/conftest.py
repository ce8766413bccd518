"""Engines for the tests: one that most tests share, and a function that starts more."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, Start, eventually, launching
from tests.support.models import MODEL


@pytest.fixture(scope="session")
def blas_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blas")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose greedy text never ends by itself."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    command = [sys.executable, "-m", "tests.support.tiny_model", str(folder), "--endless"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def start(tmp_path: Path, blas_cache: Path) -> Iterator[Start]:
    """Yield a function that starts engines, as forks: an engine's imports are two or three seconds of CPU."""
    with forking(tmp_path, blas_cache) as function:
        yield function


@pytest.fixture
def start_process(tmp_path: Path, blas_cache: Path) -> Iterator[Start]:
    """Yield a function that starts engines as an agent does, with all their imports."""
    with launching(tmp_path, blas_cache) as function:
        yield function


@pytest.fixture(scope="session")
def shared(
    tiny: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with forking(tmp_path_factory.mktemp("shared"), blas_cache) as function:
        engine = function(tiny, concurrency=16)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Yield the engine that all tests of a pytest process share: endless text, 16 slots, a context of 4096.

    Each test must leave it healthy and idle.
    """
    yield shared
    eventually(lambda: shared.busy() == (0, 0), what="idle after the test")
    assert shared.is_ready()


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def real(
    smollm2: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Yield an engine with SmolLM2, for tests that random weights cannot pass; some 10 tokens a second."""
    with forking(tmp_path_factory.mktemp("real"), blas_cache) as function:
        engine = function(smollm2 / MODEL, concurrency=4)
        eventually(engine.is_ready, within_s=START_S)
        yield engine
