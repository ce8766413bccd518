"""Our gateway as the benches start it: a real process on a real etcd, with everything on that costs time."""

import hashlib
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.gateway.parts import Engine, answers, child, free_port
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
from store.port import Put

KEY = "sk-fleet-" + "b" * 43


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


def endpoint(engine: Engine, of: str, scheme: str = "http") -> Endpoint:
    spec = EndpointSpec(
        deployment=of,
        replica_uid=engine.replica,
        node="bench",
        url=f"{scheme}://127.0.0.1:{engine.port}",
        served_names=(of,),
        concurrency=64,
    )
    return Endpoint(metadata=ObjectMeta(name=engine.replica), spec=spec)


def replica(engine: Engine, of: str) -> Replica:
    """Return the replica of the engine, without which its endpoint does not count."""
    proof = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)
    spec = ReplicaSpec(
        deployment=of,
        template="bench",
        model=ModelSource(path="/models/bench"),
        served_names=(of,),
        context_length=4096,
        concurrency=64,
        ranks=(RankAssignment(node="bench", memory=proof),),
    )
    return Replica(metadata=ObjectMeta(name=engine.replica, uid=engine.replica), spec=spec)


async def publish(
    address: EtcdAddress,
    fleet: Mapping[str, Sequence[Engine]],
    timeouts: Timeouts | None,
    scheme: str = "http",
) -> None:
    """Declare models, the engines as their endpoints, and a key."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    key = ApiKey(name="bench", hash=digest, created=datetime.now(UTC))
    puts = [Put(key=keys.named(keys.API_KEY_PREFIX, key.name), value=codec.encode(key))]
    for name, engines in fleet.items():
        spec = ModelDeploymentSpec(
            model=ModelSource(path="/models/bench"),
            replicas=len(engines),
            routing=Routing(timeouts=timeouts or Timeouts()),
        )
        deployment = ModelDeployment(metadata=ObjectMeta(name=name), spec=spec)
        puts.append(codec.put_spec(deployment))
        for engine in engines:
            where = keys.endpoint_key("bench", engine.replica)
            puts.append(Put(key=where, value=codec.encode(endpoint(engine, name, scheme))))
            puts.append(codec.put_spec(replica(engine, name)))
    transport = connect(address)
    await transport.commit([], puts)
    await transport.close()


async def start(
    stack: AsyncExitStack,
    folder: Path,
    fleet: Mapping[str, Sequence[Engine]],
    timeouts: Timeouts | None = None,
    tls: Tls | None = None,
) -> Ours:
    """Start etcd and gateway in the folder; scoring, sessions, resumption and keys are on."""
    folder.mkdir(exist_ok=True)
    port, log = free_port(), folder / "gateway.log"
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", SystemClock())
    await etcd.start()
    stack.push_async_callback(etcd.supervisor.stop)
    scheme = "https" if tls is not None and tls.to_engines else "http"
    await publish(etcd.address, fleet, timeouts, scheme)
    where = ("--port", str(port), "--etcd", str(etcd.address), "--log-level", "error")
    own = ("--auth", "on", "--state-dir", str(folder / "state"), *(tls.flags if tls else ()))
    pid = await stack.enter_async_context(
        child(sys.executable, "-m", "gateway", *where, *own, log=log)
    )
    context = tls.context if tls is not None and tls.to_clients else None
    await answers(port, "/health", log, context)
    return Ours(port, pid, etcd)
