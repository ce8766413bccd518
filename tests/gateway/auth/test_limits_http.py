"""Limits over HTTP: clients without a key, models, and the headers of each API."""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.auth.rate_limits import Limits
from gateway.limits import GatewayLimits
from gateway.state.persistence import SnapshotFile
from machinery.clock import SystemClock
from schemas.deployment import ModelDeploymentStatus
from schemas.records import GatewayLease, ModelLimits
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Put
from tests.support.gateway_calls import CHAT, KEYS_REQUIRED, SECRET, with_routing
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running, route, running_gateway
from tests.support.waiting import until


async def with_usage(call: Call) -> None:
    await call.answer(b'{"usage":{"prompt_tokens":30,"completion_tokens":5,"total_tokens":35}}')


def open_limits(**limits: Any) -> GatewayLimits:
    return GatewayLimits(drain_timeout_s=0.0, anonymous=Limits(**limits))


async def test_requests_without_a_key_are_limited_by_address() -> None:
    async with running_gateway(limits=open_limits(requests_per_minute=2)) as gateway:
        await gateway.serve(with_usage)
        found = [await gateway.chat_with_key() for _ in range(3)]
        assert [status for status, _, _ in found] == [200, 200, 429]
        remaining = [headers["x-ratelimit-remaining-requests"] for _, _, headers in found]
        assert remaining == ["1", "0", "0"]
        assert 0 < int(found[2][2]["retry-after"]) <= 30
        # Another address of this machine is another client.
        local = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=local) as other,
            other.post(gateway.url + CHAT, json={"model": "m"}) as answer,
        ):
            assert answer.status == 200
        text = gateway.gateway.metrics.text()
        assert 'fleet_gateway_limited_total{reason="anonymous_requests"} 1' in text
        assert [entry.key for entry in gateway.gateway.recorder.journal.last(1)] == [""]


async def test_tokens_and_concurrency_without_a_key_are_limited() -> None:
    release = asyncio.Event()

    async def wait_then_answer(call: Call) -> None:
        await release.wait()
        await with_usage(call)

    limits = open_limits(tokens_per_minute=30, concurrency=1)
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(wait_then_answer)
        clients = gateway.gateway.fleet_state.access.anonymous
        assert clients is not None
        client = clients.of("127.0.0.1")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(gateway.chat_with_key())
            await until(lambda: client.in_flight == 1, what="the request")
            status, code, _ = await gateway.chat_with_key()
            assert (status, code) == (429, "rate_limit_exceeded")
            release.set()
        assert first.result()[0] == 200
        await until(lambda: client.tokens_used == 35, what="the charge")
        status, _, headers = await gateway.chat_with_key()
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        assert int(headers["retry-after"]) > 5


async def test_a_key_that_is_shown_holds_where_none_is_required() -> None:
    async with running_gateway() as gateway:
        await gateway.serve(with_usage)
        await gateway.world.put(route("r", "routed", m=1))
        await gateway.add_key(SECRET, models=("m",), requests_per_minute=1)
        await gateway.knows("routed", ready=1)
        for secret, model, status, is_limited in (
            (SECRET, "routed", 403, True),
            (SECRET, "m", 200, True),
            (SECRET, "m", 429, True),
            ("", "m", 200, False),
            # Programs for local servers send such keys.
            ("ollama", "routed", 200, False),
            ("sk-no-key-required", "m", 200, False),
            ("sk-fleet-wrong", "m", 401, False),
        ):
            got, _, headers = await gateway.chat_with_key(secret, model)
            assert got == status, secret
            assert ("x-ratelimit-limit-requests" in headers) is is_limited, (secret, model)
        for secret, names in ((SECRET, ["m"]), ("ollama", ["m", "routed"])):
            shown = {"authorization": f"Bearer {secret}"}
            async with gateway.get("/v1/models", headers=shown) as answer:
                assert [one["id"] for one in (await answer.json())["data"]] == names
            async with gateway.get("/", headers=shown) as answer:
                assert ("models" in await answer.json()) == (secret != SECRET)


async def test_all_callers_of_a_deployment_share_its_rate() -> None:
    declared = with_routing("m", rateLimit={"requestsPerMinute": 3})
    spec = declared.spec.model_copy(update={"served_names": ("fast",)})
    async with running_gateway(limits=KEYS_REQUIRED) as gateway:
        await gateway.serve(with_usage, of=declared.model_copy(update={"spec": spec}))
        await gateway.add_key(SECRET)
        await gateway.add_key("sk-fleet-2", "two")
        await gateway.world.put(route("r", "routed", m=1))
        await gateway.knows("routed", ready=1)
        asked = ((SECRET, "m"), ("sk-fleet-2", "fast"), (SECRET, "routed"), ("sk-fleet-2", "m"))
        found = [await gateway.chat_with_key(secret, name) for secret, name in asked]
        assert [status for status, _, _ in found] == [200, 200, 200, 429]
        assert found[3][2]["x-ratelimit-remaining-requests"] == "0"
        assert found[3][2]["retry-after"] == "20"
        text = gateway.gateway.metrics.text()
        assert 'fleet_gateway_limited_total{reason="model_requests"} 1' in text


async def test_a_refused_request_holds_no_slot_of_its_key() -> None:
    limits = {"m": ModelLimits(requests_per_minute=1)}
    async with running_gateway(limits=KEYS_REQUIRED) as gateway:
        await gateway.serve(with_usage)
        principal = await gateway.add_key(SECRET, concurrency=5, model_limits=limits)
        assert [(await gateway.chat_with_key(SECRET))[0] for _ in range(3)] == [200, 429, 429]
        await until(lambda: principal.limiter.in_flight == 0, what="the end of all requests")
        assert principal.limiter.requests_used == 3
        assert principal.by_model["m"].requests_used == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropics_clients_get_anthropics_headers(is_streamed: bool) -> None:
    message = {"role": "user", "content": "hi"}
    body = {"model": "m", "max_tokens": 5, "messages": [message], "stream": is_streamed}
    async with running_gateway(limits=KEYS_REQUIRED) as gateway:
        await gateway.serve(chat)
        await gateway.add_key(SECRET, requests_per_minute=1, tokens_per_minute=6000)
        for status in (200, 429):
            sent = gateway.post("/v1/messages", json=body, headers={"x-api-key": SECRET})
            async with sent as answer:
                await answer.read()
                assert answer.status == status
                assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
                assert answer.headers["anthropic-ratelimit-tokens-limit"] == "6000"
                reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-requests-reset"])
                assert timedelta(0) < reset - SystemClock().now() < timedelta(seconds=62)
                assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
                assert ("retry-after" in answer.headers) is (status == 429)


async def test_all_gateways_share_the_rate_of_a_key() -> None:
    async with running_gateway(limits=KEYS_REQUIRED) as gateway:
        await gateway.serve(with_usage)
        await gateway.add_key(SECRET, requests_per_minute=4)
        async with running_gateway(gateway.world.transport) as other:
            await other.knows("m", ready=1)
            await other.knows_keys()
            for each in (gateway, other):
                state = each.gateway.fleet_state
                await until(lambda: state.gateways.all() == 2, what="both")  # noqa: B023
                found = [await each.chat_with_key(SECRET) for _ in range(3)]
                assert [status for status, _, _ in found] == [200, 200, 429]


@pytest.mark.ci
async def test_gateways_share_the_rate_of_a_model_also_while_the_store_is_away(
    tmp_path: Path,
) -> None:
    limits = GatewayLimits(drain_timeout_s=0.0, state_dir=tmp_path)

    def granted(gateway: Running) -> float | None:
        model = gateway.gateway.table_cache.table.models.get("m")
        limiter = model and gateway.gateway.fleet_state.access.model_rates.of(model)
        return limiter.requests.capacity if limiter and limiter.requests else None

    lease = GatewayLease(url="http://10.0.0.9:4000", version="1", asks_for_keys=False)
    other = Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "other"), value=codec.encode(lease))
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(with_usage, of=with_routing("m", rateLimit={"requestsPerMinute": 10}))
        await gateway.world.transport.commit([], [other])
        await until(lambda: granted(gateway) == 5, what="its half")
        file = SnapshotFile(tmp_path)
        await gateway.world.put_status("m", ModelDeploymentStatus())  # any change writes the file
        await until(lambda: (found := file.read()) and found.gateways == 2, what="the file")
    async with running_gateway(connect(EtcdAddress(socket=tmp_path / "nobody")), limits) as gateway:
        await gateway.knows("m", ready=0)
        assert granted(gateway) == 5
