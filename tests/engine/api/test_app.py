"""The routes of an engine with a tiny model, for OpenAI's own client and for hostile ones."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from machinery.version import version
from tests.support.engine_process import Engine, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def complete(client: openai.OpenAI, text: str, **fields: Any) -> str:
    fields = {"max_tokens": 24, "temperature": 0} | fields
    done = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], **fields
    )
    return done.choices[0].message.content or ""


def stream(client: openai.OpenAI, text: str, **fields: Any) -> tuple[str, list[Any]]:
    fields = {"max_tokens": 24, "temperature": 0} | fields
    with client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], stream=True, **fields
    ) as events:
        chunks = list(events)
    shown = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    return "".join(shown), chunks


def test_a_warning_names_what_was_left_out(engine: Engine) -> None:
    whole = engine.chat(max_tokens=1, mirostat=2, service_tier="flex")
    assert whole.headers["warning"] == '299 mlx-fleet "left out: mirostat, service_tier"'
    assert engine.chat(max_tokens=1, mirostat=2, stream=True).headers["warning"] == (
        '299 mlx-fleet "left out: mirostat"'
    )
    unread = engine.chat(max_tokens=1, chat_template_kwargs={"unread": True})
    assert unread.headers["warning"] == '299 mlx-fleet "left out: chat_template_kwargs"'
    assert "warning" not in engine.chat(max_tokens=1).headers
    metrics = engine.request("GET", "/metrics").raw.decode()
    assert f'fleet_build_info{{process="engine",version="{version()}"}} 1\n' in metrics
    assert 'fleet_engine_ignored_parameters_total{parameter="mirostat"} 2' in metrics


def test_models_and_headers(engine: Engine, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "fast"]
    assert client.models.retrieve("fast").id == "fast"
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("nobody/none")
    headers = engine.chat(model="fast").headers
    assert headers["x-fleet-node"] == "mac-1"
    assert headers["x-fleet-replica"] == "tiny-0"
    assert (headers["x-fleet-in-flight"], headers["x-fleet-queued"]) == ("0", "0")
    assert 0 <= int(headers["x-fleet-memory-free"]) <= 100
    assert 0 <= int(headers["x-fleet-kv-used"]) <= 1_000_000


def test_a_chat_answer_has_openais_form(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0
    )
    assert done.id.startswith("chatcmpl-")
    assert (done.object, done.model) == ("chat.completion", "tiny")
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 5
    assert done.usage.total_tokens == done.usage.prompt_tokens + 5


def test_a_streamed_chat_equals_the_whole(client: openai.OpenAI) -> None:
    for text in ("hello world", "grüße, 世界 🌍", "x"):
        shown, chunks = stream(client, text, stream_options={"include_usage": True}, max_tokens=64)
        assert shown == complete(client, text, max_tokens=64)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 64
        assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_completion_equals_the_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "We hold", "temperature": 0}
    whole = client.completions.create(**options)
    with client.completions.create(stream=True, **options) as events:
        shown = "".join(chunk.choices[0].text for chunk in events)
    assert whole.id.startswith("cmpl-")
    assert whole.choices[0].text == shown
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16


def test_a_batch_gives_the_same_answers_as_single_requests(client: openai.OpenAI) -> None:
    texts = [f"number {n} " + "and more words " * n for n in range(8)]
    alone = [complete(client, text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: complete(client, text), texts))
    assert together == alone
    assert len(set(alone)) > 1


def test_a_seed_gives_the_same_answer_in_any_batch(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 30}
    alone = complete(client, "hello", seed=7, **options)
    with ThreadPoolExecutor(6) as pool:
        futures = [
            pool.submit(complete, client, "hello", seed=seed, **options)
            for seed in (1, 7, 2, 7, -3)
        ]
        futures.append(pool.submit(complete, client, "something else", max_tokens=40))
        answers = [future.result() for future in futures]
    assert answers[1] == answers[3] == alone
    assert len({answers[0], answers[1], answers[2], answers[4]}) == 4
    # Without a seed, each answer differs.
    assert complete(client, "hello", **options) != complete(client, "hello", **options)


def test_stop_words_match_text_across_tokens(client: openai.OpenAI) -> None:
    full = complete(client, "hello", max_tokens=60)
    for start, length in ((3, 5), (10, 4), (20, 9)):
        stop = full[start : start + length]
        expected = full[: full.find(stop)]
        assert complete(client, "hello", max_tokens=60, stop=stop) == expected
        shown, chunks = stream(client, "hello", max_tokens=60, stop=["zzzz", stop])
        assert shown == expected
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_disconnects_frees_its_slot(engine: Engine, *, is_streamed: bool) -> None:
    before = engine.health().json["steps"]
    connection = engine.begin(max_tokens=4000, stream=is_streamed)
    eventually(lambda: engine.busy() == (1, 0))
    eventually(lambda: engine.health().json["steps"] > before + 3)
    connection.close()
    eventually(lambda: engine.busy() == (0, 0), within_s=5)
    assert engine.health().json["steps"] < before + 3000


def test_a_request_over_the_context_is_refused(engine: Engine, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096") as caught:
        complete(client, "hello", max_tokens=4096)
    assert caught.value.code == "context_length_exceeded"
    reply = engine.chat("abc " * 6000)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


# Each of these ends the generation thread or the process of mlx_lm.server.
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"stop": [1]}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/chat/completions", {"xtc_probability": 0.5, "xtc_threshold": 0.9}),
    ("/v1/chat/completions", {"logit_bias": {"999999": 5}}),
    ("/v1/chat/completions", {"messages": "abc"}),
    ("/v1/chat/completions", {"model": "/nonexistent"}),
    ("/v1/chat/completions", {"max_tokens": 0}),
    ("/v1/chat/completions", {"top_k": 2**40, "temperature": 1}),
    ("/v1/completions", {"prompt": [999999]}),
    ("/v1/completions", {"prompt": [-1]}),
]


@pytest.mark.parametrize(("path", "fields"), HOSTILE, ids=str)
def test_hostile_requests_are_refused(engine: Engine, path: str, fields: dict[str, Any]) -> None:
    base: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    )
    reply = engine.post(path, **base | fields)
    assert reply.status in (400, 404), reply.raw
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert engine.chat().status == 200


def test_a_top_k_over_the_vocabulary_has_no_effect(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1, "seed": 4}
    expected = complete(client, "x", **options)
    assert complete(client, "x", **options, extra_body={"top_k": 1_000_000}) == expected


def test_an_answer_can_be_continued_as_a_prompt(client: openai.OpenAI) -> None:
    # Prompt and output as a new prompt are an exact cache hit, which crashes mlx_lm.server.
    first = client.completions.create(model="tiny", prompt="We hold", max_tokens=4, temperature=0)
    again = client.completions.create(
        model="tiny", prompt="We hold" + first.choices[0].text, max_tokens=4, temperature=0
    )
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/chat/completions", b"[1]", 400),
        ("POST", "/v1/chat/completions", b" " * (9 << 20), 413),
        ("GET", "/v1/chat/completions", None, 405),
        ("POST", "/health", b"", 405),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/models/", None, 404),
    ],
    ids=lambda value: str(value)[:24],
)
def test_every_refusal_has_the_error_envelope(
    engine: Engine, method: str, path: str, body: bytes | None, status: int
) -> None:
    reply = engine.request(method, path, body)
    assert reply.status == status
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.headers["x-fleet-node"] == "mac-1"


@pytest.mark.parametrize("count", [4097, 49_000])
def test_a_huge_number_of_messages_is_refused_at_once(engine: Engine, count: int) -> None:
    """This many would fill the tokenizer's thread for a minute, also after the client has left."""
    messages = [{"role": "user", "content": "x"}] * count
    raw = json.dumps({"model": "tiny", "messages": messages}, separators=(",", ":")).encode()
    reply = engine.request("POST", "/v1/chat/completions", raw)
    limit = (1 << 20) + 64 * 4096
    assert reply.status == (400 if len(raw) <= limit else 413)
    assert str(limit if reply.status == 413 else count) in reply.error["message"]


def test_a_text_that_cannot_fit_the_context_is_not_tokenized(engine: Engine) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 400_000}]}),
        ("/v1/completions", {"prompt": "x " * 400_000}),
    ):
        reply = engine.post(path, **fields)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "resulted in at least" in reply.error["message"]
        assert reply.error["param"] in fields


def test_a_body_is_limited_by_what_the_context_can_hold(engine: Engine) -> None:
    body = json.dumps({"model": "tiny", "messages": [], "user": "x" * 1_400_000}).encode()
    reply = engine.request("POST", "/v1/chat/completions", body)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    # A completion may have a prompt for each slot.
    assert engine.request("POST", "/v1/completions", body).status == 400


def test_a_schema_whose_patterns_meet_is_refused_by_its_place(engine: Engine) -> None:
    """Compiling it would stop all chats of the engine."""
    patterns = [{"type": "string", "pattern": f".*{n}.*"} for n in range(200)]
    schema = {"type": "object", "properties": {"a": {"allOf": patterns}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = engine.chat(response_format=wanted)
    assert (reply.status, reply.error["param"]) == (400, "response_format.json_schema.schema")
    assert "$.properties.a" in reply.error["message"]


def test_a_schema_that_is_too_costly_to_follow_is_the_clients_error(engine: Engine) -> None:
    """Another engine would fail alike, so no gateway may repeat the request."""
    pattern = {"type": "string", "pattern": "^((a{100}){100}){100}$"}
    schema = {"type": "object", "properties": {"a": pattern}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = engine.chat(response_format=wanted, max_tokens=3000)
    assert (reply.status, reply.error["code"]) == (400, "schema_too_complex")
    assert reply.error["param"] == "response_format.json_schema.schema"
    assert "faults_total 0" in engine.request("GET", "/metrics").raw.decode()


PAGE = {"origin": "http://evil.example"}


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        (PAGE, "origin"),
        ({"origin": "null"}, "origin"),
        ({"origin": "http://localhost:4100"}, "origin"),
        ({"host": "evil.example"}, "host"),
        ({"host": "evil.example:4100"}, "host"),
        ({"host": ""}, "host"),
    ],
    ids=str,
)
def test_web_pages_are_refused_on_every_path(
    engine: Engine, headers: dict[str, str], param: str
) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/health"),
        ("GET", "/cache"),
        ("GET", "/v1/nothing"),
    ):
        reply = engine.request(method, path, b"{}", headers)
        assert (reply.status, reply.error["param"]) == (403, param), path
        assert "gateway" in reply.error["message"]
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:4100", "10.1.2.3:4100"])
def test_own_names_and_addresses_are_accepted(engine: Engine, host: str) -> None:
    assert engine.chat(headers={"host": host}).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_must_be_declared_as_json(engine: Engine, kind: str) -> None:
    reply = engine.chat(headers={"content-type": kind})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    for accepted in ("Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert engine.chat(headers={"content-type": accepted}).status == 200


def test_a_large_body_without_a_length_is_refused(engine: Engine) -> None:
    connection = engine.connect()
    parts = (b" " * 65536 for _ in range(200))
    try:
        connection.request("POST", "/v1/completions", parts, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413
        assert "error" in json.loads(response.read())
    finally:
        connection.close()


def test_prompts_are_shown_to_nobody_without_the_certificate_of_the_node(engine: Engine) -> None:
    reply = engine.request("GET", "/cache/prompts")
    assert (reply.status, reply.error["code"]) == (403, "agent_only")


def test_cached_tokens_tell_nothing_of_other_keys(engine: Engine) -> None:
    secret = "the code of the safe is 7 4 1 9 2 5 " * 8
    alice, bob = ({"x-fleet-cache-salt": digit * 32} for digit in "ab")

    def cached(headers: dict[str, str], path: str = "chat", **fields: Any) -> int:
        if path == "responses":
            reply = engine.post("/v1/responses", headers=headers, input=secret, **fields)
            found = reply.json["usage"]["input_tokens_details"]["cached_tokens"]
        else:
            reply = engine.chat(secret, headers=headers, **fields)
            found = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(found)

    assert cached(alice) == 0
    assert cached(bob) == 0
    assert cached({}) < 20  # the beginning of every chat
    assert cached(alice) > 100
    assert cached(alice, cache_salt="project") == 0
    assert cached(alice, cache_salt="project") > 100
    assert cached(bob, cache_salt="project") == 0
    assert cached({}, cache_salt=f"{'a' * 32}:project") == 0
    assert cached(bob, "responses", max_output_tokens=4) > 100
    assert cached(bob, "responses", max_output_tokens=4, cache_salt="new") == 0
    for headers, fields, param in (
        ({"x-fleet-cache-salt": "A"}, {}, "x-fleet-cache-salt"),
        ({}, {"cache_salt": ""}, "cache_salt"),
        ({}, {"cache_salt": 7}, "cache_salt"),
        ({}, {"cache_salt": "x" * 513}, "cache_salt"),
    ):
        reply = engine.chat(headers=headers, **fields)
        assert (reply.status, reply.error["param"]) == (400, param)
