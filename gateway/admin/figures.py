"""What the admin API's answers are made of: workers, sums, counts, as JSON. Reads one gateway; sends nothing."""

from collections import Counter
from typing import TypeAlias

from gateway.admin import workers
from gateway.admin.nodes import Macs
from gateway.admin.sight import DAY_S, RECENT_S, Sight, targets
from gateway.record.series import METRICS
from gateway.routing.table import Target
from machinery.version import version

Json: TypeAlias = dict[str, object]


def all_workers(sight: Sight, macs: Macs) -> list[Json]:
    """Return every Mac as dashboards see it."""
    found: dict[Target, bool] = {}
    names: dict[str, set[str]] = {}
    for model in sight.known.keeper.table.models.values():
        for target, is_leased in targets(model):
            found[target] = is_leased
            names.setdefault(target.replica, set()).add(model.name)
    seen = workers.Seen(
        macs=macs,
        targets=found,
        names=names,
        standing=sight.loads.standing(sight.clock.monotonic()),
        served=sight.recorder.metrics.served.by_replica(),
    )
    return workers.workers(seen)


def overview(sight: Sight, counts: dict[str, int]) -> Json:
    """Return the cards: who is there, how fast, how much; of this gateway alone."""
    recent, day = sight.over(RECENT_S), sight.over(DAY_S)
    return {
        "gateway": sight.id,
        "workers": counts,
        "activeRequests": sight.loads.total(),
        "queuedRequests": sight.waiting(),
        "totalRequests24h": int(day.requests),
        "totalTokens24h": int(day.prompt_tokens + day.output_tokens),
        "requestsPerSecond": METRICS["rps"][1](recent),
        "tokensPerSecond": METRICS["tokens_per_second"][1](recent),
        "avgLatencyMs": METRICS["latency"][1](recent),
        "avgFirstTokenMs": METRICS["first_token"][1](recent),
        "errorRate": METRICS["error_rate"][1](recent),
    }


def cluster(sight: Sight, counts: dict[str, int], macs: Macs) -> Json:
    """Return the state of the fleet as this gateway knows it."""
    keeper = sight.known.keeper
    staleness_s = keeper.staleness_s()
    models = sorted(keeper.table.models.values(), key=lambda model: model.name)
    return {
        "status": _health(sight, counts),
        "gateway": sight.id,
        "version": version(),
        "uptimeSeconds": round(sight.uptime_s(), 1),
        "store": {
            "source": keeper.source,
            "isStale": keeper.is_stale,
            "stalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            "nodesUnknownBecause": macs.why_not or None,
        },
        "workers": counts,
        "endpoints": keeper.table.endpoints,
        "endpointsKept": keeper.table.kept,
        "models": [
            {"name": model.name, "ready": model.ready(), "kept": model.kept()} for model in models
        ],
        "activeRequests": sight.loads.total(),
        "queuedRequests": sight.waiting(),
    }


def _health(sight: Sight, counts: dict[str, int]) -> str:
    if not sight.known.keeper.is_synced:
        return "unknown"
    is_well = not counts["degraded"] and not counts["offline"]
    return "healthy" if is_well and not sight.known.keeper.is_stale else "degraded"


def queue(sight: Sight) -> Json:
    """Return who waits here, and for what."""
    turns, replicas = sight.names.waiting(), sight.room.waiting()
    running = sight.loads.by_deployment()
    models = Counter(turns) + Counter(replicas)
    return {
        "queueDepth": sum(turns.values()) + sum(replicas.values()),
        "active": sight.loads.total(),
        "waitingByModel": dict(sorted(models.items())),
        "activeByDeployment": {name: count for name, count in sorted(running.items()) if count},
    }


# As many as the sparkline of the dashboard that this shape is from.
_GENERATIONS = 40


def snapshot(sight: Sight) -> Json:
    """Return everything that a small dashboard shows, at once."""
    recent, day = sight.over(RECENT_S), sight.over(DAY_S)
    now_s = sight.clock.now().timestamp()
    rate = METRICS["tokens_per_second"][1]
    speeds = []
    for entry in sight.recorder.journal.last(_GENERATIONS, outcomes=frozenset({"ok"})):
        spent_s = entry.whole_s - entry.first_s
        if entry.output_tokens and spent_s > 0:
            speeds.append(round(entry.output_tokens / spent_s, 2))
    return {
        "uptimeSeconds": round(sight.uptime_s(), 1),
        "requests24h": int(day.requests),
        "errors24h": int(day.errors),
        "promptTokens24h": int(day.prompt_tokens),
        "outputTokens24h": int(day.output_tokens),
        "tokensPerSecond": rate(recent),
        "peakTokensPerSecond": round(sight.recorder.series.fastest(now_s), 4),
        "avgLatencyMs": METRICS["latency"][1](recent),
        "avgFirstTokenMs": METRICS["first_token"][1](recent),
        "lastGenerationsTokensPerSecond": speeds[::-1],
        **queue(sight),
    }
