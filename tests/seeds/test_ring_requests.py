"""The ring inference server's requests at a gateway: no model, GET /, health for load balancers, a smoke test."""

from collections.abc import AsyncIterator

import orjson
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from machinery.version import version
from store.memory import MemoryTransport
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gateway_calls import KEYS_REQUIRED, SECRET, error_of, put_api_key
from tests.support.gateway_engine_scripts import chat, echo, refuses
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_resume_engine import Marked
from tests.support.gateway_world import (
    Running,
    World,
    deployment,
    published,
    route,
    running_gateway,
)
from tests.support.waiting import until

# The README's request: the ring server has one model, so clients name none.
REQUEST = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, "seed": 18446744073709551615}'
CHAT = "/v1/chat/completions"


@pytest.fixture
def world() -> World:
    return World(MemoryTransport(SystemClock()))


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Running]:
    async with running_gateway(world.transport) as found:
        yield found


@pytest.mark.parametrize(
    "body",
    [
        REQUEST,
        REQUEST.replace(b"{", b'{"model": null,', 1),
        REQUEST.replace(b"{", b'{"model":"",', 1),
    ],
)
async def test_a_request_without_a_model_goes_to_the_only_one(
    gateway: Running, body: bytes
) -> None:
    (engine,) = await gateway.start(chat, of="qwen")
    await gateway.world.put(deployment("qwen", "fast", "Qwen3-14B-4bit"), published(engine, "qwen"))
    await gateway.knows("fast", ready=1)
    async with gateway.post(data=body) as response:
        assert response.status == 200, await response.text()
    sent = engine.calls[-1].body
    assert orjson.loads(sent)["model"] == "qwen"
    # Values that JSON libraries change arrive as they were written.
    assert b'"seed":18446744073709551615' in sent.replace(b" ", b"")


@pytest.mark.parametrize("model", [b"", b'"model": null,', b'"model": "",'])
@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/api/chat", b'"messages": [{"role": "user", "content": "Hello"}], "stream": false'),
        ("/api/generate", b'"prompt": "Hello", "stream": false'),
        ("/v1/messages", b'"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]'),
    ],
)
async def test_other_apis_have_the_same_default(
    gateway: Running, model: bytes, path: str, rest: bytes
) -> None:
    (engine,) = await gateway.serve(chat, of="qwen")
    await gateway.knows("qwen", ready=1)
    async with gateway.post(path, data=b"{" + model + rest + b"}") as response:
        assert response.status == 200, await response.text()
    assert orjson.loads(engine.calls[-1].body)["model"] == "qwen"
    async with gateway.post(path, data=b"{" + model + rest) as response:
        assert response.status == 400, await response.text()


async def test_several_models_need_a_name_or_a_default(gateway: Running) -> None:
    await gateway.serve(chat, of="qwen")
    (other,) = await gateway.serve(chat, of="smol")
    async with gateway.post(data=REQUEST) as response:
        error = await error_of(response)
        assert (response.status, error["code"], error["param"]) == (
            400,
            "model_required",
            "model",
        )
        assert "one of: qwen, smol" in error["message"]
        assert "--default-model" in error["message"]
    limits = GatewayLimits(drain_timeout_s=0.0, default_model="smol")
    async with running_gateway(gateway.world.transport, limits) as second:
        await second.knows("smol", ready=1)
        async with gateway.http.post(second.url + CHAT, data=REQUEST) as response:
            assert response.status == 200
        assert orjson.loads(other.calls[-1].body)["model"] == "smol"
        async with gateway.http.post(second.url + CHAT, json={"model": 5}) as response:
            assert response.status == 400


async def test_a_key_for_one_model_needs_no_name(world: World) -> None:
    await put_api_key(world, SECRET, models=("smol",))
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await gateway.serve(chat, of="qwen")
        (other,) = await gateway.serve(chat, of="smol")
        await until(lambda: bool(gateway.gateway.fleet_state.keyring), what="the key")
        headers = {"authorization": f"Bearer {SECRET}"}
        async with gateway.post(data=REQUEST, headers=headers) as response:
            assert response.status == 200
        assert len(other.calls) == 1
        # Names of models are no answer for clients without a key.
        async with gateway.get("/") as response:
            assert set(await response.json()) == {"name", "version", "status", "links"}


async def test_a_fleet_without_models_says_so(gateway: Running) -> None:
    await until(lambda: gateway.gateway.table_cache.is_synced, what="the first table")
    async with gateway.post(data=REQUEST) as response:
        error = await error_of(response)
        assert (response.status, error["code"]) == (400, "model_required")
        assert "Nothing is deployed" in error["message"]


async def test_the_root_describes_the_gateway(gateway: Running) -> None:
    await gateway.world.put(
        deployment("qwen"), deployment("smol"), route("chat", "chat", qwen=1, smol=1)
    )
    await gateway.knows("chat", ready=0)
    async with gateway.get("/") as response:
        assert response.content_type == "application/json"
        body = await response.json()
    assert (body["name"], body["version"], body["status"]) == ("mlx-fleet", version(), "ok")
    assert body["models"] == ["chat", "qwen", "smol"]
    for name, path in body["links"].items():
        async with gateway.get(path) as response:
            # 405: takes POST only.
            assert response.status == (405 if name == "chat" else 200), path
    for agent in ("ollama/0.13.0 (arm64 darwin) Go/go1.24.1", "ollama-python/0.6.0 (arm64 darwin)"):
        async with gateway.get("/", headers={"user-agent": agent}) as response:
            assert await response.text() == "Ollama is running"


async def test_health_for_load_balancers(gateway: Running) -> None:
    await until(lambda: gateway.gateway.table_cache.is_synced, what="the table")
    for path, status in (("/health/live", "alive"), ("/health/ready", "ok")):
        for method in ("GET", "HEAD"):
            async with gateway.http.request(method, gateway.url + path) as response:
                assert response.status == 200
                if method == "GET":
                    assert await response.json() == {"status": status}


async def test_the_smoke_test_of_all_models(gateway: Running) -> None:
    answers = Marked()
    await gateway.serve(answers, of="qwen")
    (other,) = await gateway.serve(answers, of="smol")
    whole = await fleetctl("test", "--gateway", gateway.url)
    assert (whole.code, whole.err) == (0, "")
    lines = [line.split() for line in whole.out.splitlines()]
    assert lines[0][:4] == ["MODEL", "RESULT", "NODE", "REPLICA"]
    assert [line[:4] for line in lines[1:]] == [
        ["qwen", "ok", "mac-1", "qwen-0"],
        ["smol", "ok", "mac-1", "smol-0"],
    ]
    other.script = refuses(400, "context_length_exceeded")
    done = await run_fleetctl("test", "qwen", "-o", "json", "--gateway", gateway.url)
    assert (done.code, [load["ok"] for load in orjson.loads(done.out)["models"]]) == (0, [True])
    both = await run_fleetctl("test", "--gateway", gateway.url)
    assert both.code == 1
    assert both.err == "error: 1 of 2 models did not answer\n"
    assert "failed" in both.out.splitlines()[2]
    none = await run_fleetctl("test", "qwem", "--gateway", gateway.url)
    assert none.code == 1
    assert "Did you mean 'qwen'?" in none.out


async def test_the_smoke_test_of_an_embedding_model(gateway: Running) -> None:
    text = "This is an embedding model; it generates no text. Use /v1/embeddings."

    async def embeds(call: Call) -> None:
        await (echo(call) if call.path == "/v1/embeddings" else refuses(400, text)(call))

    await gateway.serve(embeds, of="bge")
    done = await run_fleetctl("test", "--gateway", gateway.url)
    assert (done.code, done.out.splitlines()[1].split()[:4]) == (0, ["bge", "ok", "mac-1", "bge-0"])


async def test_a_fleet_without_models_fails_the_smoke_test(gateway: Running) -> None:
    done = await run_fleetctl("test", "--gateway", gateway.url)
    assert done.code == 1
    assert "serves no model yet" in done.err
