"""Our gateway as the benches start it: a real process on a real etcd, with everything on that costs time."""

import hashlib
import json
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from bench.gateway.parts import Engine, answers, ask, child, free_port, own_core
from bench.result import PeerError
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
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
from schemas.routing import Routing, Timeouts
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put, Transport

KEY = "sk-fleet-" + "b" * 43
_CHATS, _STAYS = 20, 15
"""Chats of two turns, and how many of them must stay at their engine: of two, chance keeps half."""


@dataclass
class Ours:
    """A running gateway and its etcd."""

    port: int
    pid: int
    etcd: EmbeddedEtcd


@dataclass(frozen=True)
class Tls:
    """The TLS of a gateway: on neither side, or on one or both."""

    identity: Path
    """The folder of the gateway's identity."""
    context: ssl.SSLContext
    """The context of its clients."""
    to_clients: bool = False
    to_engines: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        files = str(self.identity / "identity.pem")
        clients = ("--tls-cert", files, "--tls-key", files) if self.to_clients else ()
        return (*clients, *(("--identity-dir", str(self.identity)) if self.to_engines else ()))


@dataclass(frozen=True)
class Traits:
    """The properties of models and engines that a bench may change."""

    timeouts: Timeouts
    scheme: str = "http"
    concurrency: int = 64
    """Requests that an engine takes at once."""


class Served(Protocol):
    """An engine that is published."""

    @property
    def replica(self) -> str: ...

    @property
    def port(self) -> int: ...


def endpoint(engine: Served, of: str, traits: Traits) -> Endpoint:
    spec = EndpointSpec(
        deployment=of,
        replica_uid=engine.replica,
        node="bench",
        url=f"{traits.scheme}://127.0.0.1:{engine.port}",
        served_names=(of,),
        concurrency=traits.concurrency,
    )
    return Endpoint(metadata=ObjectMeta(name=engine.replica), spec=spec)


def replica(engine: Served, of: str, traits: Traits) -> Replica:
    """Return the replica of the engine, without which its endpoint does not count."""
    proof = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)
    spec = ReplicaSpec(
        deployment=of,
        template="bench",
        model=ModelSource(path="/models/bench"),
        served_names=(of,),
        context_length=4096,
        concurrency=traits.concurrency,
        ranks=(RankAssignment(node="bench", memory=proof),),
    )
    return Replica(metadata=ObjectMeta(name=engine.replica, uid=engine.replica), spec=spec)


async def publish(
    address: EtcdAddress,
    fleet: Mapping[str, Sequence[Served]],
    traits: Traits,
) -> None:
    """Declare models, the engines as their endpoints, and a key, in etcd."""
    transport = connect(address)
    await declare(transport, fleet, traits)
    await transport.close()


async def declare(
    transport: Transport, fleet: Mapping[str, Sequence[Served]], traits: Traits
) -> None:
    """Declare models, the engines as their endpoints, and a key."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    key = ApiKey(name="bench", hash=digest, created=datetime.now(UTC))
    puts = [Put(key=keys.named(keys.API_KEY_PREFIX, key.name), value=codec.encode(key))]
    for name, engines in fleet.items():
        spec = ModelDeploymentSpec(
            model=ModelSource(path="/models/bench"),
            replicas=len(engines),
            routing=Routing(timeouts=traits.timeouts),
        )
        deployment = ModelDeployment(metadata=ObjectMeta(name=name), spec=spec)
        puts.append(codec.put_spec(deployment))
        for engine in engines:
            where = keys.endpoint_key("bench", engine.replica)
            puts.append(Put(key=where, value=codec.encode(endpoint(engine, name, traits))))
            puts.append(codec.put_spec(replica(engine, name, traits)))
    await transport.commit([], puts)


async def start(
    stack: AsyncExitStack,
    folder: Path,
    fleet: Mapping[str, Sequence[Engine]],
    timeouts: Timeouts | None = None,
    tls: Tls | None = None,
    concurrency: int = 64,
) -> Ours:
    """Start etcd and gateway in the folder; scoring, sessions, resumption and keys are on."""
    folder.mkdir(exist_ok=True)
    port, log = free_port(), folder / "gateway.log"
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", SystemClock())
    with own_core(is_gateway=False):
        await etcd.start()
    stack.push_async_callback(etcd.supervisor.stop)
    scheme = "https" if tls is not None and tls.to_engines else "http"
    await publish(etcd.address, fleet, Traits(timeouts or Timeouts(), scheme, concurrency))
    where = ("--port", str(port), "--etcd", str(etcd.address), "--log-level", "error")
    own = ("--auth", "on", "--state-dir", str(folder / "state"), *(tls.flags if tls else ()))
    with own_core(is_gateway=True):
        pid = await stack.enter_async_context(
            child(sys.executable, "-m", "gateway", *where, *own, log=log)
        )
    context = tls.context if tls is not None and tls.to_clients else None
    await answers(port, "/health", log, context)
    return Ours(port, pid, etcd)


def proof(port: int, engines: Sequence[Engine]) -> dict[str, object]:
    """Return signs that what costs time was on while a gateway was measured.

    Raises:
        PeerError: something was off, so that its figures would flatter.

    """
    metrics = ask(port, "/metrics").decode()
    tokens = re.search(
        r'^fleet_gateway_key_tokens_total\{key="bench"\} (\S+)', metrics, re.MULTILINE
    )
    stays = [_second_turn_stays(port, f"chat {n}") for n in range(_CHATS)]
    found: dict[str, object] = {
        "status_without_key": _status_without_key(port),
        "tokens_of_key": float(tokens[1]) if tokens is not None else 0,
        "chats_that_stay": f"{sum(stays)} of {_CHATS}",
        "streams_with_marks": sum(engine.stats().get("marked", 0) for engine in engines),
    }
    if found["status_without_key"] != 401 or sum(stays) < _STAYS or not all(found.values()):
        raise PeerError(f"our gateway was measured without all that it does: {found}")
    return found


def _chat(port: int, messages: Sequence[str], key: str) -> str:
    """Ask, users and assistant in turns; return the engine that answered."""
    roles = ("user", "assistant")
    body = {
        "model": "bench",
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.headers["x-fleet-replica"])


def _second_turn_stays(port: int, chat: str) -> bool:
    first = [f"key=0 {chat}: " + "what follows? " * 40]
    return _chat(port, first, KEY) == _chat(port, [*first, "This.", "And then?"], KEY)


def _status_without_key(port: int) -> int:
    try:
        _chat(port, ["key=0"], "wrong")
    except urllib.error.HTTPError as error:
        return error.code
    return 200
