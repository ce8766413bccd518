"""An engine with several adapters: the model's name in a request chooses one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.engine_adapters import make_adapter, write_peft
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

PROMPT = "We hold these truths to be self-evident, that all men are created equal. " * 4


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("adapters")
    poems = make_adapter(out / "mlx", tiny, rank=8, seed=8)
    return {
        "tiny:law": make_adapter(out / "law", tiny),
        "tiny:poems": write_peft(out / "poems", poems),
    }


@pytest.fixture(scope="module")
def multi(
    tiny: Path, folders: dict[str, Path], blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with forking(tmp_path_factory.mktemp("multi"), blas_cache) as function:
        engine = function(tiny, adapters=folders)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


def ask(engine: Engine, model: str) -> str:
    with openai.OpenAI(base_url=engine.url, api_key="none", max_retries=0) as client:
        made = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0)
    assert made.model == model
    return made.choices[0].text


def test_models_lists_adapters_with_their_parent(multi: Engine) -> None:
    listed = {one["id"]: one for one in multi.request("GET", "/v1/models").json["data"]}
    assert {name: (one["parent"], one["root"]) for name, one in listed.items()} == {
        "tiny": (None, "tiny"),
        "fast": (None, "tiny"),
        "tiny:law": ("tiny", "law"),
        "tiny:poems": ("tiny", "poems"),
    }
    assert multi.request("GET", "/v1/models/tiny:law").json == listed["tiny:law"]
    assert multi.health().json["models"] == list(listed)


@pytest.mark.ci
def test_requests_choose_and_answers_equal_those_of_one_adapter(
    multi: Engine, engine: Engine, folders: dict[str, Path], tiny: Path, start: Start
) -> None:
    """Ask all at once, twice: the second time from the prefix cache, which must not mix adapters."""
    names = ["tiny", "tiny:law", "tiny:poems", "fast", "tiny:law"]
    with ThreadPoolExecutor(len(names)) as pool:
        first = list(pool.map(lambda name: ask(multi, name), names))
        second = list(pool.map(lambda name: ask(multi, name), reversed(names)))
    assert second[::-1] == first
    assert len(set(first)) == 3
    assert first[0] == first[3] == ask(engine, "tiny")
    for at in (1, 2):
        alone = start(tiny, adapter=folders[names[at]])
        eventually(alone.is_ready, within_s=START_S)
        assert ask(alone, "tiny") == first[at]


def test_an_unknown_adapter_is_refused_with_those_that_exist(multi: Engine) -> None:
    refused = multi.chat(model="tiny:lyrics")
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert "This replica serves: tiny, fast, tiny:law, tiny:poems." in refused.error["message"]


@pytest.mark.ci
def test_salts_of_clients_do_not_reach_the_blocks_of_adapters(multi: Engine) -> None:
    """Check that a prompt read without an adapter is not found by one, whatever `cache_salt` says."""
    fields: dict[str, Any] = {"prompt": PROMPT + "x", "max_tokens": 4, "temperature": 0}
    for salt in ("adapter:", "adapter:tiny:law:", "x"):
        for model in ("tiny", "tiny:law", "tiny:poems"):
            usage = multi.post("/v1/completions", **fields, model=model, cache_salt=salt).json[
                "usage"
            ]
            assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
