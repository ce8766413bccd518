"""Energy of requests: the power of a Mac, divided among the deployments whose tokens it made. Pure but for its counters.

A Mac's whole power counts while it answers, so joules include its idle share. While a Mac makes no token, its power
belongs to no deployment.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dashboard.history.queries import Point
from insight.conditions import Row
from schemas.wire.requests import EndedRequest

UNKNOWN: Final = math.nan
NO_POWER: Final = (
    "power is unknown: install macmon on each Mac (`brew install macmon`), and its agent reports it"
)
ENERGY_METRICS: Final[Mapping[str, tuple[str, str, str]]] = {
    "node": ("power_watts", "requests_per_second", "output_tokens_per_second"),
    "model": ("power_watts", "powered_requests_per_second", "powered_tokens_per_second"),
}
"""Watts, requests and tokens of each kind of subject."""
NO_REQUEST: Final = "no request ended in this time while the power was known"


@dataclass(slots=True)
class ShareCounter:
    """Requests and output tokens by Mac and deployment since the last step."""

    _counts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def count(self, ended: Iterable[EndedRequest]) -> None:
        """Count ended requests of deployments."""
        for request in ended:
            if request.worker and request.deployment:
                key = (request.worker, request.deployment)
                requests, tokens = self._counts.get(key, (0, 0))
                self._counts[key] = requests + 1, tokens + request.output_tokens

    def take(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """Return the counts, and begin anew."""
        counts, self._counts = self._counts, {}
        return counts


def divide_power(
    counts: Mapping[tuple[str, str], tuple[int, int]],
    watts: Mapping[str, float],
    seconds: float,
) -> dict[str, tuple[float, float, float]]:
    """Return watts, requests and tokens a second of each deployment; those of Macs without known power are left out.

    `watts` are by Mac; NaN: unknown. Pure.
    """
    totals: dict[str, int] = {}
    for (mac, _), (_, tokens) in counts.items():
        totals[mac] = totals.get(mac, 0) + tokens
    found: dict[str, tuple[float, float, float]] = {}
    for (mac, name), (requests, tokens) in counts.items():
        power = watts.get(mac, UNKNOWN)
        if math.isnan(power) or not totals[mac]:
            continue
        before = found.get(name, (0.0, 0.0, 0.0))
        share = power * tokens / totals[mac]
        found[name] = (
            before[0] + share,
            before[1] + requests / seconds,
            before[2] + tokens / seconds,
        )
    return found


def energy_row(
    subject: str,
    watts: Sequence[Point],
    requests: Sequence[Point],
    tokens: Sequence[Point],
    step_s: float,
) -> Row:
    """Return joules, and joules for a request and for 1,000 tokens, from series; null with the reason. Pure.

    Only steps in which all three are known count.
    """
    joules = count = made = seconds = 0.0
    for (_, power, _), (_, rate, _), (_, speed, _) in zip(watts, requests, tokens, strict=True):
        if power is not None and rate is not None and speed is not None:
            joules += power * step_s
            count += rate * step_s
            made += speed * step_s
            seconds += step_s
    is_known = seconds > 0
    reason = "" if count > 0.5 else NO_REQUEST if is_known else NO_POWER
    return {
        "subject": subject,
        "joules": round(joules, 3) if is_known else None,
        "knownSeconds": round(seconds),
        "requests": round(count) if is_known else None,
        "outputTokens": round(made) if is_known else None,
        "joulesPerRequest": round(joules / count, 3) if count > 0.5 else None,
        "joulesPer1000Tokens": round(joules / made * 1000, 3) if made > 0.5 else None,
        "reason": reason or None,
    }
