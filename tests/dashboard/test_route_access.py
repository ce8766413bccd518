"""Access of every route that the dashboard has: roles, the header of changes, foreign pages and foreign hosts."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from fastapi.routing import APIWebSocketRoute
from starlette.routing import Route

from dashboard.auth import LOCAL_PATHS, is_public, needed_role
from machinery.clock import SystemClock
from schemas.records import ROLES, Role
from store.memory import MemoryTransport
from tests.support.dashboard_fleets import put_key
from tests.support.dashboards import RunningDashboard, running_dashboard

CLOCK = SystemClock()


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await store.commit([], [put_key(role) for role in ROLES])
    async with running_dashboard(store, asks_for_keys=True, can_write=True) as dashboard:
        yield dashboard


@pytest.fixture(scope="module")
async def sessions(running: RunningDashboard) -> dict[Role, dict[str, str]]:
    return {role: await running.log_in(f"sk-{role}") for role in ROLES}


def routes(running: RunningDashboard) -> list[tuple[str, str]]:
    """Return method and path of every route; parameters are replaced with a name."""
    found: list[tuple[str, str]] = []
    pending: list[Any] = list(running.app.routes)
    while pending:
        route = pending.pop()
        if isinstance(route, APIWebSocketRoute):
            found.append(("WEBSOCKET", route.path))
        elif isinstance(route, Route):
            path = re.sub(r"\{[^}]*\}", "x", route.path)
            found += [(method, path) for method in sorted(route.methods or ())]
        else:  # FastAPI's own type of an included router is private
            inner = getattr(route, "original_router", None)
            pending.extend(inner.routes if inner is not None else ())
    assert len(found) > 30
    return found


async def status(running: RunningDashboard, method: str, path: str, headers: dict[str, str]) -> int:
    """Return the status of a request; its body is not read, because it may be a stream."""
    async with asyncio.timeout(20):
        response = await running.http.request(method, running.url + path, headers=headers)
    response.close()
    return response.status


async def test_every_change_needs_the_header_and_comes_from_the_own_page(
    running: RunningDashboard, sessions: dict[Role, dict[str, str]]
) -> None:
    changes = [(m, p) for m, p in routes(running) if m not in ("GET", "HEAD", "WEBSOCKET")]
    assert len(changes) >= 3
    csrf, session = {"x-fleet-csrf": "1"}, sessions["admin"]
    for method, path in changes:
        for wrong, expected in (
            ({}, 403),
            ({**csrf, "origin": "https://evil.example"}, 403),
            ({**csrf, "origin": "null"}, 403),
            ({**csrf, "origin": running.url.replace("127.0.0.1", "localhost")}, 403),
            ({**csrf, "sec-fetch-site": "cross-site"}, 403),
            ({**csrf, "sec-fetch-site": "same-site"}, 403),
            ({**csrf, "host": "evil.example"}, 421),
        ):
            found = await status(running, method, path, {**session, **wrong})
            assert found == expected, (method, path, wrong)


async def test_every_route_refuses_lesser_roles_and_foreign_hosts(
    running: RunningDashboard, sessions: dict[Role, dict[str, str]]
) -> None:
    for method, path in routes(running):
        if method == "WEBSOCKET":
            continue
        own = {"x-fleet-csrf": "1", "origin": running.url}
        evil = {**sessions["admin"], "x-fleet-csrf": "1", "host": "evil.example"}
        assert await status(running, method, path, evil) == 421, path
        if is_public(method, path) or path in LOCAL_PATHS:
            continue
        assert await status(running, method, path, own) == 401, path
        needed = needed_role(method, path)
        for role in ROLES[: ROLES.index(needed)]:
            found = await status(running, method, path, {**own, **sessions[role]})
            assert found == 403, (method, path, role)


async def test_sockets_are_refused_to_foreign_pages_and_without_a_key(
    running: RunningDashboard, sessions: dict[Role, dict[str, str]]
) -> None:
    sockets = [path for method, path in routes(running) if method == "WEBSOCKET"]
    assert sockets
    for path in sockets:
        for headers in (
            {},
            sessions["user"],
            {**sessions["viewer"], "origin": "https://evil.example"},
            {**sessions["viewer"], "host": "evil.example"},
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await running.http.ws_connect(running.url + path, headers=headers)
        own = {**sessions["viewer"], "origin": running.url}
        async with running.http.ws_connect(running.url + path, headers=own):
            pass


async def test_roles_see_what_is_theirs(
    running: RunningDashboard, sessions: dict[Role, dict[str, str]]
) -> None:
    for role in ROLES:
        me = await running.get("/api/v1/me", headers=sessions[role])
        assert (me["name"], me["role"], me["canWrite"]) == (role, role, True)
    await running.get("/api/v1/snapshot", headers=sessions["viewer"])
    # A key in the header is no cookie: no page of another origin can send it.
    bearer = {"authorization": "Bearer sk-viewer"}
    async with running.http.post(f"{running.url}/api/v1/apply", headers=bearer) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "role_required"


async def test_bodies_are_json(
    running: RunningDashboard, sessions: dict[Role, dict[str, str]]
) -> None:
    headers = {**sessions["admin"], "x-fleet-csrf": "1", "content-type": "text/plain"}
    async with running.http.post(f"{running.url}/login", data=b"{}", headers=headers) as response:
        assert response.status == 415
