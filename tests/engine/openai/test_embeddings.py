"""`/v1/embeddings`: refused requests, and the endpoint as OpenAI's own client sees it."""

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from engine.input_workers.pool import InputWorkers
from engine.openai import embeddings, request_body
from engine.openai.input_processor import InputProcessor
from engine.ports import ServedModel
from machinery.clock import SystemClock
from schemas.wire.errors import Refusal, RefusedError
from tests.support.engine_batches import load_once
from tests.support.engine_embedders import make_embedder, pooling
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tiny, tmp_path_factory.mktemp("vectors") / "model")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_once(folder)


async def test_a_model_without_a_head_refuses_to_generate(loaded: Any, tmp_path: Path) -> None:
    inputs = InputWorkers(limit_s=1, cache=tmp_path, clock=SystemClock())
    ready = ServedModel(codec=loaded.codec, vocab_size=512, pooling=pooling("mean"), has_head=False)
    processor = InputProcessor(
        ready=ready, context_length=100, concurrency=1, inputs=inputs, fingerprint="f"
    )
    with pytest.raises(RefusedError, match="generates no text") as caught:
        await processor.choices(
            request_body.parse_completion(b'{"model":"m","prompt":"x"}'), first_id=1, fresh_seed=1
        )
    assert caught.value.refusal.code == "not_a_text_model"


def refused(**fields: Any) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        embeddings.parse(json.dumps({"model": "m", "input": "x"} | fields).encode())
    return caught.value.refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", ""),
        ("input", []),
        ("input", ["a", ""]),
        ("input", [[1], []]),
        ("input", [1, "a"]),
        ("input", [True]),
        ("input", [-1]),
        ("input", None),
        ("input", ["x"] * 2049),
        ("dimensions", 0),
        ("dimensions", "64"),
        ("encoding_format", "int8"),
        ("user", 5),
        ("model", None),
        ("colour", "red"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_requests_are_refused_by_name(name: str, value: Any) -> None:
    refusal = refused(**{name: value})
    assert (refusal.status, (refusal.param or "").partition("[")[0]) == (400, name)
    assert name in refusal.message


@pytest.fixture(scope="module")
def own(
    folder: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with forking(tmp_path_factory.mktemp("engine"), blas_cache) as function:
        engine = function(folder, context_length=600, concurrency=4, queue_depth=16)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.fixture(scope="module")
def ask(own: Engine) -> Iterator[Callable[..., Any]]:
    with openai.OpenAI(base_url=own.url, api_key="none", max_retries=0) as client:

        def function(given: Any, **fields: Any) -> Any:
            return client.embeddings.create(model="tiny", input=given, **fields)

        yield function


def test_every_form_of_input(own: Engine, ask: Callable[..., Any]) -> None:
    texts = ["hello world", "one", "grüße, 世界 🌍 " * 20, "hello world"]
    answer = ask(texts)
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert (answer.object, answer.model) == ("list", "tiny")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 100
    rows = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(rows[0], rows[3], atol=1e-6)
    alone = np.array([ask(text).data[0].embedding for text in texts])
    np.testing.assert_allclose(rows, alone, atol=1e-5)
    by_token = ask([[10, 20], [30]])
    assert by_token.usage.prompt_tokens == 3
    single = np.array(ask([10, 20]).data[0].embedding)
    np.testing.assert_allclose(single, by_token.data[0].embedding, atol=1e-6)
    assert own.busy() == (0, 0)


def test_formats_and_dimensions(own: Engine, ask: Callable[..., Any]) -> None:
    whole = np.array(ask("hello", encoding_format="float").data[0].embedding)
    packed = own.post("/v1/embeddings", input="hello", encoding_format="base64").json
    bare = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(bare, whole.astype("<f4"))
    short = np.array(ask("hello", dimensions=16).data[0].embedding)
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    assert len(ask("hello", dimensions=64).data[0].embedding) == 64
    with pytest.raises(
        openai.BadRequestError, match="'dimensions' is 65; this model's vectors have 64"
    ):
        ask("hello", dimensions=65)


def test_inputs_over_the_limits_are_refused(ask: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 600") as caught:
        ask([[10], [10] * 601])
    assert (caught.value.param, caught.value.code) == ("input[1]", "context_length_exceeded")
    assert len(ask([[10] * 600]).data) == 1
    with pytest.raises(openai.BadRequestError, match="not in the model's vocabulary"):
        ask([10, 512])
    with pytest.raises(openai.BadRequestError, match="a request may have 300000"):
        ask([[10] * 600] * 501)


def test_many_clients_beside_a_generation(own: Engine, ask: Callable[..., Any]) -> None:
    texts = [f"number {n} " * (n + 1) for n in range(12)]
    alone = [ask(text).data[0].embedding for text in texts]
    alone_chat = own.chat(max_tokens=40).json
    with ThreadPoolExecutor(13) as pool:
        chat = pool.submit(own.chat, max_tokens=40)
        together = list(pool.map(lambda text: ask(text).data[0].embedding, texts))
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert chat.result().json["choices"] == alone_chat["choices"]


def test_a_client_that_disconnects_frees_its_slot(own: Engine) -> None:
    connection = own.connect()
    body = json.dumps({"model": "tiny", "input": [[10] * 600] * 400})
    connection.request("POST", "/v1/embeddings", body)
    eventually(lambda: own.busy() == (1, 0))
    connection.close()
    eventually(lambda: own.busy() == (0, 0))
    late = own.post(
        "/v1/embeddings", headers={"x-request-timeout": "0.01"}, input=[[10] * 600] * 400
    )
    assert (late.status, late.error["code"]) == (504, "request_timeout")
    eventually(lambda: own.busy() == (0, 0))
    assert own.post("/v1/embeddings", input="x").status == 200


def test_a_text_model_names_the_missing_files(engine: Engine) -> None:
    reply = engine.post("/v1/embeddings", input="hello")
    assert (reply.status, reply.error["code"]) == (400, "not_an_embedding_model")
    assert "1_Pooling/config.json" in reply.error["message"]
