"""Requests in flight: the list with what a real engine tells, cancellation, the event stream, and vLLM's names."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from machinery.prometheus import Sample, parse_samples
from schemas.wire import vllm_metrics
from tests.support.engine_process import Engine
from tests.support.gateway_engine_scripts import slow
from tests.support.gateway_real_engine import in_front_of, tiny_engine
from tests.support.gateway_world import Running
from tests.support.prometheus_tools import check_metrics
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(180)]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("in-flight")) as engine:
        yield engine


@pytest.fixture
async def behind(engine: Engine) -> AsyncIterator[Running]:
    async with in_front_of(engine) as gateway:
        yield gateway


async def ask(gateway: Running, request_id: str, **fields: Any) -> aiohttp.ClientResponse:
    message = {"role": "user", "content": "a secret"}
    body = {"model": "tiny", "messages": [message], "max_tokens": 3000, "temperature": 0, **fields}
    headers = {"x-request-id": request_id}
    response: aiohttp.ClientResponse = await gateway.post(json=body, headers=headers)
    return response


async def in_flight(gateway: Running) -> list[Json]:
    async with gateway.get("/api/requests/in-flight") as response:
        assert response.status == 200
        body = await response.json()
    assert body["total"] == len(body["requests"])
    found: list[Json] = body["requests"]
    return found


async def cancel(gateway: Running, request_id: str) -> tuple[int, Json]:
    async with gateway.post(f"/api/requests/{request_id}/cancel") as response:
        return response.status, await response.json()


async def last_entry(gateway: Running) -> Json:
    async with gateway.get("/api/requests/ended?limit=1") as response:
        entry: Json = (await response.json())["requests"][0]
        return entry


async def test_a_stream_is_listed_with_what_its_engine_tells_and_cancelled(
    behind: Running, engine: Engine
) -> None:
    response = await ask(behind, "s/1", stream=True)
    assert (await response.content.readline()).startswith(b"data: ")

    async def is_told() -> Json | None:
        (found,) = await in_flight(behind)
        return found if (found["tokens"] or 0) > 2 else None

    found = await until_async(is_told, limit_s=60, what="tokens of the engine")
    assert "secret" not in json.dumps(found)
    assert (found["id"], found["model"], found["replica"]) == ("s/1", "tiny", "tiny-0")
    assert (found["phase"], found["enginePhase"]) == ("generating", "generating")
    assert found["prefilledTokens"] == found["promptTokens"] > 0
    assert (found["streamed"], found["attempts"], found["worker"]) == (True, 1, "mac-1")
    status, body = await cancel(behind, "s/1")
    assert (status, body["cancelled"]) == (200, 1)
    rest = (await response.read()).decode()
    error = json.loads(rest.strip().rpartition("data: ")[2])["error"]
    assert (error["code"], error["type"]) == ("request_cancelled", "invalid_request_error")
    assert "[DONE]" not in rest
    # At the engine as well; and the journal does not count it as a fault of the fleet.
    await until(lambda: engine.busy() == (0, 0), what="the engine to be idle")
    assert await in_flight(behind) == []
    assert (await last_entry(behind))["status"] == "cancelled"


async def test_a_whole_answer_is_cancelled_before_it_has_begun(
    behind: Running, engine: Engine
) -> None:
    async def is_at_the_engine() -> bool:
        found = await in_flight(behind)
        return bool(found) and found[0]["enginePhase"] is not None

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(ask(behind, "whole"))
        await until_async(is_at_the_engine, limit_s=60, what="the request to be at the engine")
        assert (await in_flight(behind))[0]["phase"] == "prefill"
        assert (await cancel(behind, "whole"))[0] == 200
    response = await waiting
    assert response.status == 499
    assert (await response.json())["error"]["code"] == "request_cancelled"
    await until(lambda: engine.busy() == (0, 0), what="the engine to be idle")
    entry = await last_entry(behind)
    assert (entry["id"], entry["status"], entry["httpStatus"]) == ("whole", "cancelled", 499)


async def test_an_unknown_id(behind: Running) -> None:
    status, body = await cancel(behind, "nobody")
    assert (status, body["error"]["code"]) == (404, "request_not_found")
    assert "fleetctl routes --in-flight" in body["error"]["message"]


async def test_an_engine_that_does_not_tell_costs_its_figures_alone(gateway: Running) -> None:
    """An engine that hangs is waited for one second; the request is listed and cancelled all the same."""
    (silent,) = await gateway.serve(slow(3600), of="tiny")
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(ask(gateway, "mute"))
        await until(lambda: bool(silent.calls), what="the request to be at the engine")
        (found,) = await in_flight(gateway)
        assert (found["id"], found["replica"], found["tokens"]) == ("mute", "tiny-0", None)
        assert (await cancel(gateway, "mute"))[0] == 200
    assert (await waiting).status == 499
    await until(lambda: silent.abandoned >= 1, what="the engine's connection to be closed")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str, Json]]:
    """Yield the name, the id and the data of each event."""
    name = id_ = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("id: "):
            id_ = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield name, id_, json.loads(line.removeprefix("data: "))
            name = id_ = ""


async def test_the_stream_tells_what_ends_and_what_is_in_flight(behind: Running) -> None:
    url, id_ = f"{behind.url}/api/requests/stream", ""
    async with await ask(behind, "before", max_tokens=1) as response:
        await response.read()
    async with behind.http.get(url) as stream:
        assert stream.content_type == "text/event-stream"
        iterator = events(stream)
        first = await anext(iterator)
        assert first[0] == "load", "what ended before is not told"
        running = await ask(behind, "running", stream=True)
        await running.content.readline()
        async for name, _, data in iterator:
            if name == "load" and data["models"].get("tiny") == {"generating": 1}:
                assert data["nodes"] == {"mac-1": {"generating": 1}}
                break
        await cancel(behind, "running")
        running.close()
        async for name, last_id, data in iterator:
            if name == "ended":
                assert (data["id"], data["status"]) == ("running", "cancelled")
                id_ = last_id
                break
    for number in range(2):
        async with await ask(behind, f"later-{number}", max_tokens=1) as response:
            await response.read()
    # A client that comes back is told what it missed.
    async with behind.http.get(url, headers={"last-event-id": id_}) as stream:
        iterator = events(stream)
        missed = [(await anext(iterator))[2]["id"] for _ in range(2)]
    assert missed == ["later-0", "later-1"]
    async with behind.http.get(url, headers={"last-event-id": "1.5~unknown"}) as stream:
        assert (await anext(events(stream)))[0] == "gap"


async def test_streams_are_few(behind: Running) -> None:
    url = f"{behind.url}/api/requests/stream"
    streams = [await behind.http.get(url) for _ in range(16)]
    async with behind.http.get(url) as refused:
        assert refused.status == 429
    for stream in streams:
        stream.close()

    async def is_free() -> bool:
        async with behind.http.get(url) as stream:
            return stream.status == 200

    await until_async(is_free, limit_s=30, what="a free place")


async def vllm(gateway: Running) -> list[Sample]:
    async with gateway.get("/metrics/vllm") as response:
        text = await response.read()
    check_metrics(text)
    return list(parse_samples(text.decode()))


async def test_vllms_names(behind: Running) -> None:
    for number in range(2):
        options = {"include_usage": True}
        async with await ask(
            behind, f"v-{number}", stream=True, max_tokens=5, stream_options=options
        ) as response:
            await response.read()
    running = await ask(behind, "runs", stream=True)
    await running.content.readline()
    samples = await vllm(behind)
    values: dict[str, float] = {}
    for sample in samples:
        assert sample.labels["model_name"] == "tiny", sample
        values[sample.name] = values.get(sample.name, 0) + float(sample.value)
    assert values["vllm:num_requests_running"] == 1
    assert values["vllm:num_requests_waiting"] == 0
    assert values["vllm:generation_tokens_total"] == 10
    assert values["vllm:prefix_cache_queries_total"] == values["vllm:prompt_tokens_total"] > 0
    assert values["vllm:gpu_prefix_cache_hits_total"] == values["vllm:prefix_cache_hits_total"] > 0
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert values[f"vllm:{name}_count"] == 2, name
    # Each request has five tokens.
    for name in vllm_metrics.BETWEEN_TOKENS:
        assert values[f"{name}_count"] == 8
    for name in vllm_metrics.KV_USAGE:
        assert 0 < values[name] <= 1, "its response began with room for it"
    (ended,) = [one for one in samples if one.name == "vllm:request_success_total"]
    assert (ended.labels["finished_reason"], ended.value) == ("stop", "2")
    await cancel(behind, "runs")
    await running.read()
    reasons = {
        one.labels["finished_reason"]: one.value
        for one in await vllm(behind)
        if one.name == "vllm:request_success_total"
    }
    assert reasons == {"stop": "2", "abort": "1"}


async def test_the_candidates_of_a_model(behind: Running) -> None:
    async with behind.get("/api/requests/candidates?model=tiny") as response:
        assert response.status == 200
        (backend,) = (await response.json())["backends"]
    (found,) = backend["candidates"]
    assert (backend["strategy"], found["replica"], found["worker"]) == ("Scored", "tiny-0", "mac-1")
    assert found["score"] == pytest.approx(sum(found["parts"].values()), abs=1e-3)
    assert (found["leased"], found["ejected"]) == (True, False)
    async with behind.get("/api/requests/candidates?model=tin") as response:
        assert response.status == 404
        assert "tiny" in (await response.json())["error"]["message"]


async def test_engine_and_gateway_have_equal_buckets(behind: Running, engine: Engine) -> None:
    async with await ask(behind, "b", stream=True, max_tokens=3) as response:
        await response.read()
    theirs = list(parse_samples(engine.request("GET", "/metrics").raw.decode()))
    async with behind.get("/metrics") as answer:
        ours = list(parse_samples(await answer.text()))

    def ends(samples: list[Sample], name: str) -> list[str]:
        return list(dict.fromkeys(sample.labels["le"] for sample in samples if sample.name == name))

    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ):
        at_engine = ends(theirs, f"fleet_engine_{name}_bucket")
        assert len(at_engine) > 10
        assert ends(ours, f"fleet_gateway_{name}_bucket") == at_engine, name
