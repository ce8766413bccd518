"""Metrics by version, from requests to healthy and failing engines."""

import asyncio

import pytest

from gateway.metrics.response_summary import VersionCounts
from gateway.metrics.version_metrics import VersionMetrics
from gateway.routing.table import EngineEndpoint
from store import keys
from tests.support.gateway_calls import version_counts
from tests.support.gateway_engine_scripts import (
    chat,
    completion,
    delta,
    dies_after_the_head,
    dies_at_once,
    dies_mid_stream,
)
from tests.support.gateway_fake_engine import Call, Script
from tests.support.gateway_world import Running, target
from tests.support.waiting import until


async def gives_up(call: Call) -> None:
    """End a stream as engines do that cannot continue: with an error event, without [DONE]."""
    await call.begin_stream()
    await call.chunk(delta("one"))
    await call.chunk(b'data: {"error":{"message":"no"}}\n\n')
    await call.send(b"0\r\n\r\n")


def answers(status: int) -> Script:
    async def answer(call: Call) -> None:
        await call.answer(b"{}", status=status)

    return answer


async def never(_: Call) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("script", "is_streamed", "expected"),
    [
        pytest.param(chat, True, {"ok": 1}, id="a-stream"),
        pytest.param(chat, False, {"ok": 1}, id="an-answer"),
        pytest.param(answers(400), False, {"refused": 1}, id="the-clients-own"),
        pytest.param(answers(500), False, {"error": 1}, id="an-error"),
        pytest.param(answers(501), False, {"error": 1}, id="an-error-that-is-passed-on"),
        pytest.param(dies_at_once, True, {"error": 1}, id="broken"),
        pytest.param(dies_after_the_head, True, {"error": 1}, id="broken-before-the-first-event"),
        pytest.param(dies_mid_stream, True, {"error": 1}, id="interrupted"),
        pytest.param(gives_up, True, {"error": 1}, id="no-done"),
    ],
)
@pytest.mark.parametrize("patience_s", [1.0])
async def test_how_requests_end(
    gateway: Running, script: Script, *, is_streamed: bool, expected: dict[str, int]
) -> None:
    await gateway.serve(script)
    body = {"model": "m", "stream": is_streamed}
    async with gateway.post(json=body) as response:
        await response.read()
    await until(lambda: version_counts(gateway) or None, what="the count")
    assert version_counts(gateway) == expected
    counts = gateway.gateway.versions.of(target("m-0"))
    assert sum(counts.first_tokens) == (script in (chat, dies_mid_stream, gives_up)) * is_streamed


async def test_a_client_that_leaves_is_not_an_error(gateway: Running) -> None:
    (engine,) = await gateway.serve(never)
    async with asyncio.TaskGroup() as group:
        client = group.create_task(gateway.chat())
        await until(lambda: engine.calls, what="the request at the engine")
        client.cancel()
    await until(lambda: version_counts(gateway) or None, what="the count")
    assert version_counts(gateway) == {"client_gone": 1}


async def test_a_failure_counts_though_another_engine_answered(gateway: Running) -> None:
    """Otherwise a bad version would hide behind the good one."""
    await gateway.serve(answers(500), chat)
    async with gateway.post(json={"model": "m"}) as response:
        assert response.status == 200
    assert version_counts(gateway) == {"ok": 1, "error": 1}
    async with gateway.get("/metrics/demand") as response:
        assert response.headers["x-fleet-gateway"]
        text = await response.text()
    async with gateway.get("/metrics") as response:
        assert text in await response.text()
    labels = 'deployment="m",template=""'
    assert f'fleet_gateway_version_requests_total{{{labels},outcome="error"}} 1\n' in text
    assert 'fleet_gateway_deployment_in_flight{deployment="m"} 0\n' in text
    await gateway.world.delete(keys.spec_key("ModelDeployment", "m"))


def test_tokens_are_timed_unless_they_come_at_once() -> None:
    version = VersionCounts()
    version.record_stream(7, 2.0)
    assert (version.ok, version.tokens, version.token_s) == (1, 7, 2.0)
    version.record_stream(20, 2.0)
    assert (version.ok, version.tokens, version.token_s) == (2, 27, 4.0)
    version.record_stream(0, 0.001)
    assert (version.ok, version.tokens) == (3, 27), "too fast to be timed"
    whole = completion('a "completion_tokens": 7 in the text')
    version.record_response(200, whole[:-1] + b',"usage":{"completion_tokens": 5}}', 1.0)
    assert (version.ok, version.tokens, version.token_s) == (4, 32, 5.0)
    version.record_response(200, whole, 1.0)
    assert (version.ok, version.tokens) == (5, 32)


def test_the_oldest_version_is_forgotten() -> None:
    versions = VersionMetrics()
    made = [target("m-0", template=f"t{n}") for n in range(1001)]

    def count(one: EngineEndpoint) -> int:
        return versions.of(one).ok

    for one in made:
        versions.of(one).ok += 1
    assert count(made[1000]) == count(made[1]) == 1
    assert count(made[0]) == 0
