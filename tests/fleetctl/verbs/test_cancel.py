"""`fleetctl routes --in-flight` and `fleetctl cancel` with real gateways."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.fleet import fleetctl
from tests.support.gateway_calls import ADMIN, CHAT, KEYS_REQUIRED, put_api_key
from tests.support.gateway_engine_scripts import slow
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def under_way(*ids: str) -> AsyncIterator[tuple[Running, Running, list[int]]]:
    """Yield two gateways, the first with these requests under way, and the statuses of those that ended."""
    transport = MemoryTransport(SystemClock())
    world, statuses = World(transport), []
    async with (
        running(FakeEngine("m-0", slow(3600))) as engine,
        running_gateway(transport) as one,
        running_gateway(transport) as two,
        aiohttp.ClientSession() as http,
    ):
        await world.serve("m", engine)
        await one.knows("m", ready=1)

        async def ask(request_id: str) -> None:
            headers = {"x-request-id": request_id}
            async with http.post(one.url + CHAT, json={"model": "m"}, headers=headers) as response:
                await response.read()
                statuses.append(response.status)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(request_id)) for request_id in ids]
            await until(lambda: len(engine.calls) == len(ids), what="the requests at the engine")
            yield one, two, statuses
            for task in tasks:
                task.cancel()


async def test_what_is_in_flight_is_listed() -> None:
    async with under_way("r/1", "r-2") as (one, two, _):
        both = ("--gateway", one.url, "--gateway", two.url)
        done = await fleetctl("routes", "--in-flight", *both)
        assert (done.code, done.err) == (0, "")
        title, *lines = done.out.splitlines()
        assert title.split() == [
            *("REQUEST", "MODEL", "NODE", "REPLICA", "PHASE", "PROMPT", "OUTPUT", "AGE")
        ]
        cells = sorted(line.split()[:7] for line in lines)
        # This engine does not tell how far it is.
        assert cells == [
            ["r-2", "m", "mac-1", "m-0", "prefill", "-", "-"],
            ["r/1", "m", "mac-1", "m-0", "prefill", "-", "-"],
        ]
        tree = json.loads((await fleetctl("routes", "--in-flight", "-o", "json", *both)).out)
        assert {item["id"] for item in tree["items"]} == {"r/1", "r-2"}
        wide = await fleetctl("routes", "--in-flight", "-o", "wide", *both)
        assert CHAT in wide.out
        nothing = await fleetctl("routes", "--in-flight", "--node", "mac-9", *both)
        assert (nothing.code, nothing.err) == (0, "no requests found\n")
        wrong = await fleetctl("routes", "--in-flight", "--outcome", "ok", *both)
        assert wrong.code == 2
        assert "--outcome" in wrong.err


async def test_requests_are_cancelled_by_their_ids() -> None:
    async with under_way("r/1", "r-2") as (one, two, statuses):
        both = ("--gateway", one.url, "--gateway", two.url)
        done = await fleetctl("cancel", "r/1", *both)
        assert (done.code, done.out, done.err) == (0, "request/r/1 cancelled\n", "")
        await until(lambda: statuses == [499], what="the client to be told")
        some = await fleetctl("cancel", "r-2", "nobody", *both)
        assert (some.code, some.out) == (1, "request/r-2 cancelled\n")
        assert "not in flight at any gateway: nobody" in some.err
        assert "fleetctl routes --in-flight" in some.err
        await until(lambda: statuses == [499, 499], what="the second client to be told")
        again = await fleetctl("cancel", "r/1", *both)
        assert again.code == 1


async def test_a_viewer_may_not_cancel() -> None:
    world = World(MemoryTransport(SystemClock()))
    await put_api_key(world, ADMIN, "me", role="viewer")
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await gateway.knows_keys()
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{gateway.url}/api/requests/x/cancel") as response:
                assert response.status == 403
                assert "this needs the role operator" in await response.text()
            async with http.get(f"{gateway.url}/api/requests/in-flight") as response:
                assert response.status == 200
        refused = await fleetctl("cancel", "x", "--gateway", gateway.url)
        assert refused.code == 1
        assert "requires an API key with the role operator" in refused.err
