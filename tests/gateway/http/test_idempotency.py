"""Idempotency keys: one answer for a request that is sent again, one run for two at a time."""

import asyncio
from datetime import UTC, datetime

import openai
import pytest

from gateway.http import idempotency
from gateway.http.idempotency import IdempotencyTable
from machinery.clock import SystemClock
from schemas.wire.errors import RefusedError
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_engine_scripts import chat, completion
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": []}


async def test_a_repeated_request_gets_the_first_answer(gateway: Running) -> None:
    async def numbered(call: Call) -> None:
        await call.answer(completion(f"answer {len(call.engine.calls)}"))

    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
    ) as client:
        (engine,) = await gateway.serve(numbered)

        async def ask(key: str, text: str = "hi") -> tuple[str | None, str | None]:
            answer = await client.chat.completions.with_raw_response.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                extra_headers={"Idempotency-Key": key},
            )
            content = answer.parse().choices[0].message.content
            return content, answer.headers.get("idempotency-replayed")

        assert await ask("a") == ("answer 1", None)
        assert await ask("a") == ("answer 1", "true")
        assert await ask("b") == ("answer 2", None)
        assert len(engine.calls) == 2
        with pytest.raises(openai.ConflictError, match="another body"):
            await ask("a", "ho")
        with pytest.raises(openai.BadRequestError, match="1 to 255"):
            await ask("x" * 256)


async def test_a_repetition_is_a_request_of_its_key(gateway: Running) -> None:
    await put_api_key(gateway.world, "sk-fleet-one", requests_per_minute=2, tokens_per_minute=100)
    keyring = gateway.gateway.fleet_state.keyring
    (engine,) = await gateway.serve(chat)
    await until(lambda: keyring.find(b"sk-fleet-one"), what="the key")

    async def ask(secret: str) -> tuple[int, str | None, str]:
        headers = {"idempotency-key": "k", "authorization": f"Bearer {secret}"}
        async with gateway.post(json=BODY, headers=headers) as answer:
            await answer.read()
            remaining = answer.headers.get("x-ratelimit-remaining-tokens", "")
            return answer.status, answer.headers.get("idempotency-replayed"), remaining

    assert (await ask("sk-fleet-one"))[:2] == (200, None)
    assert (await ask("sk-fleet-one"))[:2] == (200, "true")
    assert (await ask("sk-fleet-one"))[:2] == (429, None)
    principal = keyring.find(b"sk-fleet-one")
    assert principal is not None
    assert (principal.limiter.in_flight, principal.limiter.requests_used) == (0, 2)
    # Another key that gets the name later is not given the answers of the first.
    created = datetime(2026, 2, 2, tzinfo=UTC)
    await put_api_key(gateway.world, "sk-fleet-two", created=created)
    await until(lambda: keyring.find(b"sk-fleet-two"), what="the new key")
    assert (await ask("sk-fleet-two"))[:2] == (200, None)
    assert len(engine.calls) == 2


async def test_two_at_a_time_become_one(gateway: Running) -> None:
    held = asyncio.Event()

    async def slow(call: Call) -> None:
        await held.wait()
        await chat(call)

    key = {"idempotency-key": "k"}
    (engine,) = await gateway.serve(slow)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.post(json=BODY, headers=key))
        await until(lambda: len(engine.calls) == 1)
        async with gateway.post(json=BODY, headers=key) as second:
            assert second.status == 409
            assert second.headers["retry-after"] == "1"
            assert (await second.json())["error"]["code"] == "idempotency_key_in_use"
        held.set()
    assert (await first).status == 200
    async with gateway.post(json=BODY, headers=key) as third:
        assert third.headers["idempotency-replayed"] == "true"
    assert len(engine.calls) == 1


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_streams_and_failures_run_anew(gateway: Running, *, is_streamed: bool) -> None:
    async def refusing(call: Call) -> None:
        await (chat(call) if is_streamed else call.answer(b'{"error": {"message": "x"}}', 400))

    key, body = {"idempotency-key": "k"}, {**BODY, "stream": is_streamed}
    (engine,) = await gateway.serve(refusing)
    for _ in range(2):
        async with gateway.post(json=body, headers=key) as response:
            await response.read()
    # A refusal of the engine is an answer like others.
    assert len(engine.calls) == (2 if is_streamed else 1)
    assert len(gateway.gateway.handler.idempotency) == (0 if is_streamed else 1)


def test_the_table_is_bounded() -> None:
    table = IdempotencyTable(SystemClock(), max_entries=3, max_bytes=250)
    held = table.begin("", "/", b"running", b"")
    for number in range(9):
        entry = table.begin("", "/", b"%d" % number, b"")
        table.complete(entry, 200, b"", b"x" * 100)
    assert len(table) == 3
    assert table.begin("", "/", b"8", b"").status == 200
    assert table.begin("", "/", b"0", b"").status == 0
    with pytest.raises(RefusedError):
        table.begin("", "/", b"running", b"")
    table.end(held)
    assert table.begin("other", "/", b"8", b"").status == 0
    large = table.begin("", "/", b"large", b"")
    table.complete(large, 200, b"", b"x" * (idempotency.MAX_ANSWER + 1))
    busy = table.begin("", "/", b"busy", b"")
    table.complete(busy, 503, b"", b"")
    for key in (b"large", b"busy"):
        assert table.begin("", "/", key, b"").status == 0
