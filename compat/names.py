"""Names of mlx-serving at gateways that are started with `--compat-names`: phrases of health, codes, metrics. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from compat import shapes
from compat.shapes import Facts, Json, S, Worker
from machinery.prometheus import family_header
from schemas.wire.errors import Refusal

_NOT_LOADED: Final = ("Model not loaded", "MODEL_NOT_LOADED")
_CODES: Final[Mapping[str, tuple[str, str]]] = {
    "model_not_found": _NOT_LOADED,
    "model_not_ready": _NOT_LOADED,
    "model_starting": _NOT_LOADED,
}
"""The phrase and the code by the fleet's code."""
_METRICS: Final = (
    ("mlx_worker_active_requests", "gauge", "Current active requests", "active"),
    ("mlx_worker_total_requests", "counter", "Total requests handled", "handled"),
)


def rename(refusal: Refusal) -> Refusal:
    """Return the refusal with mlx-serving's phrase before the message, and its code."""
    names = _CODES.get(refusal.code or "")
    if names is None:
        return refusal
    phrase, code = names
    return replace(refusal, message=f"{phrase}: {refusal.message}", code=code)


def health_phrase(status: str) -> str:
    """Return the word of mlx-serving for the status of a process that is well; other phrases tell more than its words."""
    return "healthy" if status == "ok" else status


def health(facts: Facts[S], workers: Sequence[Worker], worker_id: str, *, has_models: bool) -> Json:
    """Return what `/health` of mlx-serving's workers and of mlx-jaccl-cluster has beside the status.

    `has_models`: the client may know the names of all models.
    """
    day = facts.over(shapes.DAY_S)
    return {
        "workerId": worker_id,
        "uptime": int(facts.uptime_s() * 1000),
        "metrics": {
            "activeRequests": facts.active(),
            "totalRequestsHandled": sum(mac.handled for mac in workers),
            "avgLatencyMs": facts.figures["latency"][1](day),
            "modelsLoaded": facts.ready_models() if has_models else [],
        },
        "worldSize": shapes.count_workers(workers)["online"],
        "queueDepth": sum(facts.waiting().values()),
    }


def metric_lines(workers: Sequence[Worker]) -> Iterator[str]:
    """Yield the metrics of mlx-serving's workers in Prometheus text format; the name of a node needs no escape."""
    for name, kind, about, field in _METRICS:
        yield from family_header(name, about, kind)
        for mac in workers:
            yield f'{name}{{worker_id="{mac.name}"}} {getattr(mac, field)}'
