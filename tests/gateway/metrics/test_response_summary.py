"""Interrupted requests: their outcome in journal, version metrics and breakers, and the staleness of the store."""

import asyncio

import orjson
import pytest
from typing_extensions import override

from gateway.limits import GatewayLimits
from gateway.metrics import response_summary
from gateway.state.staleness import STALE_S, StalenessMonitor
from gateway.telemetry.request_journal import render_entries
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from store.port import ServerStatus
from tests.support.clock import FakeClock
from tests.support.gateway_calls import version_counts, with_routing
from tests.support.gateway_engine_scripts import chat, delta, dies_mid_stream, refuses, slow
from tests.support.gateway_fake_engine import Call, Script
from tests.support.gateway_world import Running, running_gateway
from tests.support.waiting import until

LATE = {"message": "late", "type": "server_error", "code": "request_timeout"}


async def out_of_time(call: Call) -> None:
    """End as engines do at the request's deadline: in a stream by an event, without [DONE]."""
    if not orjson.loads(call.body).get("stream"):
        await call.answer(orjson.dumps({"error": LATE}), 504)
        return
    await call.begin_stream()
    await call.chunk(delta("one"))
    await call.chunk(b"data: " + orjson.dumps({"error": LATE}) + b"\n\n")
    await call.send(b"0\r\n\r\n")


async def stalls(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("one"))
    await asyncio.sleep(60)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("script", [out_of_time, slow(60), stalls])
async def test_a_clients_own_time_is_no_engines_fault(
    gateway: Running, script: Script, *, is_streamed: bool
) -> None:
    await gateway.serve(script)
    headers = {"x-request-timeout": "0.3"}
    body = {"model": "m", "stream": is_streamed}
    async with gateway.post(json=body, headers=headers) as response:
        await response.read()
    recorder = gateway.gateway.recorder
    await until(lambda: len(recorder.journal) == 1, what="it to be written down")
    is_begun = response.status == 200
    (request,) = render_entries(recorder.journal.last(1), "g")
    assert request.outcome == ("interrupted" if is_begun else "failed")
    assert (request.replica, request.worker, request.deployment) == ("m-0", "mac-1", "m")
    (attempt,) = recorder.journal.last(1)[0].attempts
    assert (attempt.outcome, bool(attempt.why)) == ("timed_out", True)
    assert version_counts(gateway) == {"client_gone": 1}
    assert not gateway.gateway.load_tracker.outliers.ejected_origins
    assert is_begun or response.status == 504


async def test_a_version_that_is_too_slow_for_the_names_own_limit_is_to_blame(
    gateway: Running,
) -> None:
    await gateway.serve(slow(60), of=with_routing("m", timeouts={"request": "1s"}))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (504, "request_timeout")
    assert version_counts(gateway) == {"error": 1}


async def test_the_journal_says_why_a_stream_broke(gateway: Running) -> None:
    await gateway.serve(dies_mid_stream)
    await gateway.chat(stream=True)
    await until(lambda: len(gateway.gateway.recorder.journal) == 1, what="it to be written down")
    (attempt,) = gateway.gateway.recorder.journal.last(1)[0].attempts
    assert (attempt.outcome, "connection" in attempt.why) == ("interrupted", True)


@pytest.mark.parametrize(
    ("last", "is_whole", "why"),
    [
        (b"data: [DONE]\n\n", True, ""),
        (b'event: response.completed\ndata: {"a":1}\n\n', True, ""),
        (b'event: response.incomplete\ndata: {"a":1}\n\n', True, ""),
        (b'event: response.failed\ndata: {"response":{"error":{"message":"no"}}}\n\n', False, "no"),
        (b'data: {"x":1}\n\ndata: {"error":{"message":"no"}}\n\n', False, "no"),
        (b'data: {"x":"event: response.completed\\n"}\n\n', False, "before its end"),
        (b"", False, "before its end"),
    ],
)
def test_how_a_stream_ended(last: bytes, is_whole: bool, why: str) -> None:
    assert response_summary.is_complete_stream(last) is is_whole
    assert is_whole or why in response_summary.stream_error(last)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_recovered_engine_is_found_by_a_health_check(*, is_streamed: bool) -> None:
    """An engine that restarts behind an unchanged endpoint."""
    limits = GatewayLimits(drain_timeout_s=0.0)
    async with running_gateway(limits=limits) as gateway:
        (engine,) = await gateway.serve(chat)
        await engine.kill()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(gateway.chat(stream=is_streamed))
            attempts = gateway.gateway.metrics.attempts
            await until(lambda: attempts.value("unreachable") > 0, what="an attempt in vain")
            assert not asking.done()
            await engine.start()
        status, _, response = asking.result()
        assert (status, response.headers["x-fleet-attempts"]) == (200, "2")


async def test_its_deadline_bounds_the_wait() -> None:
    limits = GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=60.0, hold_timeout_s=60.0)
    async with running_gateway(limits=limits) as gateway:
        (engine,) = await gateway.serve(chat)
        await engine.kill()
        headers = {"x-request-timeout": "0.4"}
        began_s = SystemClock().monotonic()
        async with gateway.post(json={"model": "m"}, headers=headers) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert SystemClock().monotonic() - began_s < 30


async def test_an_engines_504_of_its_own_is_still_mended_elsewhere(gateway: Running) -> None:
    await gateway.serve(refuses(504, "timeout"), chat)
    headers = {"x-request-timeout": "9"}
    async with gateway.post(json={"model": "m"}, headers=headers) as response:
        assert response.status == 200
    assert version_counts(gateway) == {"ok": 1, "error": 1}


class _Watch:
    def __init__(self, clock: FakeClock) -> None:
        self.heard_s = clock.monotonic()
        self._clock = clock

    def staleness_s(self) -> float | None:
        return self._clock.monotonic() - self.heard_s


class _Hanging(MemoryTransport):
    @override
    async def status(self) -> ServerStatus:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_hanging_store_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store does not answer, the state is never reported as fresh."""
    monkeypatch.setattr("gateway.state.staleness._ASK_S", 0.2)
    clock = FakeClock()
    hearing = StalenessMonitor(_Hanging(clock), clock, [_Watch(clock)])
    await hearing.listen(clock.monotonic())
    told = [hearing.is_stale]
    await clock.advance(8)
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(hearing.listen(clock.monotonic()))
        await asyncio.sleep(0.05)
        await clock.advance(STALE_S - 7.5)
        told += [listening.done(), hearing.is_stale]
    assert told == [False, False, True]
    staleness_s = hearing.staleness_s()
    assert staleness_s is not None
    assert hearing.is_stale is (staleness_s > STALE_S)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/metrics", "/api/ps", "/model/info", "/queue"]
)
async def test_head_is_get_without_a_body(gateway: Running, path: str) -> None:
    await until(lambda: gateway.gateway.table_cache.is_synced, what="the store")
    async with gateway.http.head(gateway.url + path) as response:
        assert (response.status, await response.read()) == (200, b"")
