"""Resumption over HTTP: every way to fail, restarts, refusals and limits."""

import asyncio
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import ResponseErrorEvent

from gateway.limits import GatewayLimits
from tests.support import gateway_engine_scripts
from tests.support.gateway_calls import with_routing
from tests.support.gateway_engine_scripts import delta
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_resume_engine import (
    BODY,
    CASES,
    CHAT,
    DONE,
    ENDS,
    RESPONSES,
    WITH_USAGE,
    Marked,
    Request,
    clean,
    events,
    expected_stream,
)
from tests.support.gateway_world import Running, World, published, running_gateway
from tests.support.waiting import until


async def ask(gateway: Running, path: str, body: Any) -> bytes:
    async with gateway.post(path, json=body) as response:
        raw: bytes = await response.read()
        assert response.status == 200, raw
        assert response.headers["x-fleet-attempts"] == "1"
        return raw


RESPONSE: dict[str, Any] = {"model": "m", "input": "x", "stream": True}


def resumptions(gateway: Running, outcome: str = "resumed") -> float:
    return gateway.gateway.metrics.resumptions.value(outcome)


@pytest.mark.parametrize("ends", ENDS)
async def test_every_way_to_fail(gateway: Running, ends: str) -> None:
    """Cut at every event, inside and after it."""
    engine = Marked(ends=ends)
    count = 0
    await gateway.serve(engine, engine)
    for path, body in CASES:
        at = 0
        for event in events(Request(path, body))[:-1]:
            at += len(event)
            engine.cuts = [at + 5 if at % 2 else at]
            engine.bodies.clear()
            assert await ask(gateway, path, body) == expected_stream(path, body)
            count += 1
    # If only [DONE] is missing, no engine is needed.
    assert count - 1 <= resumptions(gateway) <= count
    assert gateway.gateway.metrics.requests.value("m", "ok") == count
    entry = gateway.gateway.recorder.journal.last(1)[0]
    assert (entry.prompt_tokens, entry.cached_tokens, entry.output_tokens) == (11, 4, 8)
    assert entry.resumptions == 1
    assert [attempt.outcome for attempt in entry.attempts] == ["interrupted", "resumed"]
    assert [bool(attempt.why) for attempt in entry.attempts] == [True, False]


async def test_the_next_engine_gets_the_emitted_tokens(gateway: Running) -> None:
    told = events(Request(CHAT, BODY))
    engine = Marked(cuts=[sum(map(len, told[:3])) + 9])
    await gateway.serve(engine, engine)
    await ask(gateway, CHAT, BODY)
    first, second = engine.bodies
    assert first == BODY
    tokens = [t for e in told[:3] for t in orjson.loads(e.split(b"\n")[0][8:])["tokens"]]
    assert second.pop("fleet") == {
        "tokens": tokens,
        "seed": 6,
        "prompt": Request(CHAT, BODY).prompt,
        "id": "x-1",
        "created": 1_700_000_000,
        "cached_tokens": 4,
    }
    assert second == BODY


async def test_a_single_restarted_engine_continues(gateway: Running) -> None:
    engine = Marked(cuts=[700], ends="dies")
    (first,) = await gateway.serve(engine)
    async with gateway.post(json=WITH_USAGE) as response:
        begun = await response.content.readuntil(b"\n\n")
        await until(lambda: not engine.cuts, what="the death")
        await first.kill()
        second = FakeEngine("m-0", engine)
        async with running(second):
            await gateway.world.put(published(second, "m"))
            raw = begun + await response.content.read()
    assert clean(raw) == expected_stream(CHAT, WITH_USAGE)
    assert resumptions(gateway) == 1


async def differs(call: Call) -> None:
    """An engine with another tokenizer."""
    error = {"message": "The prompt differs.", "code": "prompt_differs"}
    await call.answer(orjson.dumps({"error": error}), 409)


async def begins_anew(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("Once more: ") + DONE)
    await call.send(b"0\r\n\r\n")


def unfit(odd: Any) -> Any:
    """An engine that dies in each stream and continues none."""

    async def script(call: Call) -> None:
        await (odd if "fleet" in orjson.loads(call.body) else Marked(cuts=[700]))(call)

    return script


@pytest.mark.parametrize(
    "odd", [differs, begins_anew, gateway_engine_scripts.refuses(503, "draining")]
)
async def test_an_engine_that_cannot_continue_is_left_out(odd: Any) -> None:
    limits = GatewayLimits(resume_timeout_s=0.5, hold_timeout_s=0.5)
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(*[unfit(odd)] * 3)
        raw = await ask(gateway, CHAT, BODY)
        assert b"Once more" not in raw
        assert raw.endswith(b'"code":"stream_interrupted"}}\n\n')
    async with running_gateway() as gateway:
        await gateway.serve(unfit(odd), unfit(odd), fit)
        assert clean(await ask(gateway, CHAT, BODY)) == expected_stream()


async def fit(call: Call) -> None:
    is_first = "fleet" not in orjson.loads(call.body)
    await Marked(cuts=[700] if is_first else [])(call)


def chunk_of(at: int, choice: int, last: int) -> bytes:
    """Return a chunk of one of two choices, as an engine sends it: one token, or the end."""
    is_end = at == last
    mark: dict[str, Any] = {"tokens": [] if is_end else [10 * choice + at]}
    if choice:
        mark["choice"] = choice
    if is_end:
        mark["usage"] = {"prompt_tokens": 1, "completion_tokens": 2 * last}
    mark |= {"seed": 5, "prompt": "p", "id": "x-1", "created": 1, "prompt_tokens": 1}
    text = {} if is_end else {"content": f"{choice}{at} "}
    shown = {"index": choice, "delta": text, "finish_reason": "stop" if is_end else None}
    data = {"id": "x-1", "choices": [shown]}
    return b": fleet " + orjson.dumps(mark) + b"\ndata: " + orjson.dumps(data) + b"\n\n"


async def test_several_choices_continue_where_each_of_them_was(
    world: World, gateway: Running
) -> None:
    # The second choice ends long before the first.
    order = [(0, 0), (0, 1), (1, 1), (2, 1), (1, 0), (2, 0), (3, 0), (4, 0)]
    lengths = [4, 2]
    whole = [chunk_of(at, choice, lengths[choice]) for at, choice in order]
    cut = 0

    async def script(call: Call) -> None:
        fleet_ = orjson.loads(call.body).get("fleet")
        await call.begin_stream()
        if fleet_ is None:
            for event in whole[:cut]:
                await call.chunk(event)
            await asyncio.sleep(0.02)
            call.die()
            return
        told, finished = fleet_["choices"], fleet_.get("finished", [])
        assert fleet_["seed"] == 5
        for (at, choice), event in zip(order, whole, strict=True):
            is_end = at == lengths[choice]
            if choice not in finished if is_end else at >= len(told[choice]):
                await call.chunk(event)
        first = b": fleet " + orjson.dumps({"tokens": [], **FIRST}) + b"\n"
        await call.chunk(first + DONE if len(finished) == 2 else DONE)
        await call.send(b"0\r\n\r\n")

    expected = clean(b"".join(whole) + DONE)
    await gateway.serve(script, script)
    for cut in range(1, len(whole) + 1):
        assert clean(await ask(gateway, CHAT, BODY | {"n": 2})) == expected, cut
    assert resumptions(gateway) == len(whole)


@pytest.mark.parametrize("ends", ENDS)
async def test_every_way_to_fail_in_a_response(gateway: Running, ends: str) -> None:
    """Cut before, inside and behind each event and comment: the client's events have no seam."""
    engine = Marked(ends=ends)
    count = 0
    await gateway.serve(engine, engine)
    blocks = events(Request(RESPONSES, RESPONSE))
    at, blocks = sum(map(len, blocks[:4])), blocks[4:]  # before that nothing is sent
    for block in blocks:
        for cut in {at + 1, at + len(block) // 2, at + len(block)}:
            engine.cuts, engine.bodies = [cut, cut // 2], []
            raw = await ask(gateway, RESPONSES, RESPONSE)
            assert clean(raw) == expected_stream(RESPONSES, RESPONSE), (ends, cut)
            count += len(engine.bodies) - 1
        at += len(block)
    assert count > 30
    assert gateway.gateway.metrics.resumptions.value("nobody") == 0


async def test_a_response_that_the_engine_refuses_late_is_not_resumed(gateway: Running) -> None:
    whole = events(Request(RESPONSES, RESPONSE))
    failed = b'event: response.failed\ndata: {"type":"response.failed","sequence_number":2}\n\n'
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}

    async def refuses(call: Call) -> None:
        await call.begin_stream()
        comment = b": fleet " + orjson.dumps({"error": error}) + b"\n\n"
        await call.chunk(b"".join(whole[:4]) + failed)
        await call.chunk(comment)
        await call.send(b"0\r\n\r\n")

    await gateway.serve(refuses)
    raw = await ask(gateway, RESPONSES, RESPONSE)
    assert raw == b"".join(whole[1:3]) + failed


async def test_a_response_ends_in_its_own_words(gateway: Running) -> None:
    async def dies(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'event: x\ndata: {"type":"x","sequence_number":41}\n\n')
        await asyncio.sleep(0.02)
        call.die()

    (engine,) = await gateway.serve(dies)
    asked = {"model": "m", "input": "x", "stream": True}
    async with gateway.post("/v1/responses", json=asked) as response:
        raw = await response.read()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
        stream: Any = await client.responses.create(model="m", input="x", stream=True)
        last = [event async for event in stream][-1]
    # It sends no resume comments, so nothing can be continued.
    assert engine.calls[0].headers["x-fleet-resumable"] == "1"
    first, error = raw.split(b"\n\n")[:-1]
    assert first == b'event: x\ndata: {"type":"x","sequence_number":41}'
    told = orjson.loads(error.removeprefix(b"event: error\ndata: "))
    assert (told["type"], told["code"]) == ("error", "stream_interrupted")
    assert told["sequence_number"] == 42
    assert isinstance(last, ResponseErrorEvent)


async def test_it_can_be_turned_off(gateway: Running) -> None:
    off = with_routing("m", resumption={"maxResumptions": 0})
    (engine,) = await gateway.serve(gateway_engine_scripts.chat, of=off)
    await ask(gateway, CHAT, BODY)
    assert "x-fleet-resumable" not in engine.calls[0].headers


async def test_a_long_stream_is_not_kept(gateway: Running) -> None:
    short = with_routing("m", resumption={"maxTokens": 3})
    engine = Marked(length=40, cuts=[4000])
    await gateway.serve(engine, engine, of=short)
    async with gateway.post(json=BODY) as response:
        assert b"more than 3 tokens" in await response.read()
    assert resumptions(gateway, "too_long") == 1


async def test_silence_is_a_death(gateway: Running) -> None:
    engine = Marked()

    async def hangs(call: Call) -> None:
        if engine.bodies:
            await engine(call)
            return
        engine.bodies.append(orjson.loads(call.body))
        data = b"".join(events(Request(call.path, engine.bodies[0]), id_="x-1"))
        await call.begin_stream()
        await call.chunk(data[:800])
        await asyncio.Event().wait()

    quick = with_routing("m", timeouts={"attempt": "1s"})
    await gateway.serve(hangs, hangs, of=quick)
    assert await ask(gateway, CHAT, BODY) == expected_stream()
    assert resumptions(gateway) == 1


async def test_clients_cannot_use_resumption(gateway: Running) -> None:
    """Clients get no comments if they ask for them, and cannot send tokens."""
    (engine,) = await gateway.serve(gateway_engine_scripts.chat)
    headers = {"x-fleet-resumable": "1"}
    plain = {"model": "m", "messages": []}
    async with gateway.post(json=plain, headers=headers) as response:
        assert response.status == 200
    assert engine.calls[0].headers["x-fleet-resumable"] == "1"  # the gateway's own
    for body in (
        orjson.dumps(BODY | {"fleet": {"tokens": [1]}}),
        orjson.dumps(BODY | {"fleet": None}),
        b'{"model":"m","messages":[],"stream":true,"fl\\u0065et":{"tokens":[1]}}',
        b'{"fleet":1,"model":"m","messages":[],"stream":true,"fleet":null}',
    ):
        async with gateway.post(data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "fleet"
    assert len(engine.calls) == 1


async def test_a_client_that_leaves_ends_the_search(gateway: Running) -> None:
    (engine,) = await gateway.serve(Marked(cuts=[700]))
    async with gateway.post(json=BODY) as response:
        await response.content.readuntil(b"\n\n")
        await engine.kill()
    await until(
        lambda: gateway.gateway.metrics.requests.value("m", "client_gone") == 1, what="the end"
    )
    assert gateway.gateway.load_tracker.total() == 0


WHOLE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
FIRST = {"seed": 6, "prompt": "ab", "id": "x-1", "created": 7, "cached_tokens": 4}


async def progress(call: Call, *comments: dict[str, Any]) -> None:
    """Send interim responses: signs of progress, with the resume comments of a whole answer if there are any."""
    lines = [b"x-fleet-resume: %b\r\n" % orjson.dumps(comment) for comment in comments] or [b""]
    for line in lines:
        await call.send(b"HTTP/1.1 102 Processing\r\n%b\r\n" % line)


@pytest.mark.parametrize("end", ["dies", "drains"])
async def test_a_whole_answer_goes_on_where_its_engine_ended(gateway: Running, end: str) -> None:
    bodies: list[dict[str, Any]] = []

    async def engine(call: Call) -> None:
        bodies.append(orjson.loads(call.body))
        number = len(bodies)
        if number < 3:
            first = {"tokens": [10, 11], **FIRST} if number == 1 else {"tokens": [12]}
            await progress(call, first)
            await progress(call, {"tokens": []})
            if end == "dies":
                call.die()
            else:
                await call.answer(b'{"error":{"message":"ends","code":"draining"}}', 503)
        else:
            await gateway_engine_scripts.chat(call)

    await gateway.serve(*[engine] * 3)
    async with gateway.post(json=WHOLE) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["choices"]
        assert response.headers["x-fleet-attempts"] == "3"
        assert response.headers["x-fleet-resumed"] == "1"
    assert bodies == [
        WHOLE,
        WHOLE | {"fleet": {"tokens": [10, 11], **FIRST}},
        WHOLE | {"fleet": {"tokens": [10, 11, 12], **FIRST}},
    ]
    assert resumptions(gateway) == 1
    entry = gateway.gateway.recorder.journal.last(1)[0]
    assert entry.attempts[-1].outcome == "resumed"


async def test_a_whole_answer_begins_anew_where_the_model_differs(gateway: Running) -> None:
    bodies: list[dict[str, Any]] = []

    async def engine(call: Call) -> None:
        bodies.append(orjson.loads(call.body))
        if len(bodies) == 1:
            await progress(call, {"tokens": [10], **FIRST})
            call.die()
        elif "fleet" in bodies[-1]:
            await call.answer(b'{"error":{"message":"x","code":"prompt_differs"}}', 409)
        else:
            await gateway_engine_scripts.chat(call)

    await gateway.serve(engine, engine)
    async with gateway.post(json=WHOLE) as response:
        assert response.status == 200
        assert "x-fleet-resumed" not in response.headers
    assert ["fleet" in body for body in bodies] == [False, True, False]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_an_engine_that_makes_progress_is_not_silent(path: str) -> None:
    """Whole answers, long prompts and places in the queue: only an engine that stands still is given up."""
    silence_s, calls = 1.0, 0

    async def slow(call: Call) -> None:
        nonlocal calls
        calls += 1
        assert float(call.headers["x-fleet-progress"]) == pytest.approx(silence_s / 3, rel=0.01)
        for _ in range(16 if calls == 1 else 4):
            await progress(call)
            await asyncio.sleep(silence_s / 6)
        if calls == 1:
            await gateway_engine_scripts.chat(call)
        else:
            await asyncio.sleep(60)

    limits = GatewayLimits(drain_timeout_s=0, resume_timeout_s=0.1, request_timeout_s=silence_s)
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(slow)
        async with gateway.post(path, json=WHOLE) as response:
            assert response.status == 200, await response.text()
            assert response.headers["x-fleet-attempts"] == "1"
        async with gateway.post(path, json=WHOLE) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (504, "upstream_timeout")
            assert "silent for 1 s" in error["message"]
            assert "spec.routing.timeouts.attempt" in error["message"]
