"""Requests outside the model paths: errors, models, health, metrics."""

from typing import Any

import pytest
from yarl import URL

from gateway.errors import unknown_model
from schemas.deployment import HubReference, ModelSource
from tests.support.gateway_calls import CHAT, error_of
from tests.support.gateway_engine_scripts import DONE, chat, completion, echo
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running, deployment, published, route
from tests.support.waiting import until


async def test_an_unknown_model(gateway: Running) -> None:
    await gateway.world.put(deployment("qwen-8b", "fast"))
    await gateway.knows("fast", ready=0)
    status, body, _ = await gateway.chat(model="qwen-8")
    error = body["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "Did you mean 'qwen-8b'?" in error["message"]
    assert "fast (0 ready), qwen-8b (0 ready)" in error["message"]


HUB_ID = "mlx-community/Qwen3-8B-4bit"
PATHS = ("/v1/chat/completions", "/v1/messages", "/api/chat")


async def ask_as(gateway: Running, path: str, model: str) -> tuple[int, str]:
    """Ask a model in the form of the API that the path belongs to; return status and body."""
    message = {"role": "user", "content": "hi"}
    body: dict[str, Any] = {"model": model, "messages": [message], "stream": False}
    if path == "/v1/messages":
        body["max_tokens"] = 8
    async with gateway.post(path, json=body) as response:
        return response.status, str(await response.json())


@pytest.mark.parametrize("path", PATHS)
async def test_a_hub_id_is_a_models_name_where_a_deployment_has_it(
    gateway: Running, path: str
) -> None:
    (engine,) = await gateway.start(chat, of="qwen")
    hub = ModelSource(hub=HubReference(repo=HUB_ID))
    model_deployment = deployment("qwen")
    spec = model_deployment.spec.model_copy(update={"model": hub})
    await gateway.world.put(
        model_deployment.model_copy(update={"spec": spec}), published(engine, "qwen")
    )
    await gateway.knows(HUB_ID, ready=1)
    status, answer = await ask_as(gateway, path, HUB_ID)
    assert status == 200, answer
    status, answer = await ask_as(gateway, path, f"{HUB_ID}@main")
    assert status == 404
    assert f"A model's name has no revision: ask for '{HUB_ID}'" in answer
    status, answer = await ask_as(gateway, path, HUB_ID.lower())
    assert status == 404
    assert f"Did you mean '{HUB_ID}'?" in answer


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (HUB_ID, f"`fleetctl run {HUB_ID}` deploys"),
        (f"{HUB_ID}:latest", f"`fleetctl run {HUB_ID}` deploys"),
        (f"{HUB_ID}@dev", f"`fleetctl create md NAME --hub {HUB_ID} --revision dev` deploys"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_hub_id_that_nothing_serves_says_how_to_deploy_it(
    gateway: Running, path: str, model: str, hint: str
) -> None:
    await gateway.world.put(deployment("other"))
    await gateway.knows("other", ready=0)
    status, answer = await ask_as(gateway, path, model)
    assert status == 404
    assert hint in answer


@pytest.mark.parametrize(
    "model", ["qwen", "a/b/c", "../x", "-x/y", "a/b;rm", f"a/{'x' * 400}", "a/b@-x"]
)
def test_other_names_get_no_command_to_run(model: str) -> None:
    assert "fleetctl" not in unknown_model(model, ["m"], None).message


async def test_nothing_deployed(gateway: Running) -> None:
    await until(lambda: gateway.gateway.table_cache.is_synced, what="the first table")
    status, body, _ = await gateway.chat(model="x" * 1000)
    assert status == 404
    assert "fleetctl apply" in body["error"]["message"]
    assert len(body["error"]["message"]) < 500


async def test_request_ids(gateway: Running) -> None:
    (engine,) = await gateway.serve(echo)
    async with gateway.post(json={"model": "m"}, headers={"x-request-id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"
        assert engine.calls[0].headers["x-request-id"] == "mine"
    ids = {(await gateway.chat())[2].headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


async def test_what_the_engine_is_sent(gateway: Running) -> None:
    raw = b'{ "model":"m", "n" : 1.50 }'
    (engine,) = await gateway.serve(echo)
    headers = {"authorization": "Bearer secret", "cookie": "a=b"}
    async with gateway.post(data=raw, headers=headers) as response:
        assert await response.read() == raw
    sent = engine.calls[0]
    assert (sent.path, sent.body) == (CHAT, raw)
    own = {"x-fleet-progress", "x-fleet-resumable"}
    assert sent.headers.keys() - own == {"host", "content-type", "content-length", "x-request-id"}


_FOREIGN = {
    "set_cookie": "session=theirs",
    "access_control_allow_origin": "*",
    "access_control_allow_credentials": "true",
    "location": "http://evil.example/",
    "www_authenticate": "Basic",
    "content_encoding": "gzip",
    "x_fleet_node": "evil",
    "x_powered_by": "theirs",
}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/v1/embeddings"])
@pytest.mark.parametrize("status", [200, 400])
async def test_only_known_headers_of_engines_reach_clients(
    gateway: Running, path: str, status: int
) -> None:
    async def sets_headers(call: Call) -> None:
        await call.answer(completion("hi"), status, cache_control="no-store", **_FOREIGN)

    await gateway.serve(sets_headers)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "stream": False,
    }
    if path == "/api/chat":
        del body["max_tokens"]
    async with gateway.post(path, json=body) as response:
        assert response.status == status
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-fleet-node"] == "mac-1"
        names = {name.replace("_", "-") for name in _FOREIGN} - {"x-fleet-node"}
        assert not names & {name.lower() for name in response.headers}


async def test_only_known_headers_of_streams_reach_clients(gateway: Running) -> None:
    async def sets_headers(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nset-cookie: a=b\r\n"
        await call.send(
            head + b"access-control-allow-origin: *\r\nconnection: close\r\n\r\n" + DONE
        )
        call.writer.close()

    await gateway.serve(sets_headers)
    async with gateway.post(json={"model": "m", "stream": True}) as response:
        assert response.content_type == "text/event-stream"
        assert not {"set-cookie", "access-control-allow-origin"} & {
            name.lower() for name in response.headers
        }


async def test_models(gateway: Running) -> None:
    await gateway.world.put(deployment("m", "org/m", "fast"), deployment("n", "fast"))
    await gateway.world.put(route("r", "public", m=1))
    await gateway.knows("public", ready=0)
    async with gateway.get("/v1/models/") as response:
        with_slash = await response.json()
    async with gateway.get("/v1/models") as response:
        body = await response.json()
        assert body == with_slash
        assert [model["id"] for model in body["data"]] == ["fast", "m", "n", "org/m", "public"]
        assert body["data"][0] == {
            "id": "fast",
            "object": "model",
            "created": 0,
            "owned_by": "mlx-fleet",
            "max_model_len": 4096,
        }
        assert body["data"][-1]["max_model_len"] == 4096
    async with gateway.get("/v1/models/org/m") as response:
        assert (await response.json())["id"] == "org/m"
    async with gateway.get("/v1/models/zzz") as response:
        assert (response.status, (await error_of(response))["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "//v1//models/?x=1", 200),
        ("HEAD", "/v1/models/", 200),
        ("HEAD", "/", 200),
        ("HEAD", "//health", 200),
        ("OPTIONS", CHAT, 204),
        ("OPTIONS", "/v1/models/", 204),
        ("POST", f"/{CHAT}/", 400),
        ("POST", "//v1//messages?beta=true", 400),
        ("POST", "/api/chat/", 400),
    ],
)
async def test_paths_and_methods_as_clients_write_them(
    gateway: Running, method: str, path: str, status: int
) -> None:
    async with gateway.http.request(method, URL(gateway.url + path, encoded=True)) as response:
        assert response.status == status
        if method == "OPTIONS":
            assert response.headers["allow"].endswith(", OPTIONS")
        if status == 400:
            assert "model" in await response.text() or "JSON" in await response.text()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/docs", 405),
    ],
)
async def test_what_is_not_there(gateway: Running, method: str, path: str, status: int) -> None:
    async with gateway.http.request(method, gateway.url + path) as response:
        assert response.status == status
        assert path in (await error_of(response))["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1"), ("POST", "/v1/")])
async def test_the_address_alone_says_what_is_below_it(
    gateway: Running, method: str, path: str
) -> None:
    async with gateway.http.request(method, gateway.url + path) as response:
        assert response.status == 404
        assert (await error_of(response))["message"] == (
            f"Not Found: {method} /v1; below it there are: GET /v1/models, "
            "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, "
            "POST /v1/embeddings, POST /v1/score, POST /v1/rerank, "
            "POST /v1/messages, POST /v1/messages/count_tokens, "
            "POST /v1/audio/transcriptions, POST /v1/audio/translations, POST /v1/audio/speech, "
            "POST /v1/files, POST /v1/batches"
        )


async def test_health(gateway: Running) -> None:
    await gateway.serve(chat)
    async with gateway.get("/health") as response:
        body = await response.json()
        assert response.status == 200
    assert (body["status"], body["endpoints"], body["store"]) == ("ok", 1, "ok")
    assert body["models"] == {"m": {"ready": 1, "kept": 0}}
    assert body["storeStalenessSeconds"] >= 0


@pytest.mark.parametrize(
    ("method", "path", "near"),
    [
        ("POST", "/v1/chat/completion", "POST /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("GET", "/models", "GET /v1/models"),
        ("POST", "/v1/message", "POST /v1/messages"),
        ("POST", "/api/chatt", "POST /api/chat"),
        ("GET", "/zzz", ""),
    ],
)
async def test_an_unknown_path_names_the_nearest_and_what_there_is(
    gateway: Running, method: str, path: str, near: str
) -> None:
    async with gateway.http.request(method, gateway.url + path) as response:
        assert response.status == 404
        told = await response.text()
    assert f"Not Found: {method} {path}." in told
    assert f"Did you mean {near}?" in told if near else "Did you mean" not in told
    listed = "GET /api/tags, " if path.startswith("/api/") else "GET /v1/models, POST /v1/"
    assert f"There are: {listed}" in told


async def test_a_long_unknown_path_is_cut_off(gateway: Running) -> None:
    async with gateway.get("/v1/" + "x" * 5000) as response:
        assert response.status == 404
        assert len(await response.read()) < 1500
