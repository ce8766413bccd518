"""Resumption over HTTP: every way to fail, restarts, refusals and limits."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from openai.types.responses import ResponseErrorEvent

from gateway.server import GatewayLimits
from schemas.routing import Resumption, Routing, Timeouts
from tests.support import gateway_engine_scripts
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
from tests.support.gateway_world import Running, World, deployment, published, running_gateway
from tests.support.waiting import until


@asynccontextmanager
async def fleet(
    world: World, gateway: Running, *scripts: Any, routing: Routing | None = None
) -> AsyncIterator[list[FakeEngine]]:
    """Serve "m" with fake engines, one for each script."""
    engines = [FakeEngine(f"m-{at}", script) for at, script in enumerate(scripts)]
    for engine in engines:
        await engine.start()
    declared = deployment("m", replicas=len(engines))
    if routing is not None:
        spec = declared.spec.model_copy(update={"routing": routing})
        declared = declared.model_copy(update={"spec": spec})
    await world.put(declared, *(published(fake_engine, "m") for fake_engine in engines))
    await gateway.knows("m", ready=len(engines))
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.kill()


async def ask(http: aiohttp.ClientSession, gateway: Running, path: str, body: Any) -> bytes:
    async with http.post(gateway.url + path, json=body) as response:
        raw = await response.read()
        assert response.status == 200, raw
        assert response.headers["x-fleet-attempts"] == "1"
        return raw


RESPONSE: dict[str, Any] = {"model": "m", "input": "x", "stream": True}


def resumptions(gateway: Running, outcome: str = "resumed") -> float:
    return gateway.gateway.metrics.resumptions.value(outcome)


@pytest.mark.parametrize("ends", ENDS)
async def test_every_way_to_fail(
    world: World, gateway: Running, http: aiohttp.ClientSession, ends: str
) -> None:
    """Cut at every event, inside and after it."""
    engine = Marked(ends=ends)
    count = 0
    async with fleet(world, gateway, engine, engine):
        for path, body in CASES:
            at = 0
            for event in events(Request(path, body))[:-1]:
                at += len(event)
                engine.cuts = [at + 5 if at % 2 else at]
                engine.bodies.clear()
                assert await ask(http, gateway, path, body) == expected_stream(path, body)
                count += 1
        # If only [DONE] is missing, no engine is needed.
        assert count - 1 <= resumptions(gateway) <= count
        assert gateway.gateway.metrics.requests.value("m", "ok") == count
    entry = gateway.gateway.recorder.journal.last(1)[0]
    assert (entry.prompt_tokens, entry.cached_tokens, entry.output_tokens) == (11, 4, 8)
    assert entry.resumptions == 1
    assert [attempt.outcome for attempt in entry.attempts] == ["interrupted", "resumed"]
    assert [bool(attempt.why) for attempt in entry.attempts] == [True, False]


async def test_the_next_engine_gets_the_emitted_tokens(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    told = events(Request(CHAT, BODY))
    engine = Marked(cuts=[sum(map(len, told[:3])) + 9])
    async with fleet(world, gateway, engine, engine):
        await ask(http, gateway, CHAT, BODY)
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


async def test_a_single_restarted_engine_continues(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    engine = Marked(cuts=[700], ends="dies")
    async with (
        fleet(world, gateway, engine) as (first,),
        http.post(gateway.url + CHAT, json=WITH_USAGE) as response,
    ):
        begun = await response.content.readuntil(b"\n\n")
        await until(lambda: not engine.cuts, what="the death")
        await first.kill()
        second = FakeEngine("m-0", engine)
        async with running(second):
            await world.put(published(second, "m"))
            raw = begun + await response.content.read()
    assert clean(raw) == expected_stream(CHAT, WITH_USAGE)
    assert resumptions(gateway) == 1


async def test_a_broken_connection_continues_on_the_same_engine(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    engine = Marked(cuts=[500, 3])
    async with fleet(world, gateway, engine):
        assert clean(await ask(http, gateway, CHAT, BODY)) == expected_stream(CHAT, BODY)
    assert resumptions(gateway) == 1


async def test_no_engine_left(world: World, http: aiohttp.ClientSession) -> None:
    async with running_gateway(
        world.transport, GatewayLimits(resume_timeout_s=0.3, hold_timeout_s=0.3)
    ) as gateway:
        async with (
            fleet(world, gateway, Marked(cuts=[700])) as (engine,),
            http.post(gateway.url + CHAT, json=BODY) as response,
        ):
            await engine.kill()
            raw = await response.read()
        assert DONE not in raw
        error = orjson.loads(raw.rsplit(b"data: ", 1)[1])["error"]
        assert error["code"] == "stream_interrupted"
        assert re.search(r"no replica of 'm' could continue it within", error["message"])
        assert resumptions(gateway, "nobody") == 1
        assert gateway.gateway.metrics.requests.value("m", "interrupted") == 1
        assert gateway.gateway.recorder.journal.last(1)[0].output_tokens > 0


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
async def test_an_engine_that_cannot_continue_is_left_out(
    world: World, http: aiohttp.ClientSession, odd: Any
) -> None:
    limits = GatewayLimits(resume_timeout_s=0.5, hold_timeout_s=0.5)
    async with (
        running_gateway(world.transport, limits) as gateway,
        fleet(world, gateway, unfit(odd), unfit(odd), unfit(odd)) as engines,
    ):
        raw = await ask(http, gateway, CHAT, BODY)
        assert b"Once more" not in raw
        assert raw.endswith(b'"code":"stream_interrupted"}}\n\n')
        engines[2].script = fit
        assert clean(await ask(http, gateway, CHAT, BODY)) == expected_stream()


async def fit(call: Call) -> None:
    is_first = "fleet" not in orjson.loads(call.body)
    await Marked(cuts=[700] if is_first else [])(call)


async def test_what_has_no_marks_ends_as_it_must(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    bodies: list[dict[str, Any]] = [BODY | {"stream_options": None}, BODY]
    async with fleet(
        world,
        gateway,
        gateway_engine_scripts.dies_mid_stream,
        gateway_engine_scripts.dies_mid_stream,
    ) as engines:
        for body in bodies:
            async with http.post(gateway.url + CHAT, json=body) as response:
                raw = await response.read()
            assert raw.count(b"data: ") == 3
            assert b"stream_interrupted" in raw
        calls = [call.headers for engine in engines for call in engine.calls]
    assert ["x-fleet-resumable" in one for one in calls] == [True, True]


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
    world: World, gateway: Running, http: aiohttp.ClientSession
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
        await call.chunk(DONE)
        await call.send(b"0\r\n\r\n")

    expected = clean(b"".join(whole) + DONE)
    async with fleet(world, gateway, script, script):
        for cut in range(1, len(whole) + 1):
            assert clean(await ask(http, gateway, CHAT, BODY | {"n": 2})) == expected, cut
        assert resumptions(gateway) == len(whole)


@pytest.mark.parametrize("deaths", [0, 1, 2])
async def test_a_trailer_tells_how_often_a_stream_continued(
    world: World, gateway: Running, deaths: int
) -> None:
    engine = Marked(cuts=[400] * deaths)
    body = orjson.dumps(BODY)
    async with fleet(world, gateway, engine, engine):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(gateway.url.rpartition(":")[2])
        )
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        raw = await reader.read()
        writer.close()
    end = raw.rpartition(b"data: [DONE]\n\n\r\n")[2]
    trailer = b"x-fleet-resumed: %d\r\n" % deaths if deaths else b""
    assert end == b"0\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize("ends", ENDS)
async def test_every_way_to_fail_in_a_response(
    world: World, gateway: Running, http: aiohttp.ClientSession, ends: str
) -> None:
    """Cut before, inside and behind each event and comment: the client's events have no seam."""
    engine = Marked(ends=ends)
    count = 0
    async with fleet(world, gateway, engine, engine):
        first, *blocks = events(Request(RESPONSES, RESPONSE))
        at = len(first)
        for block in blocks:
            for cut in {at + 1, at + len(block) // 2, at + len(block)}:
                engine.cuts, engine.bodies = [cut, cut // 2], []
                raw = await ask(http, gateway, RESPONSES, RESPONSE)
                assert clean(raw) == expected_stream(RESPONSES, RESPONSE), (ends, cut)
                count += len(engine.bodies) - 1
            at += len(block)
    assert count > 30
    assert gateway.gateway.metrics.resumptions.value("nobody") == 0


async def test_an_event_without_end_is_not_kept(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    whole = events(Request(RESPONSES, RESPONSE))

    async def floods(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"".join(whole[:4]))
        event = b"event: response.x\ndata: {" + b"x" * (1 << 20) + b"}\n\n"
        for _ in range(20):
            await call.chunk(event)

    engine = Marked()
    async with fleet(world, gateway, floods, engine):
        for _ in range(8):  # until it was the first one's turn
            engine.bodies = []
            raw = await ask(http, gateway, RESPONSES, RESPONSE)
            assert clean(raw) == expected_stream(RESPONSES, RESPONSE)
        assert resumptions(gateway) >= 1


async def test_a_response_that_the_engine_refuses_late_is_not_resumed(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    whole = events(Request(RESPONSES, RESPONSE))
    failed = b'event: response.failed\ndata: {"type":"response.failed","sequence_number":2}\n\n'
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}

    async def refuses(call: Call) -> None:
        await call.begin_stream()
        comment = b": fleet " + orjson.dumps({"error": error}) + b"\n\n"
        await call.chunk(b"".join(whole[:4]) + failed)
        await call.chunk(comment)
        await call.send(b"0\r\n\r\n")

    async with fleet(world, gateway, refuses):
        raw = await ask(http, gateway, RESPONSES, RESPONSE)
    assert raw == b"".join(whole[1:3]) + failed


async def test_a_response_ends_in_its_own_words(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async def dies(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'event: x\ndata: {"type":"x","sequence_number":41}\n\n')
        await asyncio.sleep(0.02)
        call.die()

    async with fleet(world, gateway, dies) as (engine,):
        asked = {"model": "m", "input": "x", "stream": True}
        async with http.post(f"{gateway.url}/v1/responses", json=asked) as response:
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


OTHERS = {
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "/api/generate": {"model": "m", "prompt": "x"},
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 99,
        "stream": True,
    },
}


@pytest.mark.parametrize("path", OTHERS)
async def test_clients_of_other_apis_notice_nothing_either(
    world: World, gateway: Running, http: aiohttp.ClientSession, path: str
) -> None:
    def text(raw: bytes) -> str:
        found = re.findall(rb'"(?:content|response|text)":("(?:[^"\\]|\\.)*")', raw)
        return "".join(orjson.loads(one) for one in found)

    engine = Marked()
    async with fleet(world, gateway, engine, engine):
        whole = text(await ask(http, gateway, path, OTHERS[path]))
        engine.bodies.clear()
        engine.cuts = [1200]
        assert text(await ask(http, gateway, path, OTHERS[path])) == whole
    assert len(whole) > 10
    assert resumptions(gateway) == 1


async def test_it_can_be_turned_off(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    off = Routing(resumption=Resumption(max_resumptions=0))
    async with fleet(world, gateway, gateway_engine_scripts.chat, routing=off) as (engine,):
        await ask(http, gateway, CHAT, BODY)
        assert "x-fleet-resumable" not in engine.calls[0].headers


async def test_a_long_stream_is_not_kept(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    short = Routing(resumption=Resumption(max_tokens=3))
    engine = Marked(length=40, cuts=[4000])
    async with (
        fleet(world, gateway, engine, engine, routing=short),
        http.post(gateway.url + CHAT, json=BODY) as response,
    ):
        assert b"more than 3 tokens" in await response.read()
    assert resumptions(gateway, "too_long") == 1


async def test_silence_is_a_death(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
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

    quick = Routing(timeouts=Timeouts(attempt="1s"))
    async with fleet(world, gateway, hangs, hangs, routing=quick):
        assert await ask(http, gateway, CHAT, BODY) == expected_stream()
    assert resumptions(gateway) == 1


async def test_clients_cannot_use_resumption(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """Clients get no comments if they ask for them, and cannot send tokens."""
    async with fleet(world, gateway, gateway_engine_scripts.chat) as (engine,):
        headers = {"x-fleet-resumable": "1"}
        plain = {"model": "m", "messages": []}
        async with http.post(gateway.url + CHAT, json=plain, headers=headers) as response:
            assert response.status == 200
        assert engine.calls[0].headers["x-fleet-resumable"] == "1"  # the gateway's own
        for body in (
            orjson.dumps(BODY | {"fleet": {"tokens": [1]}}),
            orjson.dumps(BODY | {"fleet": None}),
            b'{"model":"m","messages":[],"stream":true,"fl\\u0065et":{"tokens":[1]}}',
            b'{"fleet":1,"model":"m","messages":[],"stream":true,"fleet":null}',
        ):
            async with http.post(gateway.url + CHAT, data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "fleet"
        assert len(engine.calls) == 1


async def test_a_client_that_leaves_ends_the_search(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with fleet(world, gateway, Marked(cuts=[700])) as (engine,):
        async with http.post(gateway.url + CHAT, json=BODY) as response:
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
async def test_a_whole_answer_goes_on_where_its_engine_ended(
    world: World, gateway: Running, http: aiohttp.ClientSession, end: str
) -> None:
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

    async with (
        fleet(world, gateway, engine, engine, engine),
        http.post(gateway.url + CHAT, json=WHOLE) as response,
    ):
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


async def test_a_whole_answer_begins_anew_where_the_model_differs(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
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

    async with (
        fleet(world, gateway, engine, engine),
        http.post(gateway.url + CHAT, json=WHOLE) as response,
    ):
        assert response.status == 200
        assert "x-fleet-resumed" not in response.headers
    assert ["fleet" in body for body in bodies] == [False, True, False]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_an_engine_that_makes_progress_is_not_silent(
    world: World, http: aiohttp.ClientSession, path: str
) -> None:
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
    async with running_gateway(world.transport, limits) as gateway, fleet(world, gateway, slow):
        async with http.post(gateway.url + path, json=WHOLE) as response:
            assert response.status == 200, await response.text()
            assert response.headers["x-fleet-attempts"] == "1"
        async with http.post(gateway.url + path, json=WHOLE) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (504, "upstream_timeout")
            assert "silent for 1 s" in error["message"]
            assert "spec.routing.timeouts.attempt" in error["message"]
