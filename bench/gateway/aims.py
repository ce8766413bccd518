"""Aims of this gateway beside its peers, compared with the figures. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from bench.gateway.figures import Results, Spread, of_cpu, of_p50, of_p99
from bench.gateway.peers import FLOOR
from bench.gateway.workloads import ALONE, KINDS, PACED, STREAM

OURS = "ours"
_NGINX = "nginx"
# One head, heads that never repeat, chats of two turns, both.
_REQUESTS = (1.6, 1.4, 1.5, 1.6)
_CPU_OVER_NGINX = 3.2
_CHUNKS, _PACED_CHUNKS, _PACED_CPU_OVER_NGINX = 2.3, 1.15, 1.4
_ADDED_P50_US = 70
_IDLE_KIB = 12


@dataclass(frozen=True)
class Aim:
    """One aim; a ratio wherever the aim is one."""

    name: str
    value: float
    bound: float
    is_least: bool
    """True for a lower bound, False for an upper one."""
    low: float | None = None
    high: float | None = None
    """The least and the greatest value of a round."""
    beside: str = ""
    """The peer that it is compared with."""

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    @property
    def bound_text(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g}"

    @property
    def figures(self) -> dict[str, object]:
        """Return it for the last line."""
        spread = {"low": self.low, "high": self.high}
        return {
            "value": round(self.value, 2),
            **{name: round(value, 2) for name, value in spread.items() if value is not None},
            "aim": self.bound_text,
            "is_met": self.is_met,
            **({"beside": self.beside} if self.beside else {}),
        }

    @override
    def __str__(self) -> str:
        verdict = "met" if self.is_met else "MISSED"
        spread = "" if self.low is None else f"({self.low:.2f} to {self.high:.2f})"
        line = f"{verdict:7}{self.name:52}{self.value:8.2f} {spread:20}{self.bound_text:10}{self.beside}"
        return line.rstrip()


def _at_least(name: str, found: Spread, bound: float, beside: str) -> Aim:
    return Aim(name, found.median, bound, True, found.low, found.high, beside)  # noqa: FBT003 - as in the class


def _at_most(name: str, found: Spread, bound: float, beside: str) -> Aim:
    return Aim(name, found.median, bound, False, found.low, found.high, beside)  # noqa: FBT003 - as in the class


def aims(results: Results, idle_kib: Mapping[str, float]) -> Iterator[Aim]:
    """Yield the aims that can be judged with the peers that are there; ours is one of them."""
    yield from _beside_routers(results)
    if results.is_measured(_NGINX):
        yield from _beside_nginx(results)
    if OURS in idle_kib:
        yield Aim("kib_per_idle_stream", idle_kib[OURS], _IDLE_KIB, is_least=False)


def _beside_routers(results: Results) -> Iterator[Aim]:
    chunks = ((STREAM, _CHUNKS), (PACED, _PACED_CHUNKS))
    for case, bound in (*zip(KINDS, _REQUESTS, strict=True), *chunks):
        if best := results.best_router(case, of_cpu):
            what = "chunks" if case.is_streamed else "requests"
            ratio = results.ratio(case, best, OURS, of_cpu)
            yield _at_least(f"{what}_per_cpu_s_over_best_router_{case.name}", ratio, bound, best)
    if best := results.best_router(ALONE, of_p50):
        ratio = results.ratio(ALONE, OURS, best, of_p50)
        yield _at_most("p50_over_best_router_alone", ratio, 1, best)
    for case in KINDS:
        if best := results.best_router(case, of_p99):
            ratio = results.ratio(case, OURS, best, of_p99)
            yield _at_most(f"p99_over_best_router_{case.name}", ratio, 1, best)


def _beside_nginx(results: Results) -> Iterator[Aim]:
    bounds = dict.fromkeys(KINDS, _CPU_OVER_NGINX) | {PACED: _PACED_CPU_OVER_NGINX}
    for case, bound in bounds.items():
        ratio = results.ratio(case, OURS, _NGINX, of_cpu)
        yield _at_most(f"cpu_over_nginx_{case.name}", ratio, bound, _NGINX)
    added_us = results.difference(ALONE, OURS, _NGINX, of_p50)
    yield _at_most("added_p50_us_alone", added_us, _ADDED_P50_US, _NGINX)


def over_floor(results: Results) -> dict[str, dict[str, float]]:
    """Return the processor time of ours and of nginx over that of the bare protocols, which has no aim."""
    found: dict[str, dict[str, float]] = {}
    for peer in (OURS, _NGINX):
        for case in (*KINDS, ALONE, STREAM, PACED):
            if results.rounds(case, peer) and results.rounds(case, FLOOR):
                ratio = results.ratio(case, peer, FLOOR, of_cpu)
                found.setdefault(peer, {})[case.name] = round(ratio.median, 2)
    return found
