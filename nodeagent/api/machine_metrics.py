"""What the agent's API looks at: values and live views of the agent. Changes nothing.

Figures of the machine and of every rank on it, taken when somebody asks.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import psutil

from machinery.clock import Clock
from machinery.process_log import LogRing
from machinery.prometheus import Gauge, LabelledGauge, MetricFamily
from machinery.version import version
from nodeagent.dependencies import ObjectCache
from nodeagent.engines import group_launch
from nodeagent.replicas.engine_tracker import EngineTracker
from schemas.node import NodeStatus
from schemas.replica import Replica
from store import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """One agent from within."""

    name: str
    status: NodeStatus
    """How the node was described when the agent started."""
    clock: Clock
    started_at: float
    """When, on the clock that never goes back."""
    engines: Mapping[str, EngineTracker]
    """The engines that run or ran, by replica: the agent's own, which changes."""
    replicas: ObjectCache[Replica]
    has_lease: Callable[[], bool]
    """Whether the node is there, for the others."""
    folder: Path
    """Where engines' logs lie, in a folder for each replica."""
    host: str
    """Where engines listen."""
    ring: LogRing

    def uptime_s(self) -> float:
        """Return for how long the agent runs."""
        return self.clock.monotonic() - self.started_at

    def rank_of(self, replica: str) -> int | None:
        """Return which of a replica's ranks is this node's; None if nobody says any more."""
        found = self.replicas.items.get(keys.spec_key("Replica", replica))
        return None if found is None else group_launch.rank_of_node(found, self.name)


Json: TypeAlias = dict[str, Any]

_ENGINE_TIMEOUT_S = 2.0
_MAX_RESPONSE_BYTES = 1 << 20
_PREFIX = "fleet_engine_"
# What of an engine's /metrics is told on, by the name it has there.
_FORWARDED = {
    "num_sequences_in_flight": "inFlight",
    "num_requests_waiting": "waiting",
    "decode_tokens_per_second": "tokensPerSecond",
    "prefill_tokens_per_second": "promptTokensPerSecond",
    "generation_tokens_total": "tokens",
    "prefill_tokens_total": "promptTokens",
    "memory_active_bytes": "activeBytes",
    "memory_limit_bytes": "limitBytes",
    "prefix_cache_bytes": "prefixCacheBytes",
}


async def machine_vitals(view: AgentView) -> Json:
    """Return the machine's memory and what every rank here does; null where nobody could tell."""
    machine = await asyncio.to_thread(_machine_memory)
    timeout = aiohttp.ClientTimeout(total=_ENGINE_TIMEOUT_S)
    # What may have changed while the engines are asked is none of this answer's.
    found = sorted(view.engines.items())
    async with aiohttp.ClientSession(timeout=timeout) as session:
        ranks = await asyncio.gather(*(_rank_vitals(view, session, *one) for one in found))
    return {
        "node": view.name,
        "uid": view.status.uid,
        "version": version(),
        "time": view.clock.now().isoformat(timespec="milliseconds"),
        "uptimeSeconds": round(view.uptime_s(), 3),
        "leaseHeld": view.has_lease(),
        "memory": {**machine, "allocatableBytes": view.status.allocatable_bytes},
        "ranks": list(ranks),
    }


def _machine_memory() -> Json:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "totalBytes": memory.total,
        "availableBytes": memory.available,
        "swapUsedBytes": swap.used,
        "agentBytes": psutil.Process().memory_info().rss,
    }


async def _rank_vitals(
    view: AgentView, session: aiohttp.ClientSession, replica: str, engine: EngineTracker
) -> Json:
    seen, process = engine.view(view.clock), engine.process
    pid = process.child.record.pid if seen.is_running else None
    told: Json = dict.fromkeys(_FORWARDED.values())
    why = "" if seen.is_running else "its engine does not run"
    if seen.is_running:
        try:
            told |= await _fetch_metrics(
                session, f"http://{_url_host(view.host)}:{process.port}/metrics"
            )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = f"its engine does not answer: {str(error) or 'no answer in time'}"
    rss_bytes, born = await asyncio.to_thread(_process_memory, pid)
    now_s = view.clock.now().timestamp()
    return {
        "replica": replica,
        "replicaUid": process.replica_uid,
        "rank": view.rank_of(replica) or 0,
        "epoch": process.epoch,
        "pid": pid,
        "port": process.port,
        "state": seen.state if seen.is_running else "Ended",
        "message": seen.message,
        "restarts": seen.restarts,
        "uptimeSeconds": None if born is None else round(max(0.0, now_s - born), 3),
        "provenBytes": process.memory_bytes,
        "rssBytes": rss_bytes,
        "peakBytes": seen.peak_bytes,
        **told,
        "why": why,
    }


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _fetch_metrics(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    """Return what an engine says of itself. Raises ClientError, OSError, TimeoutError or ValueError."""
    async with session.get(url, allow_redirects=False) as response:
        raw = await response.content.read(_MAX_RESPONSE_BYTES)
    return parse_engine_metrics(raw.decode())


def parse_engine_metrics(text: str) -> dict[str, float]:
    """Return what is told on of an engine's figures in Prometheus' text form. Pure.

    Raises:
        ValueError: a figure is no number.

    """
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        told = _FORWARDED.get(name.removeprefix(_PREFIX))
        if told is not None and name.startswith(_PREFIX):
            number = float(value)
            found[told] = int(number) if number.is_integer() else number
    return found


def _process_memory(pid: int | None) -> tuple[int | None, float | None]:
    """Return the memory of a process in bytes, and when it was started (seconds of 1970); None once it is gone."""
    try:
        if pid is None:
            return None, None
        process = psutil.Process(pid)
        return int(process.memory_info().rss), process.create_time()
    except psutil.Error:
        return None, None


def metric_families(view: AgentView) -> list[MetricFamily]:
    """Return what Prometheus is shown: the agent, the machine, the engines by replica."""
    memory = psutil.virtual_memory()
    engines = {name: engine.view(view.clock) for name, engine in view.engines.items()}
    return [
        _gauge("uptime_seconds", "For how long the agent runs.", view.uptime_s()),
        _gauge("lease_held", "Whether the node's lease is held.", view.has_lease()),
        _gauge("memory_total_bytes", "The machine's memory.", memory.total),
        _gauge("memory_available_bytes", "What of it could be had.", memory.available),
        _gauge("memory_allocatable_bytes", "What models may use.", view.status.allocatable_bytes),
        _engine_gauge(
            "running",
            "Whether the engine runs.",
            {name: int(seen.is_running) for name, seen in engines.items()},
        ),
        _engine_gauge(
            "ready",
            "Whether the engine takes requests.",
            {n: int(seen.is_running and seen.state == "Ready") for n, seen in engines.items()},
        ),
        _engine_gauge(
            "restarts",
            "How often in a row it was started again after it had ended by itself.",
            {name: seen.restarts for name, seen in engines.items()},
        ),
        _engine_gauge(
            "peak_bytes",
            "Most memory that it took.",
            {name: seen.peak_bytes for name, seen in engines.items()},
        ),
        _engine_gauge(
            "proven_bytes",
            "Memory that was proven for it.",
            {name: engine.process.memory_bytes for name, engine in view.engines.items()},
        ),
    ]


def _gauge(name: str, help_: str, value: float) -> Gauge:
    return Gauge(f"fleet_agent_{name}", help_, lambda: value)


def _engine_gauge(name: str, help_: str, values: Mapping[str, int]) -> LabelledGauge:
    return LabelledGauge(f"fleet_agent_engine_{name}", help_, "replica", lambda: values)
