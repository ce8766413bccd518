"""Answers that the dashboard passes on from a gateway: how many at once, and that each ends with its client."""

import asyncio
from operator import itemgetter

from aiohttp import web

from dashboard.api.gateway_routes import MAX_CHATS
from schemas.records import GatewayLease
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard, serving
from tests.support.waiting import until, until_async

PATH = "/v1/models"


async def ask(dashboard: RunningDashboard) -> int:
    async with dashboard.http.get(f"{dashboard.url}/chat{PATH}") as response:
        await response.read()
        return response.status


async def test_an_answer_counts_before_it_begins_and_no_longer_than_its_client_waits() -> None:
    arrived, answers = 0, asyncio.Event()

    async def answer_late(_: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        await answers.wait()
        return web.json_response({})

    store = MemoryTransport(CLOCK)
    async with serving(PATH, answer_late) as (url,), running_dashboard(store) as dashboard:
        lease = codec.encode(GatewayLease(url=url, version="1"))
        await store.commit([], [Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "g"), value=lease)])
        await dashboard.until("/api/v1/view/gateways", itemgetter("total"))

        async def is_answered() -> bool:
            return await ask(dashboard) == 200

        async with asyncio.TaskGroup() as group:
            first, *others = [group.create_task(ask(dashboard)) for _ in range(MAX_CHATS)]
            await until(lambda: arrived == MAX_CHATS, what="the gateway to have all requests")
            async with asyncio.timeout(30):
                assert await ask(dashboard) == 429
            first.cancel()
            group.create_task(until_async(is_answered, what="a place for another client"))
            await until(lambda: arrived == MAX_CHATS + 1, what="another client's request")
            answers.set()
        assert {task.result() for task in others} == {200}
        assert await is_answered()
