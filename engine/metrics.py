"""What the engine shows of itself: metrics, progress, log lines.

How fast the engine has been lately, and what that promises to who comes now. Pure: told the time.

Clocks in seconds of `Clock.monotonic`.

What an engine shows on `/metrics`. Counts on the event loop alone; the worker's figures are read from its gauges.

Names after vLLM's and OpenTelemetry's GenAI conventions; buckets of the latter
(gen_ai.server.time_to_first_token, .time_per_output_token, .request.duration), with longer ends: a long prompt on
a small Mac takes minutes.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import process_memory
from engine.gauges import EngineState, Gauges
from machinery import prometheus
from machinery.prometheus import Counter, Gauge, Histogram, MetricFamily

_WINDOW_S = 60.0
# A second between readings: 60 of them, whatever the number of steps.
_SAMPLE_INTERVAL_S = 1.0
_MAX_ENDS = 1024
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60


def retry_after_s(*, queued: int, ended: int, within_s: float) -> int:
    """Return when a queue of this length is likely to be gone, in whole seconds from 1 to 60.

    `ended` requests came to their end `within_s` seconds. None yet: the first will take at least as long again.
    """
    wait_s = queued * within_s / max(1, ended)
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(wait_s)))


@dataclass(slots=True)
class CompletionRate:
    """When requests ended, of the last minute of work."""

    _times: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_ENDS))
    _busy_since: float = 0.0

    def begin(self, now_s: float) -> None:
        """Note that work came when there was none: the time before it says nothing of the pace."""
        self._times.clear()
        self._busy_since = now_s

    def add(self, now_s: float) -> None:
        """Note that a request ended."""
        self._times.append(now_s)

    def retry_after_s(self, *, queued: int, now_s: float) -> int:
        """Return when a queue of this length is likely to be gone."""
        since = max(self._busy_since, now_s - _WINDOW_S)
        while self._times and self._times[0] < since:
            self._times.popleft()
        if len(self._times) == _MAX_ENDS:
            since = self._times[0]
        return retry_after_s(queued=queued, ended=len(self._times), within_s=now_s - since)


@dataclass(frozen=True, slots=True)
class _ThroughputSample:
    at_s: float
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float


@dataclass(slots=True)
class Throughput:
    """Tokens a second while the worker is at it, over the last minute."""

    gauges: Gauges
    _readings: deque[_ThroughputSample] = field(default_factory=deque)

    def look(self, now_s: float) -> None:
        """Read the worker's figures, if it is time to."""
        if self._readings and now_s - self._readings[-1].at_s < _SAMPLE_INTERVAL_S:
            return
        gauges = self.gauges
        self._readings.append(
            _ThroughputSample(
                now_s,
                gauges.prefill_tokens,
                gauges.prefill_seconds,
                gauges.decode_tokens,
                gauges.decode_seconds,
            )
        )
        # One older than the window stays, so that what was counted since covers all of it.
        while len(self._readings) > 1 and self._readings[1].at_s <= now_s - _WINDOW_S:
            self._readings.popleft()

    def prefill(self) -> float:
        """Return prompt tokens computed a second of prefill; 0 if there was none."""
        first, gauges = self._first(), self.gauges
        return _per_second(
            gauges.prefill_tokens - first.prefill_tokens,
            gauges.prefill_seconds - first.prefill_seconds,
        )

    def decode(self) -> float:
        """Return tokens made a second of decoding, by all sequences together; 0 if there were none."""
        first, gauges = self._first(), self.gauges
        return _per_second(
            gauges.decode_tokens - first.decode_tokens,
            gauges.decode_seconds - first.decode_seconds,
        )

    def _first(self) -> _ThroughputSample:
        return self._readings[0] if self._readings else _ThroughputSample(0, 0, 0, 0, 0)


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


_PREFIX = "fleet_engine_"
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0),
)
_PER_TOKEN_S = (
    *(
        0.001,
        0.0025,
        0.005,
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
    ),
)
_WHOLE_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """What somebody else keeps, and is asked for when somebody looks."""

    gauges: Gauges
    speed: Throughput
    state: Callable[[], EngineState]
    in_flight: Callable[[], int]
    queued: Callable[[], int]


class EngineMetrics:
    """What this engine counts."""

    def __init__(self, numbers: MetricSources) -> None:
        self.requests = Counter(
            f"{_PREFIX}requests_total",
            "Requests, by how they ended.",
            ("endpoint", "outcome"),
        )
        self.prompt_tokens = Counter(
            f"{_PREFIX}prompt_tokens_total",
            "Tokens of prompts whose request ended after its first token, as in usage.",
        )
        self.queue = Histogram(
            f"{_PREFIX}request_queue_time_seconds",
            "From a request's entry to its slot.",
            ("endpoint",),
            bounds=_WHOLE_S,
        )
        self.first_token = Histogram(
            f"{_PREFIX}time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ("endpoint",),
            bounds=_FIRST_TOKEN_S,
        )
        self.per_token = Histogram(
            f"{_PREFIX}time_per_output_token_seconds",
            "Between a sequence's tokens, mean of each request.",
            ("endpoint",),
            bounds=_PER_TOKEN_S,
        )
        self.whole = Histogram(
            f"{_PREFIX}e2e_request_latency_seconds",
            "From a request's arrival to the last byte of its answer, if it was answered.",
            ("endpoint",),
            bounds=_WHOLE_S,
        )
        self._parts: tuple[MetricFamily, ...] = (
            self.requests,
            self.prompt_tokens,
            self.queue,
            self.first_token,
            self.per_token,
            self.whole,
            *_load_series(numbers),
            *_token_series(numbers.gauges, numbers.speed),
            *_prefix_cache_series(numbers.gauges),
            *_memory_series(numbers.gauges),
        )

    def text(self) -> str:
        """Return everything in Prometheus' text form."""
        return prometheus.render(self._parts)


def _gauge(name: str, help_: str, read: Callable[[], float]) -> Gauge:
    return Gauge(f"{_PREFIX}{name}", help_, read)


def _total(name: str, help_: str, read: Callable[[], float]) -> Gauge:
    return Gauge(f"{_PREFIX}{name}_total", help_, read, "counter")


def _load_series(numbers: MetricSources) -> tuple[MetricFamily, ...]:
    gauges = numbers.gauges
    return (
        _gauge("ready", "Whether the model serves.", lambda: numbers.state() is EngineState.READY),
        _gauge("num_requests_waiting", "Requests in the queue.", numbers.queued),
        _gauge("num_sequences_in_flight", "Sequences that hold a slot.", numbers.in_flight),
        _gauge("num_sequences_running", "Sequences that decode.", lambda: gauges.running),
        _gauge(
            "num_sequences_prefilling",
            "Sequences whose prompt is not read to its end.",
            lambda: gauges.prefilling,
        ),
        _gauge(
            "prefill_chunk_tokens",
            "Tokens of a prompt that are read at once.",
            lambda: gauges.chunk_tokens,
        ),
        _total("steps", "Steps of the batch.", lambda: gauges.steps),
        _total("faults", "Steps whose exception cost sequences.", lambda: gauges.faults),
    )


def _token_series(gauges: Gauges, speed: Throughput) -> tuple[MetricFamily, ...]:
    return (
        _total("generation_tokens", "Tokens made.", lambda: gauges.decode_tokens),
        _total(
            "prefill_tokens",
            "Tokens of prompts computed; the last of each counts as decoding.",
            lambda: gauges.prefill_tokens,
        ),
        _total("prefill_seconds", "Spent on prefill.", lambda: gauges.prefill_seconds),
        _total("decode_seconds", "Spent on decoding.", lambda: gauges.decode_seconds),
        _gauge(
            "prefill_tokens_per_second",
            "Prompt tokens computed a second of prefill, over the last minute.",
            speed.prefill,
        ),
        _gauge(
            "decode_tokens_per_second",
            "Tokens made a second of decoding, over the last minute.",
            speed.decode,
        ),
        _total("draft_tokens", "Tokens a draft model guessed.", lambda: gauges.draft_tokens),
        _total(
            "draft_accepted_tokens",
            "Those of them that the model would have chosen.",
            lambda: gauges.draft_accepted_tokens,
        ),
    )


def _prefix_cache_series(gauges: Gauges) -> tuple[MetricFamily, ...]:
    return (
        _total("prefix_cache_lookups", "Prompts looked up.", lambda: gauges.prefix_lookups),
        _total(
            "prefix_cache_queries",
            "Tokens of prompts looked up.",
            lambda: gauges.prefix_query_tokens,
        ),
        _total("prefix_cache_hits", "Tokens of them found.", lambda: gauges.prefix_hit_tokens),
        _total(
            "prefix_cache_evictions",
            "Blocks forgotten for want of room.",
            lambda: gauges.prefix_evictions,
        ),
        _gauge("prefix_cache_bytes", "Held by cached prefixes.", lambda: gauges.prefix_bytes),
        _gauge(
            "prefix_cache_blocks",
            "Blocks of cached prefixes that are told to gateways.",
            lambda: len(gauges.prefix_blocks),
        ),
    )


def _memory_series(gauges: Gauges) -> tuple[MetricFamily, ...]:
    return (
        _gauge("memory_active_bytes", "In MLX's arrays.", lambda: gauges.active_bytes),
        _gauge(
            "memory_buffer_cache_bytes",
            "Kept by MLX of freed arrays for the next ones.",
            lambda: gauges.buffer_bytes,
        ),
        _gauge(
            "memory_peak_bytes",
            "The most this process took.",
            lambda: process_memory.peak_bytes(gauges.peak_bytes),
        ),
        _gauge(
            "memory_kv_bytes",
            "KV caches of running sequences, with what is promised to them.",
            lambda: gauges.kv_bytes,
        ),
        _gauge("memory_limit_bytes", "What MLX may take.", lambda: gauges.limit_bytes),
        _gauge("model_loaded_bytes", "Weights in memory.", lambda: gauges.loaded_bytes),
    )
