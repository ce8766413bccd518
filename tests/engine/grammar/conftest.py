"""Fixtures: tiny models in this process, with and without markers in the vocabulary."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.gauges import Gauges
from models import model_files
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually
from tests.support.mlx_models import module


def load(folder: Path) -> Any:
    loader = module("engine.model.loader")
    facts = model_files.inspect_model(folder)
    return loader.load(folder, facts, Gauges(), is_stopping=lambda: False)


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> Any:
    return load(tiny)


@pytest.fixture(scope="session")
def grammars(loaded: Any) -> Any:
    return loaded.grammars


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model without markers in its vocabulary."""
    folder = tmp_path_factory.mktemp("plain") / "tiny"
    return load(module("tests.support.tiny_model").make(folder, has_markers=False))


@pytest.fixture(params=["marked", "plain"])
def speaker(request: pytest.FixtureRequest, loaded: Any, plain: Any) -> Any:
    """A model whose markers are tokens, and one that must spell them."""
    return loaded if request.param == "marked" else plain


@pytest.fixture(scope="session")
def calling(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the dialect of Hermes and Qwen and a template with a switch for reasoning."""
    folder = tmp_path_factory.mktemp("calling") / "tiny"
    shutil.copytree(tiny, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += (
        "{# <tool_call> tool_call.name #}"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def caller(
    calling: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with forking(tmp_path_factory.mktemp("caller"), blas_cache) as function:
        engine = function(calling)
        eventually(engine.is_ready, within_s=START_S)
        yield engine
        assert engine.is_ready()


@pytest.fixture
def client(caller: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=caller.url, api_key="none", max_retries=0) as made:
        yield made
