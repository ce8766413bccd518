"""The OpenAPI document, and many random requests: none crashes the engine, and none leaks memory.

Schemathesis makes a quarter of the requests from the document; hypothesis makes the rest from common mistakes. They
are the same in every run, so that a failure in CI can be repeated.
"""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.api import openapi
from schemas.wire import metrics as wire_metrics
from schemas.wire import recent_prompts
from tests.support.engine_embedders import make_embedder
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, Json, Reply, eventually
from tests.support.sampling import samples

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

BY_SCHEMA, BY_HAND = samples(60), samples(195)  # for each of the four endpoints
EACH = {"derandomize": True, "database": None, "deadline": None, "phases": [Phase.generate]}
GIVEN: Any = {**EACH, "suppress_health_check": list(HealthCheck)}
# Long answers are tested elsewhere: a deadline cuts them here.
HEADERS = {"x-request-timeout": "0.2"}
ALLOWED = {200, 400, 404, 413, 429, 504}


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """The bytes of request request."""

    path: str
    body: bytes


@pytest.fixture(scope="module")
def own(tiny: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of this module, whose memory is measured, with an embedding model that also generates."""
    folder = tmp_path_factory.mktemp("fuzz")
    with forking(folder, blas_cache) as function:
        model = make_embedder(tiny, folder / "model")
        engine = function(model, context_length=300, concurrency=8, queue_depth=64)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.fixture(scope="module")
def document(own: Engine) -> Json:
    return own.request("GET", "/openapi.json").json


def bodies_by_schema(document: Json, path: str) -> list[Any]:
    """Return bodies that match the document, most of them for the served model and with short answers."""
    draws, bodies = random.Random(path), []

    @given(schemathesis.openapi.from_dict(document)[path]["POST"].as_strategy())
    @settings(max_examples=BY_SCHEMA, **GIVEN)
    def collect(case: Any) -> None:
        body = dict(case.body) if isinstance(case.body, dict) else case.body
        if isinstance(body, dict) and draws.random() < 0.9:
            body["model"] = "tiny"
        limit = {"/v1/responses": "max_output_tokens", "/v1/embeddings": "dimensions"}
        if isinstance(body, dict) and draws.random() < 0.8:
            body[limit.get(path, "max_tokens")] = draws.randrange(1, 5)
        bodies.append(body)

    collect()
    return bodies


ODD: Any = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just([]), st.just({}),
    st.sampled_from([2**63, -(2**63), 2**200, 1e308, "tiny", "\x00", "\ud800", "[" * 100, "<think>"]),
    st.lists(st.integers(-5, 600), max_size=5), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip
FUNCTION: Json = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}},
}
GOOD: dict[str, list[Any]] = {
    "best_of": [1], "dimensions": [1, 64], "echo": [True], "encoding_format": ["base64", "float"],
    "frequency_penalty": [-2, 0.5], "instructions": ["be brief", ""], "logit_bias": [{"5": -100, "7": 1.5}],
    "logprobs": [True, 2], "top_logprobs": [0, 3], "max_tokens": [1, 8], "metadata": [{"a": "b"}],
    "min_p": [0.2], "n": [2, 3], "parallel_tool_calls": [False], "presence_penalty": [2], "seed": [0, -7],
    "reasoning_effort": ["low"], "reasoning": [{"effort": "high"}], "repetition_penalty": [1.3],
    "response_format": [{"type": "json_object"}], "stop": ["e", ["a", "\n"]], "stream": [True],
    "stream_options": [{"include_usage": True}], "temperature": [0, 0.7, 2], "top_k": [0, 5], "top_p": [0, 0.5],
    "text": [{"format": {"type": "json_object"}}, {"format": {"type": "text"}}], "user": ["me"],
    "tool_choice": ["none", "required"], "xtc_probability": [0.5], "xtc_threshold": [0.1],
    "tools": [[{"type": "function", "function": FUNCTION}], [{"type": "function", **FUNCTION}]],
}  # fmt: skip
BASES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 3},
    "/v1/embeddings": {"input": ["hi", "there"]},
}


def mutated_bodies(document: Json, path: str) -> list[bytes]:
    """Return valid bodies with some wrong values, and byte slices of them."""
    kind = openapi.route_bodies()[path].accepted.model.__name__
    names = sorted(document["components"]["schemas"][kind]["properties"])
    bodies: list[bytes] = []

    good = st.sampled_from([name for name in names if name in GOOD])

    @given(
        st.lists(
            good.flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(GOOD[name]))),
            max_size=4,
        ),
        st.dictionaries(st.sampled_from([*names, "", "colour"]), ODD, max_size=1),
        st.sampled_from(["whole", "whole", "whole", "whole", "cut", "noise", "part"]),
        st.binary(min_size=1, max_size=6),
        st.integers(0, 60),
        ODD,
    )
    @settings(max_examples=BY_HAND, **GIVEN)
    def collect(
        chosen: list[tuple[str, Any]],
        changes: Json,
        way: str,
        noise: bytes,
        at: int,
        odd_value: Any,
    ) -> None:
        tree = {"model": "tiny", **BASES[path], **dict(chosen), **changes}
        parts = tree.get("messages", tree.get("input"))
        if way == "part" and isinstance(parts, list) and parts and isinstance(parts[0], dict):
            parts = [dict(parts[0])]
            parts[0][("role", "content", "name", "type")[at % 4]] = odd_value
            tree["messages" if "messages" in tree else "input"] = parts
        raw = json.dumps(tree).encode("utf-8", "surrogatepass")
        if way == "cut":
            raw = raw[:at]
        if way == "noise":
            raw = raw[:at] + noise + raw[at:]
        bodies.append(raw)

    collect()
    return bodies


@pytest.fixture(scope="module")
def requests(document: Json) -> list[FuzzRequest]:
    generated = [
        FuzzRequest(path, json.dumps(body).encode())
        for path in BASES
        for body in bodies_by_schema(document, path)
    ]
    generated += [
        FuzzRequest(path, raw) for path in BASES for raw in mutated_bodies(document, path)
    ]
    random.Random(5).shuffle(generated)
    return generated


def send(engine: Engine, request: FuzzRequest) -> Reply:
    return engine.request("POST", request.path, request.body, HEADERS)


def abandon(engine: Engine, request: FuzzRequest) -> None:
    """Send a request and disconnect without reading the answer."""
    with contextlib.closing(engine.connect()) as connection:
        connection.request("POST", request.path, request.body, HEADERS)


def check(request: FuzzRequest, reply: Reply) -> None:
    assert reply.status in ALLOWED, (request, reply)
    if reply.status != 200:
        assert set(reply.error) == {"message", "type", "param", "code"}, (request, reply)
        assert reply.error["message"]
        return
    if not reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.json["object"], (request, reply)
        return
    assert reply.raw.endswith(b"\n\n"), (request, reply)
    last = reply.raw.split(b"\n\n")[-2]
    is_end = last == b"data: [DONE]" or b'"response.' in last or b"request_timeout" in last
    assert is_end, (request, reply)


def memory(engine: Engine) -> tuple[int, int]:
    """Return the memory of the process and of its arrays but cached prefixes, in bytes, once the engine is idle."""
    eventually(lambda: engine.busy() == (0, 0))
    text = engine.request("GET", "/metrics").raw.decode()
    cached = next(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(wire_metrics.ENGINE_PREFIX_CACHE_BYTES)
    )
    active = engine.health().json["activeBytes"] - int(cached)
    return psutil.Process(engine.process.pid).memory_info().rss, active


@pytest.mark.ci
def test_random_requests(own: Engine, requests: list[FuzzRequest]) -> None:
    expected = own.chat(max_tokens=30).json["choices"]
    with ThreadPoolExecutor(6) as pool:
        for request in requests[::17]:
            pool.submit(abandon, own, request)
        replies = list(pool.map(lambda request: send(own, request), requests))
    assert len(replies) >= 0.95 * len(BASES) * (BY_SCHEMA + BY_HAND)
    for request, reply in zip(requests, replies, strict=True):
        check(request, reply)
    statuses = Counter(
        (request.path, reply.status) for request, reply in zip(requests, replies, strict=True)
    )
    for path in BASES:  # else only the JSON parser was tested
        assert statuses[path, 200] >= BY_HAND // 12, statuses
        assert statuses[path, 400] >= BY_HAND // 12, statuses
    assert_no_leak(own, requests[:150])
    assert own.chat(max_tokens=30).json["choices"] == expected
    log = own.stderr.read_text()
    assert "Traceback" not in log
    assert '"outcome": "error"' not in log


def assert_no_leak(engine: Engine, requests: list[FuzzRequest]) -> None:
    """Repeat requests: memory must not grow. Answers without a seed differ, so more prefixes may be cached."""
    rounds = []
    for _ in range(3):
        for request in requests:
            send(engine, request)
        rounds.append(memory(engine))
    (_, _), (rss, active), (last_rss, last_active) = rounds
    assert last_active <= active + (1 << 20), rounds
    assert last_rss <= rss + (8 << 20), rounds


@pytest.mark.ci
def test_the_document_has_every_route_and_every_parameter(own: Engine, document: Json) -> None:
    assert document["openapi"] == "3.1.0"
    paths = document["paths"]
    assert {"/health", "/ready", "/metrics", "/v1/models", "/openapi.json", *BASES} <= set(paths)
    for path, body in openapi.route_bodies().items():
        schema = document["components"]["schemas"][body.accepted.model.__name__]
        assert set(schema["properties"]) == body.accepted.names, path
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) <= body.accepted.names
    for path, operations in paths.items():
        assert all(operation["summary"] for operation in operations.values()), path
        if "get" in operations and "{" not in path:
            status = 403 if path == recent_prompts.ENGINE_PATH else 200
            assert own.request("GET", path).status == status, path
