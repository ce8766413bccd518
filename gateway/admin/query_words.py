"""Words of queries about figures and requests, at gateways and recorders: their own, and those of older dashboards."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from gateway.telemetry.time_series import SERIES_METRICS, STEP_S, STEPS, IntervalSums
from schemas import duration
from schemas.wire.errors import invalid
from schemas.wire.metrics import REQUEST_OUTCOMES

_METRICS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "throughput": "tokens_per_second",
        "requests": "rps",
        "errors": "error_rate",
        "latencyMs": "latency",
        "ttft": "first_token",
    }
)
_OUTCOMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "success": ("ok",),
        "error": ("unavailable", "failed", "interrupted"),
        "cancelled": ("client_gone", "cancelled"),
    }
)
_SHOWN: Final = 50
SERIES_UNITS: Final[Mapping[str, str]] = MappingProxyType(
    {"tokens/s": "tokens/sec", "requests/s": "requests/sec"}
)
"""Units as older dashboards spell them."""


def public_status(outcome: str) -> str:
    """Return the word of older dashboards for an outcome."""
    return "success" if outcome == "ok" else outcome


def series_metric(word: str) -> tuple[str, Callable[[IntervalSums], float | None]]:
    """Return the unit of a figure over time and its computation from sums.

    Raises:
        RefusedError: the word is unknown.

    """
    found = SERIES_METRICS.get(_METRICS.get(word, word))
    if found is None:
        known = ", ".join([*_METRICS, *SERIES_METRICS])
        raise invalid(f"There is no metric '{word[:_SHOWN]}'; there are {known}.", "metric")
    return found


def parse_outcomes(text: str) -> frozenset[str]:
    """Return the outcomes that words name, separated by commas; none for an empty text.

    Raises:
        RefusedError: a word is unknown.

    """
    found: set[str] = set()
    for word in filter(None, text.split(",")):
        if word not in _OUTCOMES and word not in REQUEST_OUTCOMES:
            known = ", ".join(dict.fromkeys([*_OUTCOMES, *REQUEST_OUTCOMES]))
            raise invalid(f"No request ends as '{word[:_SHOWN]}'; they end as {known}.", "status")
        found.update(_OUTCOMES.get(word, (word,)))
    return frozenset(found)


def parse_kept_duration(text: str) -> int:
    """Return the seconds of a duration over which figures are kept.

    Raises:
        RefusedError: it is no duration, or too short or too long.

    """
    try:
        seconds = duration.parse(text)
    except ValueError as error:
        raise invalid(f"{error}.", "duration") from None
    if not STEP_S <= seconds <= STEPS * STEP_S:
        raise invalid(
            f"'{text}' is not between {STEP_S}s and 24h, which is what is kept.", "duration"
        )
    return int(seconds)
