"""Roles: every route of the gateway is in the one table, and answers each role as the table says."""

from collections.abc import Iterable, Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute

from docs.gateway_openapi import gateway_routes, make_gateway_app
from gateway.auth import roles
from machinery.clock import SystemClock
from schemas.records import ROLES, Role, role_includes
from schemas.wire.errors import RefusedError
from store.memory import MemoryTransport
from tests.support.gateway_calls import KEYS_REQUIRED, put_api_key
from tests.support.gateway_world import World, running_gateway
from tests.support.waiting import until


def api_routes(routes: Iterable[object]) -> Iterator[APIRoute]:
    """Yield all routes, those of included routers as well."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            assert not isinstance(route, BaseRoute) or hasattr(route, "original_router"), route
            yield from api_routes(route.original_router.routes)  # type: ignore[attr-defined]  # FastAPI's own type is private


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in api_routes(app.routes):
        for method in sorted((route.methods or set()) - {"OPTIONS"}):
            yield method, route.path_format


def test_every_route_is_in_the_table_and_the_table_has_no_other() -> None:
    known = [*routes_of(make_gateway_app())]
    known += [(method.upper(), path) for method, path, _ in gateway_routes()]
    rows = {(method, path): roles.find_route(method, path) for method, path in known}
    assert [route for route, row in rows.items() if row is None] == []
    assert set(roles.ROUTE_ROLES) - set(rows.values()) == set()


def test_a_route_outside_the_table_is_for_admins() -> None:
    assert roles.needed_role("POST", "/api/new") == "admin"
    assert roles.needed_role("POST", "/queue") == "admin"
    assert roles.needed_role("HEAD", "/queue") == "viewer"
    assert roles.needed_role("GET", "/health") is None


@pytest.mark.parametrize("number", range(len(ROLES)))
def test_a_role_includes_those_before_it(number: int) -> None:
    assert [role_includes(ROLES[number], role) for role in ROLES] == [
        other <= number for other in range(len(ROLES))
    ]


async def test_every_route_answers_each_role_as_the_table_says() -> None:
    world = World(MemoryTransport(SystemClock()))
    for role in ROLES:
        await put_api_key(world, f"sk-fleet-{role}", role, role=role)
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await until(lambda: gateway.gateway.fleet_state.keyring.is_known, what="the keys")
        for method, path in routes_of(make_gateway_app()):
            needed = roles.needed_role(method, path)
            url = gateway.url + path.replace("{name}", "x")
            callers: tuple[Role | None, ...] = (None, *ROLES)
            for caller in callers:
                headers = {} if caller is None else {"authorization": f"Bearer sk-fleet-{caller}"}
                async with gateway.http.request(method, url, headers=headers) as answer:
                    is_endless = answer.content_type == "text/event-stream"
                    text = "" if is_endless else await answer.text()
                    is_refused = answer.status == 403 and (
                        method == "HEAD" or f"this needs the role {needed}" in text
                    )
                    seen = (method, path, caller, answer.status)
                if needed is None:
                    # The log asks for its ticket.
                    assert (answer.status == 401) == (
                        path in ("/v1/logs/gateway", "/api/dashboard/feed")
                    ), seen
                elif caller is None:
                    assert answer.status == 401, seen
                else:
                    assert is_refused == (not role_includes(caller, needed)), seen


def request(method: str, path: str, host: str | None) -> Request:
    apiroute = next(
        route
        for route in api_routes(make_gateway_app().routes)
        if route.path_format == path and method in (route.methods or ())
    )
    client = None if host is None else (host, 1)
    scope = {"type": "http", "method": method, "path": path, "route": apiroute, "client": client}
    return Request({**scope, "headers": [], "state": {"principal": None}})


@pytest.mark.parametrize(
    ("host", "allowed"), [("127.0.0.1", True), ("::1", True), (None, True), ("10.0.0.7", False)]
)
def test_without_keys_other_machines_may_only_read(host: str | None, allowed: bool) -> None:
    roles.check_role(request("GET", "/queue", host))
    load = request("POST", "/api/cluster/load-model", host)
    if allowed:
        roles.check_role(load)
        return
    with pytest.raises(RefusedError, match="This needs the role operator") as caught:
        roles.check_role(load)
    assert caught.value.refusal.status == 403
