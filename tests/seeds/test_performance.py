"""`spec.performance: Always` on a real engine: figures in every answer, as the ring server's."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("performance")
    cache = folder / "blas"
    cache.mkdir(mode=0o700)
    command = [sys.executable, "-m", "tests.support.tiny_model", str(folder / "model"), "--endless"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with forking(folder, cache) as start:
        found = start(folder / "model", performance="Always")
        eventually(found.is_ready, within_s=START_S)
        yield found


def last_chunk(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw.decode().split("\n\n")[-3].removeprefix("data: "))
    return found


@pytest.mark.ci
def test_answers_have_figures_unless_the_request_says_false(engine: Engine) -> None:
    whole = json.loads(engine.chat().raw)
    assert whole["performance"]["decode_tokens_per_s"] > 0
    assert last_chunk(engine.chat(stream=True).raw)["performance"]["ttft_s"] > 0
    for is_streamed in (False, True):
        asked = engine.chat(stream=is_streamed, include_performance=False)
        assert b"performance" not in asked.raw
