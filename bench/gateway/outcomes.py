"""Effects of a fault on the requests meanwhile: counted, as a line, and as a sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.gateway import loading
from bench.gateway.loading import Records

NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The place of an event, and what the servers report of it."""

    setting: str
    connections: int
    """The same number for streams and for whole answers."""
    fault: str
    again_s: float | None = None
    """Until all was as before; None if nothing was done. `make bench-gateway-faults`: from the engine being well
    to its next request; `-real`: from the fault to all engines serving."""
    resumed: int = 0
    retried: int | None = None
    """None: nobody counts."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The effects of one fault."""

    during: Circumstances
    requests: int
    failed: int
    """Of all; the ones below are among them."""
    truncated: int
    """Streams that ended early, with an error or without."""
    wrong: int
    """Streams and answers with another text than the reference."""
    gap_ms: float
    """The longest that any stream paused."""
    first_ms: float
    """The longest that any stream took to begin."""
    slowest_ms: float
    """The longest whole answer."""
    ways: str

    @property
    def pause_ms(self) -> float:
        """The longest that anybody who streams had to wait."""
        return max(self.gap_ms, self.first_ms)


def told(during: Circumstances, wholes: Records, streams: Records) -> Outcome:
    """Count what came of the requests."""
    ways = loading.counts(wholes), loading.counts(streams)
    bad = [
        f"{way} {n} {kind}"
        for kind, found in zip(("whole", "streams"), ways, strict=True)
        for way, n in found.items()
        if way != "ok"
    ]
    requests = len(wholes) + len(streams)
    return Outcome(
        during=during,
        requests=requests,
        failed=requests - sum(way.get("ok", 0) for way in ways),
        truncated=sum(ways[1].get(way, 0) for way in ("truncated", "broken", "silent")),
        wrong=sum(way.get("wrong", 0) for way in ways),
        gap_ms=_longest_ms(streams, "gap_s"),
        first_ms=_longest_ms(streams, "first_s"),
        slowest_ms=_longest_ms(wholes, "whole_s"),
        ways=", ".join(bad),
    )


def _longest_ms(records: Records, name: str) -> float:
    return round(float(records[name].max(initial=0)) * 1000, 1)


def line(one: Outcome) -> str:
    """Return it for people."""
    during = one.during
    again = "" if during.again_s is None else f", as before after {during.again_s:.1f} s"
    retried = "" if during.retried is None else f", {during.retried} retried"
    return (
        f"{during.setting:24} c={during.connections:<3}{during.fault:14}{one.failed:5} of {one.requests:6} failed, "
        f"gap {one.gap_ms:7.1f} ms, first {one.first_ms:7.1f} ms, slowest {one.slowest_ms:7.1f} ms, "
        f"{during.resumed} resumed{retried}{again}{'; ' + one.ways if one.ways else ''}"
    )


def slowest_again_s(found: Sequence[Outcome]) -> float | None:
    """Return the longest time until all was as before, of those where it was."""
    times = [
        outcome.during.again_s
        for outcome in found
        if outcome.during.again_s is not None and outcome.during.again_s != NEVER
    ]
    return max(times, default=None)


def sums(found: Sequence[Outcome]) -> dict[str, float | None]:
    """Return sums and worst cases."""
    return {
        "failed_requests": sum(outcome.failed for outcome in found),
        "truncated_streams": sum(outcome.truncated for outcome in found),
        "wrong_texts": sum(outcome.wrong for outcome in found),
        "requests": sum(outcome.requests for outcome in found),
        # Of requests during and around the faults, which are far more frequent than on any fleet.
        "answered_percent": round(
            100
            - 100
            * sum(outcome.failed for outcome in found)
            / max(1, sum(outcome.requests for outcome in found)),
            3,
        ),
        "resumed": sum(outcome.during.resumed for outcome in found),
        "slowest_again_s": slowest_again_s(found),
        "never_again": sum(outcome.during.again_s == NEVER for outcome in found),
    }


def summary(found: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Return each setting's sums, and what each fault cost at worst."""
    result: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(outcome.during.setting for outcome in found):
        mine = [outcome for outcome in found if outcome.during.setting == name]
        result[name] = sums(mine)
        for fault in dict.fromkeys(outcome.during.fault for outcome in found):
            costs = [outcome.pause_ms for outcome in mine if outcome.during.fault == fault]
            result[name][f"{fault}_gap_ms"] = max(costs, default=None)
    return result
