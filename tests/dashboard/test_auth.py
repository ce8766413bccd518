"""Access to a dashboard: keys, roles, session cookies, foreign hosts and pages."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import aiohttp
import pytest

from dashboard.auth import needed_role, read_cookie
from dashboard.sessions import IDLE_S, LIFE_S, Session, Sessions, session_secret
from insight.tickets import issue_login_ticket
from machinery.clock import SystemClock
from machinery.process_secrets import OpenSecretError
from schemas.records import Role
from store import keys
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.clock import FakeClock
from tests.support.dashboard_fleets import api_key, put_api_key
from tests.support.dashboards import RunningDashboard, running_dashboard
from tests.support.waiting import until

CLOCK = SystemClock()


def put_key(name: str, role: Role, secret: str) -> Put:
    return put_api_key(api_key(name, role, secret))


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(CLOCK)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_dashboard_with_keys_is_closed(memory: MemoryTransport) -> None:
    await memory.commit([], [put_key("eve", "user", "sk-1"), put_key("ann", "viewer", "sk-2")])
    async with running_dashboard(memory, asks_for_keys=True) as running:
        for path in ("/queue", "/api/v1/snapshot", "/api/v1/stream", "/openapi.json", "/x"):
            error = (await running.get(path, 401))["error"]
            assert "key" in error["message"], path
        assert await running.get("/health/live") == {"status": "ok"}
        refused = await running.get("/api/v1/snapshot", 403, headers=bearer("sk-1"))
        assert "viewer" in refused["error"]["message"]
        await running.get("/api/v1/snapshot", 401, headers=bearer("sk-3"))
        assert "summary" in await running.get("/api/v1/snapshot", headers=bearer("sk-2"))


async def test_a_login_makes_a_session_that_ends_with_its_key(memory: MemoryTransport) -> None:
    await memory.commit([], [put_key("ann", "viewer", "sk-2")])
    async with running_dashboard(memory, asks_for_keys=True) as running:
        url = running.url
        await running.post("/login", {"key": "sk-9"}, 401)
        await running.post("/login", {}, 400)
        csrf = {"x-fleet-csrf": "1"}
        async with running.http.post(
            f"{url}/login", json={"key": "sk-2"}, headers=csrf
        ) as response:
            assert await response.json() == {"name": "ann", "role": "viewer"}
            cookie = response.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "sk-2" not in cookie
        # Browsers send the cookies of one port to all ports of a host.
        assert cookie.startswith(f"fleet-session-{url.rpartition(':')[2]}=")
        session = {"cookie": cookie.partition(";")[0]}
        await running.get("/api/v1/snapshot", headers=session)
        me = await running.get("/api/v1/me", headers=session)
        assert (me["name"], me["role"], me["hasChatKey"]) == ("ann", "viewer", True)
        forged = {"cookie": session["cookie"].replace("ann", "bob")}
        await running.get("/api/v1/snapshot", 401, headers=forged)
        await memory.commit([], [Delete(key=keys.named(keys.API_KEY_PREFIX, "ann"))])
        await running.until("/api/v1/snapshot", status=401, headers=session)


async def test_logins_refusals_and_streams_are_logged_without_their_secrets(
    memory: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    await memory.commit([], [put_key("ann", "viewer", "sk-good-secret")])
    caplog.set_level(logging.DEBUG, "dashboard")
    async with running_dashboard(memory, asks_for_keys=True) as running:
        await running.post("/login", {"key": "sk-wrong-secret"}, 401)
        headers = await running.log_in("sk-good-secret")
        await running.post("/api/v1/apply", {}, 403, headers=headers)
        url = f"{running.url}/api/v1/stream?view=macs"
        async with running.http.get(url, headers=headers) as response:
            await response.content.readuntil(b"\n\n")
        await until(lambda: "stream closed" in caplog.messages, what="the end of the stream")
    by_message = {record.message: vars(record) for record in caplog.records}
    assert by_message["login refused"]["refusal"] == "invalid_api_key"
    assert (by_message["login"]["user"], by_message["login"]["way"]) == ("ann", "key")
    refused = by_message["request refused"]
    assert (refused["path"], refused["status"]) == ("/api/v1/apply", 403)
    assert by_message["stream opened"]["views"] == ["macs"]
    written = str([vars(record) for record in caplog.records])
    for secret in ("sk-wrong-secret", "sk-good-secret", headers["cookie"].partition("=")[2]):
        assert secret not in written


async def log_in(running: RunningDashboard, ticket: str) -> tuple[int, str, str]:
    """Return the status, the body and the cookie of a login by link."""
    headers = {"x-fleet-csrf": "1"}
    async with running.http.post(
        f"{running.url}/login", json={"ticket": ticket}, headers=headers
    ) as response:
        cookie = response.headers.get("set-cookie", "").partition(";")[0]
        return response.status, await response.text(), cookie


async def test_a_login_link_is_good_once_and_at_one_dashboard(memory: MemoryTransport) -> None:
    async with running_dashboard(memory, asks_for_keys=True) as running:
        ticket = await issue_login_ticket(memory, "run1")
        elsewhere = await issue_login_ticket(memory, "run2")
        assert ticket.bearer.partition(".")[2] not in str(await memory.get(ticket.key))
        assert (await log_in(running, elsewhere.bearer))[0] == 401
        tries = await asyncio.gather(*(log_in(running, ticket.bearer) for _ in range(4)))
        assert sorted(status for status, *_ in tries) == [200, 401, 401, 401]
        assert all("fleetctl dashboard" in body for status, body, _ in tries if status == 401)
        cookie = next(cookie for status, _, cookie in tries if status == 200)
        await running.get("/api/v1/snapshot", headers={"cookie": cookie})
        await running.get("/api/v1/snapshot", 401, headers={"cookie": cookie.replace("link", "l")})
        assert await memory.get(ticket.key) is None
        assert (await log_in(running, "x"))[0] == 400


async def test_guesses_are_limited(memory: MemoryTransport) -> None:
    async with running_dashboard(memory, asks_for_keys=True) as running:
        wrong = "0" * 16 + "." + "a" * 43
        answers = [await log_in(running, wrong) for _ in range(25)]
        assert [status for status, *_ in answers[:15]] == [401] * 15
        assert answers[-1][0] == 429
        assert "Try again in" in answers[-1][1]
        async with running.http.post(
            f"{running.url}/login", json={"key": "sk-1"}, headers={"x-fleet-csrf": "1"}
        ) as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1


async def test_streams_end_with_the_key_of_their_client(memory: MemoryTransport) -> None:
    await memory.commit([], [put_key("ann", "viewer", "sk-2")])
    async with running_dashboard(memory, asks_for_keys=True) as running:
        session = await running.log_in("sk-2")
        async with running.http.get(f"{running.url}/api/v1/stream", headers=session) as response:
            assert b"snapshot" in await response.content.readuntil(b"\n\n")
            await memory.commit([], [Delete(key=keys.named(keys.API_KEY_PREFIX, "ann"))])
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async with asyncio.timeout(20):
                    await response.content.read()


async def test_every_answer_carries_the_policy(memory: MemoryTransport) -> None:
    async with running_dashboard(memory) as running:
        for path in ("/health", "/api/v1/view/x", "/nothing", "/static/README.md"):
            async with running.http.get(running.url + path) as response:
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "require-trusted-types-for 'script'" in policy
                assert response.headers["x-content-type-options"] == "nosniff"
        async with running.http.get(f"{running.url}/static/../auth.py") as response:
            assert response.status == 404


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/api/v1/snapshot", "viewer"),
        ("HEAD", "/", "viewer"),
        ("GET", "/api/v1/me", "user"),
        ("GET", "/api/v1/logs", "operator"),
        ("POST", "/api/v1/apply", "admin"),
        ("POST", "/api/v1/actions/cordon", "operator"),
        ("POST", "/api/v1/requests/g1/r1/cancel", "operator"),
        ("DELETE", "/api/v1/nodes/a", "admin"),
        ("POST", "/chat/v1/chat/completions", "user"),
        ("PATCH", "/api/v1/nodes/a", "admin"),
        ("CONNECT", "/", "admin"),
    ],
)
def test_roles_by_route(method: str, path: str, role: str) -> None:
    assert needed_role(method, path) == role


def test_no_header_of_a_stranger_takes_quadratic_time() -> None:
    scope = {"server": ("127.0.0.1", 4003), "scheme": "http"}
    assert read_cookie(b'a="x; y"; fleet-session-4003=ann|1|x; b=c', scope) == "ann|1|x"
    began_s = time.process_time()
    for _ in range(10):
        assert read_cookie(b'a="' + b"\\" * 8_000 + b'"', scope) == ""
    assert time.process_time() - began_s < 0.3  # http.cookies: 0.13 s for each


async def test_a_session_ends_in_time_and_survives_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    known = {"ann": api_key("ann", "viewer", "sk-2")}
    cookie = Sessions(session_secret(tmp_path), clock, lambda: known).make("ann")
    assert cookie is not None
    restarted = Sessions(session_secret(tmp_path), clock, lambda: known)
    assert restarted.find(cookie) == Session(name="ann", role="viewer")
    assert Sessions(session_secret(None), clock, lambda: known).find(cookie) is None
    for wrong in ("", cookie[:-1], cookie + "0", "|||", "ann|1|x|y"):
        assert restarted.find(wrong) is None
    rotated = {"ann": api_key("ann", "viewer", "sk-3")}
    assert Sessions(session_secret(tmp_path), clock, lambda: rotated).find(cookie) is None
    await clock.advance(LIFE_S + 1)
    assert restarted.find(cookie) is None
    (tmp_path / "session.key").chmod(0o644)
    with pytest.raises(OpenSecretError):
        session_secret(tmp_path)


async def test_a_session_that_is_not_used_for_an_hour_ends() -> None:
    clock = FakeClock()
    known = {"ann": api_key("ann", "viewer", "sk-2")}
    secret = session_secret(None)
    sessions = Sessions(secret, clock, lambda: known)
    used, idle = sessions.make("ann"), sessions.make("ann")
    assert used is not None
    assert idle is not None
    sessions.keep_secret(used, "sk-2")
    assert sessions.renewed(used) is None
    for _ in range(4):
        await clock.advance(IDLE_S / 2)
        assert sessions.find(used) is not None
    # The use is in the renewed cookie, so a restart ends no session that is in use.
    found = sessions.renewed(used)
    assert found is not None
    assert found[1] == LIFE_S - 2 * IDLE_S
    assert sessions.secret_of(found[0]) == "sk-2"
    assert sessions.find(idle) is None
    restarted = Sessions(secret, clock, lambda: known)
    assert restarted.find(used) is None
    assert restarted.find(found[0]) is not None
    await clock.advance(LIFE_S - 2 * IDLE_S - 1)
    assert sessions.find(found[0]) is None
    # After a logout no copy of the cookie is good.
    fresh = sessions.make("ann")
    assert fresh is not None
    sessions.end(fresh)
    assert sessions.find(fresh) is None


async def test_a_logout_survives_a_restart_and_later_logouts(tmp_path: Path) -> None:
    """Finding S11: whoever copied the cookie before gets in again otherwise."""
    clock, known = FakeClock(), {"ann": api_key("ann", "viewer", "sk-2")}

    def restarted() -> Sessions:
        return Sessions(session_secret(tmp_path), clock, lambda: known, tmp_path, most=10)

    first, kept = restarted().make("ann"), restarted().make("ann")
    assert first is not None
    assert kept is not None
    restarted().end(first)
    assert restarted().find(first) is None
    assert restarted().find(kept) is not None
    sessions = restarted()
    for _ in range(30):
        await clock.advance(10)
        later = sessions.make("ann")
        assert later is not None
        sessions.end(later)
        assert restarted().find(first) is None
        assert restarted().find(later) is None
    assert sessions.find(sessions.make("ann") or "") is not None
    assert len((tmp_path / "session-ended.json").read_bytes()) < 1000
    await clock.advance(LIFE_S)
    sessions.end(sessions.make("ann") or "")
    assert (tmp_path / "session-ended.json").read_bytes().count(b":") == 3


async def test_a_refusal_speaks_of_the_dashboard(memory: MemoryTransport) -> None:
    """The advice for gateways is wrong here: a login is needed on loopback, too."""
    async with running_dashboard(memory, asks_for_keys=True) as running:
        refusal = (await running.get("/api/cluster/workers", 401))["error"]["message"]
        assert refusal.startswith("This dashboard needs a login: open the link")
        assert "gateway" not in refusal
