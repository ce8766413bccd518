"""A fleet that shows something on every screen of the dashboard, for its pictures: well, with one fault, or with many."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import orjson

from dashboard.history.records import COLUMNS, FINE_S, Sample
from gateway.limits import GatewayLimits
from machinery.process_log import LogRing
from manifests.change_log import AuditedTransport, ChangeAuthor
from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import ModelDeploymentStatus, NodeRefusal
from schemas.event import Event, EventSpec, ObjectReference
from schemas.gitsource import GitCommit, GitSource, GitSourceSpec, GitSourceStatus, InventoryEntry
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.records import ApiKey, Role
from schemas.replica import MemoryProof, RankAssignment, ReplicaStatus
from schemas.trust import PendingJoin
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.broken_objects import condition, put_asleep, put_away
from tests.support.dashboard_fleets import pending
from tests.support.dashboard_groups import fabric, put_epoch, put_group
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.fleetctl_manifests import put_replica
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import (
    Running,
    World,
    decisions_in,
    endpoint,
    replica_of,
    running_gateway,
)
from tests.support.gateway_world import deployment as gateway_deployment
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import GIB, deployment, revision

Trouble: TypeAlias = Literal["none", "one", "many"]
TROUBLES: Final[tuple[Trouble, ...]] = get_args(Trouble)
"""The states of the fleet: well, with one fault, with many."""
_MACS = (
    ("studio-1", 192, "Apple M3 Ultra", "berlin"),
    ("studio-2", 192, "Apple M3 Ultra", "berlin"),
    ("studio-3", 192, "Apple M3 Ultra", "berlin"),
    ("mini-1", 64, "Apple M4 Pro", "berlin"),
    ("mini-2", 64, "Apple M4 Pro", "lisbon"),
    ("mini-3", 48, "Apple M4 Pro", "lisbon"),
    ("book-anna", 36, "Apple M4 Max", "lisbon"),
)
_KEYS: tuple[tuple[str, Role, int | None], ...] = (
    ("ann", "admin", None),
    ("ci", "user", 600),
    ("grafana", "viewer", None),
)
_HOT = Condition(
    type="ThermalPressure",
    status=ConditionStatus.TRUE,
    reason="TooWarm",
    message="CPU die was at 98 °C; the machine slows down at 95 °C",
    last_transition_time=None,
)
_COMMIT = "4f2c9a1be0d37c5568f1a2b3c4d5e6f708192a3b"
ANSWER = """A fleet of Macs is **one machine** in three respects:

1. Models are placed where they *fit*, with a proof of the memory.
2. A question goes to the engine that can begin it first.
3. When a Mac goes, its answers go on elsewhere.

| Mac | memory | tokens/s |
|---|---:|---:|
| studio-1 | 192 GiB | 61 |
| mini-1 | 64 GiB | 24 |

Try it: `fleetctl run qwen3-8b`"""
_HOUR_STEPS = 360
_BETWEEN_S = 0.5
_USAGE = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [],
    "usage": {"prompt_tokens": 31, "completion_tokens": 118, "total_tokens": 149},
}
_FIRST_S = 0.12
_PIECE_S = 0.03
_ASKED = 24


async def put_showcase(store: Transport, trouble: Trouble) -> None:
    """Write the fleet."""
    has_many = trouble == "many"
    for name, gib, chip, site in _MACS:
        metadata = ObjectMeta(
            name=name, uid=f"uid-{name}", generation=1, labels={"site": site, "team": "core"}
        )
        spec = NodeSpec(unschedulable=has_many and name == "mini-3")
        status = node_status(name, memory_gib=gib * 0.75, chip=chip).model_copy(
            update={
                "memory_bytes": gib * GIB,
                "agent_version": "0.1.0",
                "conditions": (_HOT,) if has_many and name == "book-anna" else (),
                "labels": {"site": site},
                "fabric": fabric(name),
            }
        )
        life = {"mini-2": put_away, "mini-3": put_asleep}.get(name) if has_many else None
        alive = [put_lease(name)] if life is None else life(name)[1:]
        await store.commit(
            [], [codec.put_spec(Node(metadata=metadata, spec=spec)), put_node(name, status), *alive]
        )
    await _put_models(store, crashing="qwen-coder-1" if has_many else "")
    if trouble != "none":
        await _put_pending(store)
    await put_group(store)
    await _put_git(store)
    await _put_events(store, trouble)
    await _put_people(store)


def _available(replicas: int, *, revision: int = 1, failing: int = 0) -> ModelDeploymentStatus:
    """Return the status of a deployment whose replicas are ready, but for some."""
    return ModelDeploymentStatus(
        observed_generation=1,
        desired_replicas=replicas,
        replicas=replicas,
        ready_replicas=replicas - failing,
        updated_replicas=replicas,
        revision=revision,
        conditions=(
            Condition(type="Available", status=ConditionStatus.TRUE, reason="MinimumAvailable"),
        ),
    )


def _reported(replica: str, *, is_crashing: bool = False) -> Put:
    """Return the write of the status of a replica that serves, or whose engine ends again and again."""
    ready = (
        condition("Ready", "EngineEnded", "exit code 137 after 41 s: killed by the system")
        if is_crashing
        else condition("Ready", "Serving", status=ConditionStatus.TRUE)
    )
    value = codec.encode(ReplicaStatus(conditions=(ready,)))
    return Put(key=keys.status_key("Replica", replica), value=value)


def _proof(weights_gib: int) -> MemoryProof:
    """Return the memory of a replica with so large weights."""
    return MemoryProof(
        weights_bytes=weights_gib * GIB,
        kv_cache_bytes=weights_gib * GIB // 3,
        activation_bytes=GIB,
        overhead_bytes=GIB * 3 // 4,
    )


async def _put_models(store: Transport, *, crashing: str) -> None:
    for name, size, macs in (
        ("llama-70b", 40, ("studio-1", "studio-2")),
        ("qwen-coder", 18, ("studio-3", "mini-1")),
    ):
        old = deployment(name=name, replicas=2, context_length=4096)
        owner = deployment(name=name, replicas=2, context_length=8192)
        proof = _proof(size)
        template = template_hash(owner)
        replicas = [
            put_replica(owner, at, mac, memory=proof, template=template)
            for at, mac in enumerate(macs)
        ]
        names = [f"{name}-{at}" for at in range(len(macs))]
        states = [_reported(replica, is_crashing=replica == crashing) for replica in names]
        key = keys.status_key("ModelDeployment", name)
        status = _available(2, revision=2, failing=names.count(crashing))
        revisions = [codec.put_spec(revision(old, 1)), codec.put_spec(revision(owner, 2))]
        await store.commit(
            [],
            [
                codec.put_spec(owner),
                *replicas,
                *states,
                *revisions,
                Put(key=key, value=codec.encode(status)),
            ],
        )


async def _put_pending(store: Transport) -> None:
    """Write a deployment that fits on no Mac."""
    long = pending()
    spec = long.spec.model_copy(update={"concurrency": 640})
    refusals = tuple(
        NodeRefusal(
            node=name,
            reason="InsufficientMemory",
            message=f"needs 162.8 GiB, {name} has {gib * 0.75:.1f} GiB for models",
        )
        for name, gib, *_ in _MACS
    )
    message = "0/7 nodes fit: 7 too small even when empty"
    status = ModelDeploymentStatus(
        observed_generation=1,
        revision=1,
        desired_replicas=1,
        refusals=refusals,
        conditions=(
            condition("Available", "Unschedulable", f"0 of 1 replicas ready; {message}"),
            condition("Placed", "Unschedulable", message),
        ),
    )
    key = keys.status_key("ModelDeployment", long.name)
    await store.commit(
        [],
        [
            codec.put_spec(long.model_copy(update={"spec": spec})),
            Put(key=key, value=codec.encode(status)),
        ],
    )


async def _put_git(store: Transport) -> None:
    spec = GitSourceSpec(repository="https://git.example.com/fleet.git", path="sites/berlin")
    source = GitSource(metadata=ObjectMeta(name="fleet", uid="uid-s", generation=1), spec=spec)
    commit = GitCommit(author="Anna", subject="qwen-coder: a longer context")
    status = GitSourceStatus(
        observed_revision=f"main@{_COMMIT}",
        observed_commit=commit,
        applied_revision=f"main@{_COMMIT}",
        applied_commit=commit,
        applied_at=CLOCK.now(),
        inventory=(InventoryEntry(kind="ModelDeployment", name="qwen-coder"),),
        conditions=(
            Condition(
                type="Ready",
                status=ConditionStatus.TRUE,
                reason="Synced",
                message="all objects are as in the repository",
            ),
        ),
    )
    key = keys.status_key("GitSource", "fleet")
    await store.commit([], [codec.put_spec(source), Put(key=key, value=codec.encode(status))])


async def _put_people(store: Transport) -> None:
    """Write API keys, and a machine that asks to join."""
    now = CLOCK.now()
    for number, (name, role, limit) in enumerate(_KEYS):
        key = ApiKey(
            name=name,
            hash=f"{number:064x}",
            created=now - timedelta(days=20 * number + 3),
            role=role,
            requests_per_minute=limit,
        )
        await store.commit(
            [], [Put(key=keys.named(keys.API_KEY_PREFIX, name), value=codec.encode(key))]
        )
    waiting = PendingJoin(
        id="abcdefghijklmnop",
        name="mini-4",
        request="a request for a certificate",
        key_hash="0" * 64,
        hardware_uuid="11111111-2222-3333-4444-555555555555",
        source="192.0.2.14",
        chip="Apple M4 Pro",
        memory_bytes=64 * GIB,
        created=now - timedelta(minutes=2),
    )
    request_key = keys.named(keys.JOIN_REQUEST_PREFIX, waiting.id)
    await store.commit([], [Put(key=request_key, value=codec.encode(waiting))])


async def _put_events(store: Transport, trouble: Trouble) -> None:
    events = [
        ("Replica", "qwen-coder-1", "Normal", "ReplicaPlaced", "placed on mini-1"),
        ("ModelDeployment", "qwen-coder", "Normal", "NewRevision", "revision 2"),
    ]
    if trouble == "many":
        message = "its agent does not renew its lease"
        events.append(("Node", "mini-2", "Warning", "NodeNotReady", message))
    for number, (kind, name, type_, reason, message) in enumerate(events):
        spec = EventSpec(
            about=ObjectReference(kind=kind, name=name),
            type="Warning" if type_ == "Warning" else "Normal",
            reason=reason,
            message=message,
            source="reconciler",
            first_seen=CLOCK.now(),
            last_seen=CLOCK.now(),
        )
        event = Event(metadata=ObjectMeta(name=f"e{number}"), spec=spec)
        key = keys.event_key("reconciler", f"e{number}")
        await store.commit([], [Put(key=key, value=codec.encode_spec(event))])
    author = ChangeAuthor(
        user="anna@studio", manager="fleetctl", command="fleetctl cordon", reason="new cables"
    )
    audited = AuditedTransport(store, CLOCK, author)
    item = await audited.get(keys.spec_key("Node", "mini-3"))
    assert item is not None
    node = codec.decode_object(Node, item)
    labels = {**node.metadata.labels, "team": "lab"}
    changed = node.model_copy(
        update={"metadata": node.metadata.model_copy(update={"labels": labels})}
    )
    await audited.commit([codec.unchanged_guard(node)], [codec.put_spec(changed)])
    await store.commit([], [Put(key=keys.ELECTION_RECONCILER, value=b"studio-1/412 0.1.0")])


async def _answer(call: Call) -> None:
    await asyncio.sleep(_FIRST_S)
    await call.begin_stream()
    for piece in ANSWER.splitlines(keepends=True):
        await call.chunk(delta(piece))
        await asyncio.sleep(_PIECE_S)
    await call.chunk(b"data: " + orjson.dumps(_USAGE) + b"\n\n")
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


def _measured(at_s: int) -> Iterator[Sample]:
    """Yield an hour's step of figures, as smooth as real ones."""
    turn = at_s / 300
    busy = 0.55 + 0.25 * math.sin(turn) + 0.1 * math.sin(3.7 * turn)
    number = len(COLUMNS["node"])
    for kind, names in (("fleet", ("",)), ("node", tuple(name for name, *_ in _MACS))):
        values: dict[str, tuple[float, ...]] = {}
        for place, name in enumerate(names):
            share = max(0.03, busy * (1 - 0.1 * place))
            values[name] = (5.0, 3 * share, 0.0, 0.0)
            if kind == "node":
                found = (
                    *(0.3 * share, share, (60 + 20 * share) * GIB, 0.0, 420.0 * GIB),
                    *(48 + 25 * share, 50 + 30 * share, 0.0, 40 + 160 * share),
                    *(3e6 * share, 5e6 * share, 2e5, 4e5),
                    *(3 * share, 2 * share, 90 * share),
                )
                values[name] = found[:number]
        yield Sample(tier_s=FINE_S, at_s=at_s, kind=kind, values=values)


async def _ask(found: RunningDashboard) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    headers = {"x-fleet-csrf": "1"}
    url = f"{found.url}/chat/v1/chat/completions"
    for _ in range(_ASKED):
        async with found.http.post(url, json=body, headers=headers) as response:
            await response.read()


@asynccontextmanager
async def running_showcase(
    folder: Path, trouble: Trouble = "many"
) -> AsyncIterator[RunningDashboard]:
    """Run a dashboard with a history over the fleet, a gateway, and an engine that answers as `chat`."""
    store = MemoryTransport(CLOCK)
    await put_showcase(store, trouble)
    with decisions_in(ring := LogRing()):
        async with (
            running_gateway(store, GatewayLimits(drain_timeout_s=0.0, ring=ring)) as gateway,
            running(FakeEngine("chat-0", _answer)) as engine,
            _showing(store, folder, gateway, engine) as dashboard,
        ):
            yield dashboard


@asynccontextmanager
async def _showing(
    store: Transport, folder: Path, gateway: Running, engine: FakeEngine
) -> AsyncIterator[RunningDashboard]:
    """Serve `chat` with the engine, and run the dashboard."""
    url = f"http://127.0.0.1:{engine.port}"
    served = endpoint("chat-0", "chat", url, node="studio-2")
    await World(store).put(gateway_deployment("chat"), served)
    replica = replica_of(served)
    rank = RankAssignment(node="studio-2", memory=_proof(5))
    spec = replica.spec.model_copy(update={"ranks": (rank,)})
    put = codec.put_spec(replica.model_copy(update={"spec": spec}))
    await store.commit([], [put, _reported("chat-0")])
    await World(store).put_status("chat", _available(1))
    await gateway.knows("chat", ready=1)
    async with running_dashboard(store, can_write=True, state_dir=folder) as dashboard:
        history = dashboard.dashboard.history
        assert history is not None
        await history.opened()
        now_s = int(CLOCK.now().timestamp()) // FINE_S * FINE_S
        for back in range(_HOUR_STEPS - 1, 0, -1):
            history.add_samples(list(_measured(now_s - back * FINE_S)))
            await asyncio.sleep(0.02)
        await put_epoch(store, 1)
        await asyncio.sleep(_BETWEEN_S)
        await put_epoch(store, 2)
        deep = deployment(name="deep", replicas=1, context_length=8192)
        await store.commit([], [codec.put_spec(deep), _reported("deep-0")])
        await World(store).put_status("deep", _available(1))
        await _ask(dashboard)
        yield dashboard
