"""The requests of the five documents at one real fleet, and the shapes of the answers that the documents give."""

import ast
import json
import re
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.seeds import literals
from tests.support.fleet import Fleet, running_fleet
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = [pytest.mark.fleet, pytest.mark.mlx, pytest.mark.timeout(300)]

PRD_MODEL = "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit"
MANIFEST = f"""\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: qwen}}
spec:
  model: {{path: tiny}}
  servedNames: [standard, {PRD_MODEL}]
  contextLength: 1024
  performance: Always
"""
# What a machine without Apple silicon cannot know is null.
UNKNOWN_HERE = {"gpuUtilizationPercent", "gpuCores", "chipGeneration", "variant", "metalVersion"}
UNKNOWN_HERE |= {"performanceCores", "efficiencyCores", "port", "ip"}
# What only a Mac itself measures is null at a gateway.
UNKNOWN_TO_GATEWAYS = {"cpuUsagePercent", "memoryUsedGB", "uptime", "lastHeartbeat"}


@dataclass(frozen=True, slots=True)
class Site:
    """A fleet with its recorder, as a client sees them."""

    fleet: Fleet
    recorder: str
    http: aiohttp.ClientSession

    async def get(self, url: str) -> Any:
        async with self.http.get(url) as response:
            text = await response.text()
            assert response.status == 200, (url, text)
            return json.loads(text)

    async def chat(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        async with self.http.post(self.fleet.url + path, json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            return text if body.get("stream") else json.loads(text)


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Site]:
    root, port = tmp_path_factory.mktemp("seeds"), free_port()
    async with running_fleet(root, models_dir) as fleet, aiohttp.ClientSession() as http:
        fleet.start("dashboard", "dashboard", "--port", str(port), "--auth", "off")
        await fleet.applied(MANIFEST)
        await fleet.available("qwen", limit_s=120)
        await fleet.routed("qwen", 1)
        found = Site(fleet=fleet, recorder=f"http://127.0.0.1:{port}", http=http)
        await found.chat({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})

        async def is_recorded() -> bool:
            try:
                return bool(await found.get(f"{found.recorder}/api/dashboard/requests"))
            except (aiohttp.ClientError, AssertionError):
                return False

        await until_async(is_recorded, limit_s=60, what="the first request in the recorder")
        yield found


def check_shape(
    answer: Any, wanted: Any, where: str = "", unknown: Collection[str] = UNKNOWN_HERE
) -> None:
    """Assert that an answer has every member of a document's, of the same type; `unknown` ones may be null."""
    if isinstance(wanted, dict):
        assert isinstance(answer, dict), where
        for name, value in wanted.items():
            assert name in answer, f"{where}.{name}"
            check_shape(answer[name], value, f"{where}.{name}", unknown)
    elif isinstance(wanted, list):
        assert isinstance(answer, list), where
        if wanted and isinstance(wanted[0], dict):
            assert answer, where
            check_shape(answer[0], wanted[0], f"{where}[0]", unknown)
    elif answer is None:
        assert where.rpartition(".")[2] in unknown, where
    elif isinstance(wanted, int | float) and not isinstance(wanted, bool):
        assert isinstance(answer, int | float), (where, answer)
    else:
        assert isinstance(answer, type(wanted)), (where, answer)


def answers_of(text: str) -> dict[str, Any]:
    """Return the answers by the path of their GET."""
    found = re.findall(
        r"^GET (\S+)\nResponse: ([\[{]+\n.*?^[}\]]+)$", text, re.DOTALL | re.MULTILINE
    )
    return {path: literals.parse_script(body) for path, body in found}


def body_of_curl(text: str) -> dict[str, Any]:
    """Return the JSON of a curl command, with one message where the document has dots."""
    found = re.search(r"-d '(.*)'", text)
    assert found is not None
    text = found[1].replace("[...]", '[{"role": "user", "content": "hello"}]')
    body: dict[str, Any] = json.loads(text)
    return body


def check_length(answer: dict[str, Any], limit: int) -> None:
    """Assert that an answer is as long as its request allows; a sampled one may end before."""
    tokens, finish = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    assert tokens == limit if finish == "length" else 0 < tokens < limit


@pytest.mark.ci
async def test_the_request_of_the_mesh(site: Site) -> None:
    body = body_of_curl(literals.MESH_REQUEST.text)
    answer = await site.chat({**body, "max_tokens": 4})
    assert answer["model"] == "standard"
    check_length(answer, 4)


async def test_the_view_of_the_mesh(site: Site) -> None:
    text = literals.MESH_STATUS.text
    assert "Mesh Status: 3 nodes, all healthy" in text
    done = await site.fleet.ctl("status")
    assert done.code == 0, done.err
    first = done.out.splitlines()[0].lower()
    assert re.search(r"\b1 (of 1 )?(mac|node)s?\b.*\b(ready|online)", first), done.out
    assert "node-1" in done.out
    assert "standard" in done.out
    assert "Throughput" in text
    for verb in re.findall(r"^mlx-stack mesh (.*)", literals.MESH_VERBS.text, re.MULTILINE):
        if verb.startswith("routes"):
            done = await site.fleet.ctl(*verb.split())
            assert (done.code, "node-1" in done.out) == (0, True), done.err


async def test_the_request_of_the_ring_server(site: Site) -> None:
    found = re.search(r"json=(\{.*?^\}),", literals.RING_REQUEST.text, re.DOTALL | re.MULTILINE)
    assert found is not None
    data = await site.chat(ast.literal_eval(found[1]))
    # The document's two lines of output.
    assert isinstance(data["choices"][0]["message"]["content"], str)
    assert data["performance"]["decode_tokens_per_s"] > 0
    check_length(data, 100)


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/model/info"])
async def test_the_paths_of_the_ring_server(site: Site, path: str) -> None:
    assert path in literals.RING_ENDPOINTS.text
    assert await site.get(site.fleet.url + path)


async def test_the_request_of_mlx_jaccl_cluster(site: Site) -> None:
    body = body_of_curl(literals.JACCL_REQUEST.text)
    check_length(await site.chat(body), 64)
    streamed = await site.chat({**body, "stream": True})
    assert streamed.endswith("data: [DONE]\n\n")
    text = await site.chat({"model": "qwen", "prompt": "hello", "max_tokens": 3}, "/v1/completions")
    check_length(text, 3)


async def test_the_paths_of_mlx_jaccl_cluster(site: Site) -> None:
    paths = re.findall(r"^(/[\w/]+) \|\nGET", literals.JACCL_ENDPOINTS.text, re.MULTILINE)
    assert len(paths) == 7
    for path in paths:
        # The page and the stream are the recorder's; models and health are the gateway's.
        base = site.fleet.url if path in ("/v1/models", "/health") else site.recorder
        async with site.http.get(base + path) as response:
            assert response.status == 200, path
            if path == "/metrics/stream":
                line = (await response.content.readline()).removeprefix(b"data: ")
                assert {"worldSize", "queueDepth"} <= set(json.loads(line))


async def test_the_request_of_mlx_serving(site: Site) -> None:
    found = re.search(r"\n(\{.*?^\})", literals.SERVING_CHAT.text, re.DOTALL | re.MULTILINE)
    assert found is not None
    body = json.loads(re.sub(r"//.*", "", found[1]))
    assert (body["model"], body["stream"], body["session_id"]) == (
        PRD_MODEL,
        True,
        "optional_session_id",
    )
    lines = (await site.chat(body)).split("\n\n")
    wanted = re.findall(r"^data: (\{.*\})$", literals.SERVING_CHAT.text, re.MULTILINE)
    contents = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    for one in wanted:
        assert any(is_like(chunk, json.loads(one)) for chunk in contents), one
    assert lines[-2] == "data: [DONE]"


def is_like(chunk: Any, wanted: Any, unknown: Collection[str] = UNKNOWN_HERE) -> bool:
    try:
        check_shape(chunk, wanted, unknown=unknown)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("server", ["recorder", "gateway"])
async def test_the_dashboards_answers_of_mlx_serving(site: Site, server: str) -> None:
    wanted = answers_of(literals.SERVING_DASHBOARD_API.text)
    assert [path.split("?")[0].rpartition("/")[2] for path in wanted] == [
        "overview",
        "workers",
        "timeseries",
        "requests",
    ]
    answer: Any = None
    base = site.recorder if server == "recorder" else site.fleet.url
    unknown = UNKNOWN_HERE | (set() if server == "recorder" else UNKNOWN_TO_GATEWAYS)
    for path, shape in wanted.items():

        async def has_its_shape(path: str = path, shape: Any = shape) -> bool:
            nonlocal answer
            answer = await site.get(base + path)
            if path.startswith("/api/dashboard/metrics"):
                answer["points"] = [one for one in answer["points"] if one["value"] is not None]
            return is_like(answer, shape, unknown)

        try:
            # Agents are asked every ten seconds.
            await until_async(has_its_shape, limit_s=60, what=path)
        finally:
            check_shape(answer, shape, path, unknown)


async def test_the_events_of_mlx_serving(site: Site) -> None:
    text = literals.SERVING_DASHBOARD_API.text
    names = re.findall(r"^- (\w+): \{ (.*) \}$", text, re.MULTILINE)
    wanted = {name: set(re.findall(r"\w+", fields)) for name, fields in names}
    assert len(wanted) == 6
    seen: dict[str, dict[str, Any]] = {}

    async def next_event() -> None:
        message = json.loads((await socket.receive(timeout=60)).data)
        seen.setdefault(message["type"], message["data"])

    async with site.http.ws_connect(f"{site.recorder}/ws/dashboard") as socket:
        await site.chat({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
        while {"request_started", "request_completed", "metrics_update"} - set(seen):
            await next_event()
    for name, data in seen.items():
        assert wanted[name] <= set(data), name


async def test_the_cluster_api_of_mlx_serving(site: Site) -> None:
    text = literals.SERVING_CLUSTER_API.text
    status = answers_of(text)["/api/cluster/status"]
    dashboard_api = answers_of(literals.SERVING_DASHBOARD_API.text)
    for server in (site.recorder, site.fleet.url):
        check_shape(await site.get(f"{server}/api/cluster/status"), status)
        workers = await site.get(f"{server}/api/cluster/workers")
        names = [worker["workerId"] for worker in workers]
        assert names
        assert [
            one["workerId"] for one in await site.get(f"{server}/api/dashboard/workers")
        ] == names
        found = await site.get(f"{server}/api/cluster/workers/{names[0]}")
        assert set(dashboard_api["/api/dashboard/workers"][0]) <= set(found)
    paths = re.findall(r"^POST (\S+)", text, re.MULTILINE)
    assert len(paths) == 2
    for path in paths:
        url = site.fleet.url + path.replace(":workerId", "node-1")
        async with site.http.post(url, json={"modelId": PRD_MODEL}) as response:
            # What runs is declared: the refusal says how.
            assert response.status == 501, await response.text()
            assert "fleetctl" in (await response.json())["error"]["message"]


async def test_the_registration_and_heartbeat_of_mlx_serving(site: Site) -> None:
    worker = await site.get(f"{site.recorder}/api/cluster/workers/node-1")
    given = json.loads(literals.SERVING_REGISTRATION.text)
    hardware = {**given["hardware"]}
    # A name, as "M3".
    hardware["chipGeneration"] = "M3"
    check_shape(worker["hardware"], hardware)
    assert {"hostname", "ip", "status"} <= set(worker)
    beat = json.loads(literals.SERVING_HEARTBEAT.text)
    assert set(beat["metrics"]) <= set(worker["metrics"])
    capabilities = given["capabilities"]
    assert set(capabilities) == {"maxConcurrent", "supportedModelTiers", "availableMemoryGB"}
    assert isinstance(worker["hardware"]["supportedModelTiers"], list)
    assert worker["hardware"]["memoryForModelsGB"] > 0
    [at_gateway] = [
        found
        for found in await site.get(f"{site.fleet.url}/api/cluster/workers")
        if found["workerId"] == "node-1"
    ]
    assert at_gateway["endpoints"][0]["concurrency"] >= 1


async def test_messages_of_nats_have_their_http(site: Site) -> None:
    """The broker's request is a request of OpenAI's completions; its tokens are chunks, its error is a status."""
    given = json.loads(re.sub(r"//.*", "", literals.SERVING_INFERENCE.text))
    body = {"model": given["modelId"], "prompt": given["prompt"], "stream": True}
    body |= {"max_tokens": given["maxTokens"], "temperature": given["temperature"]}
    body |= {"session_id": given["sessionId"], "stream_options": {"include_usage": True}}
    text = await site.chat(body, "/v1/completions")
    chunks = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    kinds = re.findall(r'"type": "(\w+)"', literals.SERVING_STREAM.text)
    assert kinds == ["token", "done", "error"]
    assert any(chunk["choices"] and chunk["choices"][0]["text"] for chunk in chunks)
    assert 0 < chunks[-1]["usage"]["completion_tokens"] <= given["maxTokens"]
    async with site.http.post(
        f"{site.fleet.url}/v1/completions", json={**body, "model": "no"}
    ) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
