"""What comes first: the key, the rate, and only then the body; on real sockets."""

from typing import Any

import aiohttp
import pytest

from gateway.apis.registry import PATHS as TRANSLATED
from tests.gateway.access import test_keys
from tests.gateway.access.test_keys import ADMIN, SECRET, give
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.world import Running, World
from tests.support.waiting import until

engine, world, gateway = test_keys.engine, test_keys.world, test_keys.gateway

PATHS = ("/v1/chat/completions", "/v1/embeddings", "/v1/responses", *TRANSLATED)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"{", b"{}", b'{"model": "m", "colour": 1}'])
async def test_strangers_bodies_are_not_read(
    world: World, gateway: Running, http: aiohttp.ClientSession, path: str, body: bytes
) -> None:
    await give(world, SECRET)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    for headers in ({}, bearer("wrong"), {"authorization": SECRET}):
        async with http.post(gateway.url + path, data=body, headers=headers) as answer:
            told = await answer.text()
            assert answer.status == 401, told
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert ("begin with `Bearer `" in told) == (headers == {"authorization": SECRET})
    assert [one.model for one in gateway.gateway.recorder.journal.last(9)] == ["unknown"] * 3


@pytest.mark.parametrize("path", PATHS)
async def test_bad_bodies_are_under_the_rate(
    world: World, gateway: Running, http: aiohttp.ClientSession, path: str
) -> None:
    await give(world, SECRET, requests_per_minute=2, concurrency=1)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    statuses = []
    for _ in range(3):
        async with http.post(gateway.url + path, data=b"{", headers=bearer(SECRET)) as answer:
            statuses.append(answer.status)
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert statuses == [400, 400, 429]
    holder = gateway.gateway.known.keyring.find(SECRET.encode())
    assert holder is not None
    assert holder.in_flight == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", b'{"model": "m", "colour": 1}'),
        ("/v1/messages", b'{"model": "m", "stop": ["x"]}'),
        ("/v1/chat/completions", b'{"model": "m", "fleet": 1}'),
    ],
)
async def test_the_journal_names_the_model_of_a_bad_body(
    world: World, gateway: Running, http: aiohttp.ClientSession, path: str, body: bytes
) -> None:
    await give(world, SECRET)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    for one in (body, body.replace(b'"m"', b'"no-such"'), b"{"):
        async with http.post(gateway.url + path, data=one, headers=bearer(SECRET)) as answer:
            assert answer.status == 400
    entries = gateway.gateway.recorder.journal.last(3)
    assert [one.model for one in entries] == ["unknown", "unknown", "m"]


async def test_health_names_models_to_admins_alone(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    await give(world, SECRET)
    await give(world, ADMIN, "me", is_admin=True)
    await until(lambda: gateway.gateway.known.keyring.find(ADMIN.encode()), what="the keys")
    found: list[Any] = []
    for headers in ({}, bearer(SECRET), bearer(ADMIN)):
        async with http.get(f"{gateway.url}/health", headers=headers) as answer:
            told = await answer.json()
            assert (answer.status, told["modelsKnown"], told["modelsReady"]) == (200, 2, 1)
            found.append(told.get("models"))
    assert found[:2] == [None, None]
    assert {name: one["ready"] for name, one in found[2].items()} == {"hidden": 0, "m": 1}


@pytest.mark.parametrize("path", [*PATHS, "/api/show"])
async def test_compressed_bodies_are_refused_in_words(
    world: World, gateway: Running, engine: FakeEngine, http: aiohttp.ClientSession, path: str
) -> None:
    await give(world, SECRET)
    await until(lambda: bool(gateway.gateway.known.keyring), what="the key")
    for coding in ("gzip", "br, gzip"):
        headers = {**bearer(SECRET), "content-encoding": coding}
        async with http.post(gateway.url + path, data=b"\x1f\x8b", headers=headers) as answer:
            told = await answer.text()
            assert answer.status == 415
            assert f"content-encoding: {coding}" in told
            assert "send it plain" in told
    assert not engine.calls
    headers = {**bearer(SECRET), "content-encoding": "identity"}
    async with http.post(gateway.url + path, data=b"{", headers=headers) as answer:
        assert answer.status == 400
