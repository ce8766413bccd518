"""etcd's counters: calls by method and outcome, from its metrics."""

from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from machinery.prometheus import parse_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCounts:
    """Calls since the start of an etcd."""

    begun: Counter[str] = field(default_factory=Counter)
    """By method, with streams."""
    authenticated: Counter[str] = field(default_factory=Counter)
    """Requests for a token, by gRPC code."""


async def call_counts(url: str) -> CallCounts:
    """Return the calls that the etcd at the URL has counted."""
    counts = CallCounts()
    for sample in parse_samples(await _metrics(url)):
        labels = dict(sample.labels)
        method = labels.get("grpc_method", "")
        if not float(sample.value):
            continue
        if sample.name == "grpc_server_started_total":
            counts.begun[method] += int(float(sample.value))
        if sample.name == "grpc_server_handled_total" and method == "Authenticate":
            counts.authenticated[labels["grpc_code"]] += int(float(sample.value))
    return counts


async def gauges(url: str) -> dict[str, float]:
    """Return the values without labels that the etcd at the URL reports."""
    samples = parse_samples(await _metrics(url))
    return {sample.name: float(sample.value) for sample in samples if not sample.labels}


async def _metrics(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        return await response.text()
