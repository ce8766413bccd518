"""Small fleets for tests: objects, a store that holds them, and a gateway that really listens."""

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import orjson
from multidict import CIMultiDictProxy
from typing_extensions import override

from gateway.auth.keyring import Principal
from gateway.forwarding.retry_state import Attempt
from gateway.limits import GatewayLimits
from gateway.routing.table import EngineEndpoint
from gateway.server import Gateway
from gateway.telemetry.recorder import Tracer
from gateway.telemetry.request_journal import JournalEntry
from machinery.clock import Clock, SystemClock
from machinery.http_server import listen
from machinery.process_log import JsonFormatter, LogRing
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    ModelDeploymentStatus,
    ModelSource,
)
from schemas.meta import ObjectMeta
from schemas.records import ApiKey
from schemas.replica import (
    Endpoint,
    EndpointSpec,
    MemoryProof,
    RankAssignment,
    Replica,
    ReplicaSpec,
)
from schemas.route import Backend, ModelRoute, ModelRouteSpec
from schemas.wire.engine_address import EngineAddress
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Operation, Put, Transport
from tests.support.gateway_fake_engine import FakeEngine, Script, running
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


def deployment(
    name: str, *served: str, replicas: int = 1, context_length: int = 4096
) -> ModelDeployment:
    spec = ModelDeploymentSpec(
        model=ModelSource(path="/models/m"),
        served_names=served,
        replicas=replicas,
        context_length=context_length,
    )
    return ModelDeployment(metadata=ObjectMeta(name=name), spec=spec)


def route(name: str, model: str, **weights: int) -> ModelRoute:
    backends = tuple(Backend(deployment=d, weight=w) for d, w in weights.items())
    return ModelRoute(
        metadata=ObjectMeta(name=name), spec=ModelRouteSpec(model=model, backends=backends)
    )


def endpoint(replica: str, of: str, url: str, *served: str, node: str = "mac-1") -> Endpoint:
    spec = EndpointSpec(
        deployment=of, replica_uid="uid", node=node, url=url, served_names=(of, *served)
    )
    return Endpoint(metadata=ObjectMeta(name=replica), spec=spec)


def replica_of(endpoint: Endpoint) -> Replica:
    """Return the replica that an endpoint speaks for, assigned to its node."""
    spec = endpoint.spec
    proof = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)
    rank = RankAssignment(node=spec.node, memory=proof)
    return Replica(
        metadata=ObjectMeta(name=endpoint.metadata.name, uid=spec.replica_uid),
        spec=ReplicaSpec(
            deployment=spec.deployment,
            template=spec.template or "t",
            model=ModelSource(path="/models/m"),
            served_names=spec.served_names,
            context_length=4096,
            concurrency=4,
            ranks=(rank,),
        ),
    )


def target(
    replica: str, of: str = "m", *, port: int = 1, version: int = 1, template: str = ""
) -> EngineEndpoint:
    return EngineEndpoint(
        replica=replica,
        node="mac-1",
        deployment=of,
        origin=EngineAddress("127.0.0.1", port),
        names=(of,),
        version=version,
        template=template,
    )


def journal_entry(number: int = 1, *, outcome: str = "ok", **fields: Any) -> JournalEntry:
    """Return what the journal keeps of an answered request."""
    values: dict[str, Any] = {
        "time_s": 1000.0 + number,
        "request_id": f"r-{number}",
        "path": CHAT,
        "model": "m",
        "key": "",
        "session": "",
        "is_streamed": True,
        "status": 200,
        "outcome": outcome,
        "strategy": "Scored",
        "served_by": target("m-0").name,
        "attempts": (Attempt(target("m-0").name, "answered", 1.0, 1.5),),
        "resumptions": 0,
        "queued_s": 0.0,
        "first_s": 0.5,
        "whole_s": 2.0,
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "output_tokens": 11,
    }
    return JournalEntry(**{**values, **fields})


@dataclass(frozen=True)
class World:
    """The content of the store, and methods to change it."""

    transport: Transport

    async def put(self, *objects: ModelDeployment | ModelRoute | Endpoint, lease: int = 0) -> None:
        """Write the objects, endpoints under the lease; with an endpoint also its replica, assigned to its node."""
        assigned = [replica_of(obj) for obj in objects if isinstance(obj, Endpoint)]
        puts = [codec.put_spec(replica) for replica in assigned]
        puts += [_put(obj, lease) for obj in objects]
        await self.transport.commit([], puts)

    async def put_status(self, name: str, status: ModelDeploymentStatus) -> None:
        key = keys.status_key("ModelDeployment", name)
        await self.transport.commit([], [Put(key=key, value=codec.encode(status))])

    async def delete(self, *keys_: str) -> None:
        operations: list[Operation] = [Delete(key=key) for key in keys_]
        await self.transport.commit([], operations)

    async def serve(self, of: str, *engines: FakeEngine) -> None:
        """Publish the engines as the deployment's replicas."""
        await self.put(deployment(of, replicas=len(engines)), *(published(e, of) for e in engines))


async def put_api_key(world: World, secret: str, name: str = "ci", **more: object) -> None:
    hash_ = hashlib.sha256(secret.encode()).hexdigest()
    fields = {"created": datetime(2026, 1, 1, tzinfo=UTC), **more}
    key = ApiKey(name=name, hash=hash_, **fields)  # type: ignore[arg-type]  # any field
    put = Put(key=keys.named(keys.API_KEY_PREFIX, name), value=codec.encode(key))
    await world.transport.commit([], [put])


def published(engine: FakeEngine, of: str) -> Endpoint:
    return endpoint(engine.replica, of, f"http://127.0.0.1:{engine.port}")


def _put(one: ModelDeployment | ModelRoute | Endpoint, lease: int) -> Put:
    if isinstance(one, Endpoint):
        key = keys.endpoint_key(one.spec.node, one.name)
        return Put(key=key, value=codec.encode(one), lease=lease)
    return codec.put_spec(one)


class FirstOfEquals(random.Random):
    """Draws evenly for weights, but always the first by name of engines with as little to do."""

    _drawn = 0

    @override
    def random(self) -> float:
        # The golden ratio spreads the first 24 bits evenly. Those behind them decide between equals: zero, so the first.
        self._drawn += 0x9E3779
        return self._drawn % 2**24 / 2**24


@dataclass(frozen=True)
class Running:
    """A gateway that listens, its store, the engines that a test starts, and an HTTP client."""

    gateway: Gateway
    url: str
    world: World
    http: aiohttp.ClientSession
    engines: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def knows(self, model: str, *, ready: int) -> None:
        """Wait until its table shows so many endpoints for the model."""

        def is_shown() -> bool:
            served = self.gateway.table_cache.table.models.get(model)
            return served is not None and served.ready() == ready

        await until(is_shown, what=f"{ready} endpoints for {model}")

    async def knows_keys(self) -> None:
        """Wait until it has read the keys; before, it refuses every request with 503."""
        await until(lambda: self.gateway.fleet_state.keyring.is_known, what="the keys")

    async def add_key(self, secret: str, name: str = "ci", **more: object) -> Principal:
        """Write a key, wait until the gateway knows it, and return who shows it."""
        await put_api_key(self.world, secret, name, **more)
        keyring = self.gateway.fleet_state.keyring
        found = await until(lambda: keyring.find(secret.encode()), what="the key")
        assert found is not None
        return found

    async def start(self, *engines: FakeEngine | Script, of: str = "m") -> list[FakeEngine]:
        """Start engines, for a script one with the next name, which end with the gateway."""
        named = [
            engine if isinstance(engine, FakeEngine) else FakeEngine(f"{of}-{number}", engine)
            for number, engine in enumerate(engines)
        ]
        for engine in named:
            await self.engines.enter_async_context(running(engine))
        return named

    async def serve(
        self, *engines: FakeEngine | Script, of: str | ModelDeployment = "m"
    ) -> list[FakeEngine]:
        """Start engines of a deployment, publish them, and wait until the gateway knows them."""
        declared = deployment(of, replicas=len(engines)) if isinstance(of, str) else of
        started = await self.start(*engines, of=declared.name)
        await self.world.put(declared, *(published(engine, declared.name) for engine in started))
        await self.knows(declared.name, ready=len(started))
        return started

    def post(self, path: str = CHAT, **options: Any) -> Any:
        return self.http.post(self.url + path, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.http.get(self.url + path, **options)

    async def chat(self, **body: Any) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Return status, body (parsed if it is JSON) and response."""
        async with self.post(json={"model": "m", "messages": [], **body}) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, orjson.loads(raw) if is_json else raw, response

    async def chat_with_key(
        self, secret: str = "", model: str = "m"
    ) -> tuple[int, str, CIMultiDictProxy[str]]:
        """Return status, code and headers."""
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        async with self.post(json={"model": model, "messages": []}, headers=headers) as response:
            error = (await response.json()).get("error", {})
            return response.status, error.get("code", ""), response.headers

    async def metrics(self) -> str:
        async with self.get("/metrics") as response:
            return str(await response.text())


@contextmanager
def decisions_in(ring: LogRing) -> Iterator[None]:
    """Write the decisions of gateways into a ring, as a gateway with `--log-level debug` does."""
    log = logging.getLogger("gateway.forwarding.decision_log")
    ring.setFormatter(JsonFormatter("gateway"))
    log.addHandler(ring)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(ring)


@asynccontextmanager
async def running_gateway(
    transport: Transport | None = None,
    limits: GatewayLimits | None = None,
    clock: Clock | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Running]:
    """Run a gateway; without `transport` it has a store of its own, which it has read when this yields."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    has_own_store = transport is None
    transport = transport or MemoryTransport(SystemClock())
    limits = limits or GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=5.0, hold_timeout_s=2.0)
    url = f"{'http' if limits.certificate is None else 'https'}://127.0.0.1:{port}"
    gateway = Gateway(
        transport, clock or SystemClock(), FirstOfEquals(), limits, url=url, tracer=tracer
    )
    connector = aiohttp.TCPConnector(force_close=True)
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession(connector=connector) as http:
        task = group.create_task(gateway.run(listener))
        made = Running(gateway=gateway, url=url, world=World(transport), http=http)
        try:
            if has_own_store:
                await until(
                    lambda: gateway.table_cache.is_synced, what="the gateway to read its store"
                )
            async with made.engines:
                yield made
        finally:
            gateway.stop()
            await task
    assert gateway.load_tracker.total() == 0
