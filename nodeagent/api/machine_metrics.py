"""The metrics of the machine and of every rank on it, and the view of the agent from which its API computes them."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import psutil

from machinery.clock import Clock
from machinery.footprint import footprint_bytes
from machinery.process_log import LogRing
from machinery.prometheus import Gauge, MetricFamily, build_info
from machinery.version import version
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.hub_mirror import HubMirrorRoutes
from nodeagent.api.prompt_routes import PromptRoutes
from nodeagent.doctor.readers import CollectionScope
from nodeagent.engines import engine_metrics, group_launch
from nodeagent.engines.engine_http import EngineHttp
from nodeagent.engines.tls import NodeTls
from nodeagent.hardware.load import LoadReading, LoadSampler, load_tree
from nodeagent.kept_copies import ObjectCache
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.pulls import ModelPulls
from nodeagent.model_store.quantizations import Quantizations
from nodeagent.replicas.engine_tracker import EngineTracker
from schemas.node import NodeStatus
from schemas.replica import Replica
from schemas.wire.engine_address import EngineAddress
from schemas.wire.health import StoreView
from store import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """Read-only access of the API to one agent."""

    name: str
    status: NodeStatus
    """The node's status at the start of the agent."""
    clock: Clock
    started_at: float
    """The start of the agent on the monotonic clock."""
    engines: Mapping[str, EngineTracker]
    """Engines by replica name: the agent's own mapping, which changes."""
    replicas: ObjectCache[Replica]
    has_lease: Callable[[], bool]
    """True if the node's lease is held."""
    folder: Path
    """The folder of engines; each replica has a subfolder with its log."""
    ring: LogRing
    tls: NodeTls | None = None
    """The node's identity for its engines; None: they serve plain HTTP."""
    more: Sequence[MetricFamily] = ()
    """Metrics of the agent's other parts."""
    load: LoadSampler | None = None
    """The load of the machine; None: it is not sampled."""
    collector: ModelCollector | None = None
    """The store of models and what uses them; None: the agent has no store of models."""
    pulls: ModelPulls | None = None
    """The fetches that people ask for; None: the agent has no store of models."""
    quantizations: Quantizations | None = None
    """The quantizations that people ask for; None: the agent makes none."""
    blobs: BlobRoutes | None = None
    """The files for other agents; None: it gives them none."""
    prompts: PromptRoutes | None = None
    """The prompts for agents that take over; None: it shows them none."""
    mirror: HubMirrorRoutes | None = None
    """The models for Hugging Face's clients; None: it is no mirror."""
    scope: CollectionScope | None = None
    """The parts of this machine that doctor examines; None: it examines nothing here."""

    def store_view(self) -> StoreView:
        """Return how old the agent's view of the store is, and whether the store refuses the agent."""
        return StoreView(self.replicas.staleness_s(), self.replicas.refusal)

    def uptime_s(self) -> float:
        """Return the uptime of the agent in seconds."""
        return self.clock.monotonic() - self.started_at

    def rank_of(self, replica: str) -> int | None:
        """Return this node's rank of a replica; None if it has none, or the replica is deleted."""
        item = self.replicas.items.get(keys.spec_key("Replica", replica))
        return None if item is None else group_launch.rank_of_node(item, self.name)


Json: TypeAlias = dict[str, Any]

_ENGINE_TIMEOUT_S = 2.0
_MAX_RESPONSE_BYTES = 1 << 20


async def machine_vitals(view: AgentView) -> Json:
    """Return the machine's memory and the metrics of every rank here; None (null) where they are unknown."""
    machine = await asyncio.to_thread(_machine_memory)
    # A copy: engines may start and end while their metrics are fetched.
    found = sorted(view.engines.items())
    http = EngineHttp(view.tls)
    try:
        ranks = await asyncio.gather(*(_rank_vitals(view, http, *one) for one in found))
    finally:
        await http.close()
    return {
        "node": view.name,
        "uid": view.status.uid,
        "version": version(),
        "time": view.clock.now().isoformat(timespec="milliseconds"),
        "uptimeSeconds": round(view.uptime_s(), 3),
        "leaseHeld": view.has_lease(),
        "memory": {**machine, "allocatableBytes": view.status.allocatable_bytes},
        "load": load_tree(LoadReading() if view.load is None else view.load.latest()),
        "ranks": list(ranks),
    }


def _machine_memory() -> Json:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "totalBytes": memory.total,
        "availableBytes": memory.available,
        "swapUsedBytes": swap.used,
        "agentBytes": footprint_bytes(os.getpid()),
    }


async def _rank_vitals(
    view: AgentView, http: EngineHttp, replica: str, engine: EngineTracker
) -> Json:
    observed_engine, process = engine.view(view.clock), engine.process
    pid = process.child.record.pid if observed_engine.is_running else None
    figures: Json = dict.fromkeys(engine_metrics.FORWARDED.values())
    why = "" if observed_engine.is_running else "its engine is not running"
    if observed_engine.is_running:
        try:
            figures |= await _fetch_metrics(http, process.address)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = f"its engine does not answer: {str(error) or 'no answer in time'}"
    used_bytes, born = await asyncio.to_thread(_process_memory, pid)
    now_s = view.clock.now().timestamp()
    return {
        "replica": replica,
        "replicaUid": process.replica_uid,
        "rank": view.rank_of(replica) or 0,
        "epoch": process.epoch,
        "pid": pid,
        "url": process.address.url,
        "state": observed_engine.state if observed_engine.is_running else "Ended",
        "message": observed_engine.message,
        "restarts": observed_engine.restarts,
        "uptimeSeconds": None if born is None else round(max(0.0, now_s - born), 3),
        "provenBytes": process.memory_bytes,
        "footprintBytes": used_bytes,
        "peakBytes": observed_engine.peak_bytes,
        **figures,
        "why": why,
    }


async def _fetch_metrics(http: EngineHttp, address: EngineAddress) -> Mapping[str, Any]:
    """Return the metrics of an engine. Raises ClientError, OSError, TimeoutError or ValueError."""
    raw = await http.get(
        address, "/metrics", limit_s=_ENGINE_TIMEOUT_S, max_bytes=_MAX_RESPONSE_BYTES
    )
    return engine_metrics.parse_engine_metrics(raw.decode())


def _process_memory(pid: int | None) -> tuple[int | None, float | None]:
    """Return the memory of a process in bytes and its start (Unix time in seconds); None if it is gone."""
    try:
        if pid is None:
            return None, None
        return footprint_bytes(pid), psutil.Process(pid).create_time()
    except psutil.Error:
        return None, None


def metric_families(view: AgentView) -> list[MetricFamily]:
    """Return the metrics for Prometheus: of the agent, the machine, and engines by replica."""
    memory = psutil.virtual_memory()
    engines = {name: engine.view(view.clock) for name, engine in view.engines.items()}
    return [
        build_info("agent"),
        _gauge("uptime_seconds", "Seconds since the start of the agent.", view.uptime_s()),
        _gauge("lease_held", "Whether the node's lease is held.", view.has_lease()),
        _gauge("memory_total_bytes", "Memory of the machine.", memory.total),
        _gauge(
            "memory_available_bytes", "Memory of the machine that is available.", memory.available
        ),
        _gauge(
            "memory_allocatable_bytes",
            "Memory of the machine that models may use.",
            view.status.allocatable_bytes,
        ),
        _engine_gauge(
            "running",
            "Whether the engine runs.",
            {name: int(seen.is_running) for name, seen in engines.items()},
        ),
        _engine_gauge(
            "ready",
            "Whether the engine accepts requests.",
            {n: int(seen.is_running and seen.state == "Ready") for n, seen in engines.items()},
        ),
        _engine_gauge(
            "restarts",
            "Consecutive restarts after it ended by itself.",
            {name: seen.restarts for name, seen in engines.items()},
        ),
        *view.more,
        _engine_gauge(
            "peak_bytes",
            "Peak memory of the engine.",
            {name: seen.peak_bytes for name, seen in engines.items()},
        ),
        _engine_gauge(
            "proven_bytes",
            "Memory that the proof grants the engine.",
            {name: engine.process.memory_bytes for name, engine in view.engines.items()},
        ),
    ]


def _gauge(name: str, help_: str, value: float) -> Gauge:
    return Gauge(f"fleet_agent_{name}", help_, lambda: value)


def _engine_gauge(name: str, help_: str, values: Mapping[str, int]) -> Gauge:
    return Gauge(f"fleet_agent_engine_{name}", help_, lambda: values, labels=("replica",))
