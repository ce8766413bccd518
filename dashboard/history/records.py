"""Contents of the history: series in tiers, sums of requests with their buckets, and batches of both. Pure.

A series is written for all subjects of a kind at once. Values are 32-bit floats; NaN means that nothing was measured.
"""

import math
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from schemas.wire.metrics import REQUEST_ERRORS
from schemas.wire.requests import EndedRequest

FINE_S: Final = 10
"""Seconds of a step of the fine tier."""
COARSE_S: Final = 60
"""Seconds of a step of the coarse tier."""
FINE_KEPT_S: Final = 3600
"""Seconds for which the fine tier is kept."""
CHUNK: Final = 32
"""Subjects in one row of the file."""

# The order is that of the file: columns are added at the end and never removed.
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "fleet": ("macs_online", "active", "waiting", "gateways_silent"),
        "node": (
            *("cpu_ratio", "gpu_ratio", "memory_used_bytes", "swap_used_bytes", "disk_free_bytes"),
            *("cpu_celsius", "gpu_celsius", "thermal_level", "power_watts"),
            *("network_received_bytes_per_second", "network_sent_bytes_per_second"),
            *("disk_read_bytes_per_second", "disk_written_bytes_per_second"),
            *("active", "requests_per_second", "output_tokens_per_second"),
        ),
        "model": (
            *("desired", "ready", "active", "waiting"),
            # Of its Macs whose power is known.
            *("power_watts", "powered_requests_per_second", "powered_tokens_per_second"),
        ),
    }
)
"""The measured values of each kind of subject."""

# OpenTelemetry's bounds of gen_ai.server.time_to_first_token and .request.duration, with longer ends.
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0),
)
WHOLE_S: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)
# Tokens a second of one stream.
SPEED: Final = (
    *(
        1.0,
        2.0,
        3.0,
        5.0,
        7.0,
        10.0,
        12.5,
        15.0,
        17.5,
        20.0,
        25.0,
        30.0,
        35.0,
        40.0,
        50.0,
        60.0,
        70.0,
        80.0,
    ),
    *(100.0, 125.0, 150.0, 200.0, 300.0, 500.0, 1000.0, 2000.0, 5000.0),
)
BUDGET_STEP_S: Final = 300
"""Seconds of a step of the sums of deployments, by which objectives are judged."""
_TOTALS: Final = 8
_REQUESTS, _ERRORS, _WHOLE, _STREAMS, _FIRST, _PROMPT, _OUTPUT, _QUEUED = range(_TOTALS)
_HISTOGRAMS: Final = (
    ("first_token", FIRST_TOKEN_S),
    ("latency", WHOLE_S),
    ("queue", FIRST_TOKEN_S),
    # The order is that of the file: histograms are added at the end.
    ("speed", SPEED),
)
_STARTS: Final = {
    name: _TOTALS + sum(len(one) + 1 for _, one in _HISTOGRAMS[:number])
    for number, (name, _) in enumerate(_HISTOGRAMS)
}
_WIDTH: Final = _TOTALS + sum(len(bounds) + 1 for _, bounds in _HISTOGRAMS)
_BOUNDS: Final = dict(_HISTOGRAMS)
_TIMES: Final = ("first_token", "latency", "queue")

# Of a 32-bit float: the bits of the exponent, those that are kept, and half of the last kept one.
_FINITE, _KEPT, _HALF = 0x7F80_0000, 0xFFFF_F000, 0x800
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class RequestSums:
    """Sums and bucket counts of requests; two of them can be added, so percentiles over any range are right."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Sequence[float] = ()) -> None:
        """`numbers`: those of a stored row."""
        self.numbers = array("d", numbers[:_WIDTH])
        self.numbers.extend([0.0] * (_WIDTH - len(self.numbers)))

    def count(self, one: EndedRequest) -> None:
        """Count an ended request."""
        numbers = self.numbers
        numbers[_REQUESTS] += 1
        numbers[_ERRORS] += one.outcome in REQUEST_ERRORS
        numbers[_WHOLE] += one.whole_s
        numbers[_PROMPT] += one.prompt_tokens
        numbers[_OUTPUT] += one.output_tokens
        numbers[_QUEUED] += one.queued_s
        if one.first_s:
            numbers[_STREAMS] += 1
            numbers[_FIRST] += one.first_s
            self._observe("first_token", one.first_s)
            if one.output_tokens > 1 and one.whole_s > one.first_s:
                self._observe("speed", (one.output_tokens - 1) / (one.whole_s - one.first_s))
        self._observe("latency", one.whole_s)
        self._observe("queue", one.queued_s)

    def _observe(self, histogram: str, value: float) -> None:
        place = bisect_left(_BOUNDS[histogram], value)
        self.numbers[_STARTS[histogram] + place] += 1

    def add(self, other: "RequestSums") -> None:
        """Add the sums of another interval or model."""
        for place, number in enumerate(other.numbers):
            self.numbers[place] += number

    def totals(self) -> tuple[float, ...]:
        """Return requests, errors, seconds, streams, seconds to first tokens, tokens in and out, queued seconds."""
        return tuple(self.numbers[:_TOTALS])

    def quantile(self, histogram: str, share: float) -> float | None:
        """Return a percentile in seconds, interpolated within its bucket as Prometheus does; None without requests."""
        bounds, start = _BOUNDS[histogram], _STARTS[histogram]
        counts = self.numbers[start : start + len(bounds) + 1]
        rank = sum(counts) * share
        if not rank:
            return None
        below = 0.0
        for place, count in enumerate(counts):
            if count and below + count >= rank:
                if place == len(bounds):
                    return bounds[-1]
                low = bounds[place - 1] if place else 0.0
                return low + (bounds[place] - low) * (rank - below) / count
            below += count
        return bounds[-1]

    def observations(self, histogram: str) -> float:
        """Return the number of values in a histogram."""
        start = _STARTS[histogram]
        return sum(self.numbers[start : start + len(_BOUNDS[histogram]) + 1])

    def share_above(self, histogram: str, value: float) -> float:
        """Return the share of values above one, interpolated within its bucket; 0 without values."""
        bounds, start = _BOUNDS[histogram], _STARTS[histogram]
        counts = self.numbers[start : start + len(bounds) + 1]
        total = sum(counts)
        place = bisect_left(bounds, value)
        if not total or place == len(bounds):
            return counts[-1] / total if total else 0.0
        low = bounds[place - 1] if place else 0.0
        part = counts[place] * (bounds[place] - value) / (bounds[place] - low)
        return (sum(counts[place + 1 :]) + part) / total

    def pack(self) -> bytes:
        """Return the row for the file."""
        return array("f", self.numbers).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> "RequestSums":
        """Return the sums of a row of the file."""
        return cls(unpack_floats(data))


def _mean_ms(total_s: float, count: float) -> float | None:
    return total_s / count * 1000 if count else None


def request_metric(name: str, sums: RequestSums, seconds: float) -> float | None:
    """Return one of `REQUEST_METRICS` over an interval; None if there was nothing to measure."""
    histogram, _, quantile = name.rpartition("_")
    if quantile in QUANTILES:
        found = sums.quantile(histogram, QUANTILES[quantile])
        return None if found is None else found * 1000
    numbers = sums.numbers
    if name == "error_ratio":
        return numbers[_ERRORS] / numbers[_REQUESTS] if numbers[_REQUESTS] else None
    if name == "latency_mean":
        return _mean_ms(numbers[_WHOLE], numbers[_REQUESTS])
    if name == "first_token_mean":
        return _mean_ms(numbers[_FIRST], numbers[_STREAMS])
    if name == "queue_mean":
        return _mean_ms(numbers[_QUEUED], numbers[_REQUESTS])
    return numbers[_RATES[name]] / seconds


_RATES: Final = {
    "requests_per_second": _REQUESTS,
    "output_tokens_per_second": _OUTPUT,
    "prompt_tokens_per_second": _PROMPT,
}
REQUEST_METRICS: Final = (
    *(*_RATES, "error_ratio"),
    *(f"{name}_{one}" for name in _TIMES for one in ("mean", *QUANTILES)),
)
"""Figures of requests, of a model or of the fleet; times are in milliseconds."""


def metrics_of(kind: str) -> tuple[str, ...]:
    """Return all metrics of a kind of subject."""
    return COLUMNS[kind] if kind == "node" else (*COLUMNS[kind], *REQUEST_METRICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The values of all subjects of a kind in one step of a tier, in the order of `COLUMNS`."""

    tier_s: int
    at_s: int
    kind: str
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRevision:
    """One revision of a key of the store; no value if the key was deleted."""

    key: str
    at_s: float
    revision: int
    value: bytes | None


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows that are written in one transaction."""

    at_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    requests: list[EndedRequest] = field(default_factory=list)
    cursors: dict[str, str] = field(default_factory=dict)
    """The place in the feed of each gateway up to which `requests` go, by its id and by its URL."""
    revisions: list[KeyRevision] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.samples or self.requests or self.cursors or self.revisions)


def model_of(one: EndedRequest) -> str:
    """Return the model that a request counts for; empty for names of no model, which clients may invent."""
    return one.model if one.deployment else ""


def end_of(one: EndedRequest) -> float:
    """Return the time at which a request ended, in seconds since 1970."""
    return one.time_s + one.whole_s


def pack_values(slots: Mapping[int, Sequence[float]], width: int) -> bytes:
    """Return the row of a chunk: a zero, the number of columns, and the values of each slot, deflated.

    Values keep twelve significant bits, 0.02 %: the other bits are noise, and half of the file.
    """
    numbers = array("f", [math.nan] * (width * (max(slots) + 1)))
    for slot, values in slots.items():
        numbers[slot * width : (slot + 1) * width] = array("f", values)
    bits = array("I", numbers.tobytes())
    rounded = array(
        "I", [(bit + _HALF if bit & _FINITE != _FINITE else bit) & _KEPT for bit in bits]
    )
    return bytes([0, width]) + zlib.compress(rounded.tobytes(), 1)


def unpack_values(data: bytes, slot: int, count: int) -> list[float]:
    """Return the values of one slot of a chunk, `count` of them; NaN for what was not measured."""
    width = data[1] if len(data) > 1 else 0
    end = (slot + 1) * width * 4
    try:
        # Not beyond the slot: inflating takes most of the time of a read.
        values = zlib.decompressobj().decompress(memoryview(data)[2:], end) if end else b""
    except zlib.error:
        values = b""
    begin = slot * width * 4
    if not width or len(values) < begin + width * 4:
        return [math.nan] * count
    found = struct.unpack_from(f"={width}f", values, begin)
    return [*found[:count], *[math.nan] * (count - width)]


def unpack_floats(data: bytes) -> "array[float]":
    """Return the numbers of a stored row; a damaged end is left out."""
    return array("f", data[: len(data) // 4 * 4])


def mean_rows(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean of each column over several steps, without the steps that have no value."""
    return [
        _mean([one for one in column if not math.isnan(one)]) for column in zip(*rows, strict=True)
    ]


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found) if found else math.nan


def merge_steps(samples: Iterable[Sample], at_s: int) -> Iterator[Sample]:
    """Yield the coarse samples of the fine ones of one step of the coarse tier."""
    rows: dict[str, dict[str, list[Sequence[float]]]] = {}
    for sample in samples:
        for name, values in sample.values.items():
            rows.setdefault(sample.kind, {}).setdefault(name, []).append(values)
    for kind, found in rows.items():
        means = {name: mean_rows(steps) for name, steps in found.items()}
        yield Sample(tier_s=COARSE_S, at_s=at_s, kind=kind, values=means)
