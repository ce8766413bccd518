"""Aims of this gateway beside its peers, compared with the figures. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tabulate import tabulate
from typing_extensions import override

if TYPE_CHECKING:
    from bench.gateway.speed import Figures

_COLUMNS = {
    "requests_per_s": "req/s c64",
    "requests_per_cpu_s": "req/CPU s",
    "cpu_s_per_1000_requests": "CPU s/1k req",
    "added_p50_us_c1": "+p50 c1 us",
    "added_p99_us_c1": "+p99 c1",
    "added_p50_us_c16": "+p50 c16",
    "added_p99_us_c16": "+p99 c16",
    "added_first_us_c16": "+TTFT c16",
    "chunks_per_s": "chunks/s c64",
    "cpu_s_per_10000_chunks": "CPU s/10k ch",
    "cpu_s_per_10000_chunks_paced": "same, paced",
    "rss_mb": "RSS MB",
    "failed": "failed",
}


@dataclass(frozen=True)
class Aim:
    """One aim; a ratio wherever the aim is one."""

    name: str
    value: float
    bound: float
    is_least: bool
    """True for a lower bound, False for an upper one."""

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    @override
    def __str__(self) -> str:
        sign = ">=" if self.is_least else "<="
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict:7}{self.name:52}{self.value:10.2f}  {sign} {self.bound:g}"


def shown(found: "Sequence[Figures]") -> str:
    """Return a table, a row for each gateway."""
    rows = []
    for one in found:
        values = [getattr(one, name) for name in _COLUMNS]
        rows.append([one.peer.name, *(round(v, 3 if v < 10 else 0) for v in values)])
    return str(tabulate(rows, headers=["gateway", *_COLUMNS.values()]))


def aims(found: "Sequence[Figures]") -> list[Aim]:
    """Return the aims that can be judged with the peers that are there."""
    by = {one.peer.name: one for one in found}
    ours = by["ours"]
    routers = [one for one in found if one.peer.is_llm_router and one.peer.name != "litellm"]
    result = [Aim("added_p50_us_c1", ours.added_p50_us_c1, 300, is_least=False)]
    if routers:
        result += _beside_routers(ours, routers)
    if "litellm" in by:
        ratio = ours.requests_per_cpu_s / by["litellm"].requests_per_cpu_s
        result.append(Aim("requests_per_cpu_over_litellm", ratio, 150, is_least=True))
    if "nginx" in by:
        nginx = by["nginx"]
        requests = nginx.requests_per_cpu_s / ours.requests_per_cpu_s
        chunks = nginx.chunks_per_cpu_s / ours.chunks_per_cpu_s
        result.append(Aim("requests_per_cpu_nginx_over_ours", requests, 5, is_least=False))
        result.append(Aim("chunks_per_cpu_nginx_over_ours", chunks, 1.5, is_least=False))
    return result


def _beside_routers(ours: "Figures", routers: "Sequence[Figures]") -> Iterator[Aim]:
    requests = ours.requests_per_cpu_s / max(one.requests_per_cpu_s for one in routers)
    chunks = ours.chunks_per_cpu_s / max(one.chunks_per_cpu_s for one in routers)
    yield Aim("requests_per_cpu_over_best_router", requests, 1.2, is_least=True)
    yield Aim("chunks_per_cpu_over_best_router", chunks, 2, is_least=True)
    for name in ("added_p50_us_c1", "added_p99_us_c16"):
        ratio = getattr(ours, name) / min(getattr(one, name) for one in routers)
        yield Aim(f"{name}_over_best_router", ratio, 1, is_least=False)
