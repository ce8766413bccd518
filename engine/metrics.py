"""Metrics of the engine: counters of requests, and the throughput of the last minute.

Counters are updated on the event loop only; figures of the worker are read from its gauges. Names follow vLLM,
buckets are those of `schemas/wire/metrics.py`. Times are in seconds of `Clock.monotonic`.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.gauges import Gauges
from engine.lifecycle import EngineState
from machinery import prometheus
from machinery.prometheus import Counter, Gauge, Histogram, MetricFamily, build_info
from schemas.wire import metrics as wire_metrics
from schemas.wire.metrics import (
    ENGINE_PREFIX,
    FIRST_TOKEN_BOUNDS_S,
    PER_TOKEN_BOUNDS_S,
    REQUEST_BOUNDS_S,
    TOKEN_COUNT_BOUNDS,
)

_WINDOW_S = 60.0
# One sample a second, so at most 60, whatever the number of steps.
_SAMPLE_INTERVAL_S = 1.0
_MAX_ENDS = 1024
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60


def retry_after_s(*, queued: int, ended: int, within_s: float) -> int:
    """Return the estimated time until the queue is empty, in whole seconds from 1 to 60.

    `ended` requests ended within `within_s` seconds. If none did, the first is assumed to take as long again.
    """
    wait_s = queued * within_s / max(1, ended)
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(wait_s)))


@dataclass(slots=True)
class CompletionRate:
    """The times at which requests ended, within the last minute of work."""

    _times: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_ENDS))
    _busy_since: float = 0.0

    def begin(self, now_s: float) -> None:
        """Start a period of work: idle time before it must not count."""
        self._times.clear()
        self._busy_since = now_s

    def add(self, now_s: float) -> None:
        """Count the end of a request."""
        self._times.append(now_s)

    def retry_after_s(self, *, queued: int, now_s: float) -> int:
        """Return the estimated time until a queue of this length is empty, in seconds."""
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
    """Tokens a second of working time, over the last minute."""

    gauges: Gauges
    _samples: deque[_ThroughputSample] = field(default_factory=deque)

    def sample(self, now_s: float) -> None:
        """Take a sample of the gauges, at most one a second."""
        if self._samples and now_s - self._samples[-1].at_s < _SAMPLE_INTERVAL_S:
            return
        gauges = self.gauges
        self._samples.append(
            _ThroughputSample(
                now_s,
                gauges.prefill_tokens,
                gauges.prefill_seconds,
                gauges.decode_tokens,
                gauges.decode_seconds,
            )
        )
        # Keep one sample from before the window, so that the difference covers all of it.
        while len(self._samples) > 1 and self._samples[1].at_s <= now_s - _WINDOW_S:
            self._samples.popleft()

    def prefill(self) -> float:
        """Return the prompt tokens computed in a second of prefill; 0 without prefill."""
        first, gauges = self._first(), self.gauges
        return _per_second(
            gauges.prefill_tokens - first.prefill_tokens,
            gauges.prefill_seconds - first.prefill_seconds,
        )

    def decode(self) -> float:
        """Return the tokens generated in a second of decoding by all sequences together; 0 without decoding."""
        first, gauges = self._first(), self.gauges
        return _per_second(
            gauges.decode_tokens - first.decode_tokens,
            gauges.decode_seconds - first.decode_seconds,
        )

    def _first(self) -> _ThroughputSample:
        return self._samples[0] if self._samples else _ThroughputSample(0, 0, 0, 0, 0)


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """Figures that other objects keep and that are read at a scrape."""

    gauges: Gauges
    speed: Throughput
    state: Callable[[], EngineState]
    in_flight: Callable[[], int]
    queued: Callable[[], int]


class TlsMetrics:
    """Metrics of TLS connections; an engine without an identity has none."""

    def __init__(self) -> None:
        self.failures = Counter(
            f"{ENGINE_PREFIX}tls_handshake_failures_total",
            "Connections that were refused, by reason: the peer's identity, its handshake, or plain HTTP.",
            ("reason",),
        )
        self.closed = Counter(
            f"{ENGINE_PREFIX}tls_connections_closed_total",
            "Connections that were closed because their peer was revoked.",
            ("reason",),
        )
        self.certificate_end_s = 0.0
        self.count_expired: Callable[[], int] = lambda: 0
        """Returns the number of connections that were accepted after the end of the peer's certificate."""

    def parts(self) -> tuple[MetricFamily, ...]:
        """Return all metric families."""
        return (
            self.failures,
            self.closed,
            _series(
                f"{ENGINE_PREFIX}tls_expired_peers_total",
                "Connections accepted after the end of the peer's certificate, because the store is away.",
                lambda: self.count_expired(),
            ),
            Gauge(
                f"{ENGINE_PREFIX}tls_certificate_end_seconds",
                "End of the certificate's validity, in seconds since 1970; 0 without TLS.",
                lambda: self.certificate_end_s,
            ),
        )


def _by_endpoint(name: str, help_: str, bounds: Sequence[float]) -> Histogram:
    return Histogram(f"{ENGINE_PREFIX}{name}", help_, ("endpoint",), bounds=bounds)


class RequestHistograms:
    """Times and lengths of requests."""

    def __init__(self) -> None:
        self.queue = _by_endpoint(
            "request_queue_time_seconds",
            "Seconds from a request's entry into the queue to its slot.",
            REQUEST_BOUNDS_S,
        )
        self.first_token = _by_endpoint(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            FIRST_TOKEN_BOUNDS_S,
        )
        self.prefill = _by_endpoint(
            "request_prefill_time_seconds",
            "Seconds from a request's slot to its first token.",
            REQUEST_BOUNDS_S,
        )
        self.decode = _by_endpoint(
            "request_decode_time_seconds",
            "Seconds from a request's first token to its last.",
            REQUEST_BOUNDS_S,
        )
        self.inference = _by_endpoint(
            "request_inference_time_seconds",
            "Seconds from a request's slot to its last token.",
            REQUEST_BOUNDS_S,
        )
        self.per_token = _by_endpoint(
            "time_per_output_token_seconds",
            "Mean seconds between the tokens of a sequence, for each request.",
            PER_TOKEN_BOUNDS_S,
        )
        self.between_tokens = Histogram(
            f"{ENGINE_PREFIX}inter_token_latency_seconds",
            "Seconds between two steps that made tokens of the same sequence.",
            (),
            bounds=PER_TOKEN_BOUNDS_S,
        )
        self.prompt_lengths = _by_endpoint(
            "request_prompt_tokens", "Prompt tokens of each request.", TOKEN_COUNT_BOUNDS
        )
        self.answer_lengths = _by_endpoint(
            "request_generation_tokens", "Generated tokens of each request.", TOKEN_COUNT_BOUNDS
        )
        self.whole = _by_endpoint(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to the last byte of a successful answer.",
            REQUEST_BOUNDS_S,
        )


class EngineMetrics:
    """All metrics of one engine."""

    def __init__(self, sources: MetricSources) -> None:
        self.sources = sources
        self.requests = Counter(
            f"{ENGINE_PREFIX}requests_total",
            "Requests by outcome.",
            ("endpoint", "outcome"),
        )
        self.finished = Counter(
            f"{ENGINE_PREFIX}requests_finished_total",
            "Requests that were admitted, by the reason of their end: stop, length, abort or error.",
            ("endpoint", "finished_reason"),
        )
        self.ignored_parameters = Counter(
            f"{ENGINE_PREFIX}ignored_parameters_total",
            "Parameters of requests that were left out, as only other servers have them, or as hints.",
            ("parameter",),
        )
        self.unenforced_calls = Counter(
            f"{ENGINE_PREFIX}unenforced_calls_total",
            "Requests with tools without a grammar of calls, because the engine knows none for the model's format.",
            ("format",),
        )
        self.prompt_tokens = Counter(
            f"{ENGINE_PREFIX}prompt_tokens_total",
            "Prompt tokens of requests that got a first token, as in usage.",
        )
        self.times = RequestHistograms()
        self.tls = TlsMetrics()
        self._parts: tuple[MetricFamily, ...] = (
            build_info("engine"),
            self.requests,
            self.finished,
            self.ignored_parameters,
            self.unenforced_calls,
            self.prompt_tokens,
            *vars(self.times).values(),
            *_derived_series(sources),
            *_worker_series(sources.gauges),
            *self.tls.parts(),
        )

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return prometheus.render(self._parts)


def _series(name: str, help_: str, read: Callable[[], float]) -> Gauge:
    """Return a metric of one number; it is a counter if its name says so."""
    return Gauge(name, help_, read, "counter" if name.endswith("_total") else "gauge")


def _worker_series(gauges: Gauges) -> Iterator[MetricFamily]:
    for exported in dataclasses.fields(gauges):
        if exported.metadata:
            read = partial(getattr, gauges, exported.name)
            yield _series(exported.metadata["name"], exported.metadata["help"], read)


def _derived_series(sources: MetricSources) -> tuple[MetricFamily, ...]:
    gauges, speed = sources.gauges, sources.speed
    return (
        Gauge(
            f"{ENGINE_PREFIX}ready",
            "Whether the model serves.",
            lambda: sources.state() is EngineState.READY,
        ),
        Gauge(wire_metrics.ENGINE_REQUESTS_WAITING, "Requests in the queue.", sources.queued),
        Gauge(
            wire_metrics.ENGINE_SEQUENCES_IN_FLIGHT,
            "Sequences that hold a slot.",
            sources.in_flight,
        ),
        Gauge(
            wire_metrics.ENGINE_PREFILL_TOKENS_PER_SECOND,
            "Prompt tokens computed in a second of prefill, over the last minute.",
            speed.prefill,
        ),
        Gauge(
            wire_metrics.ENGINE_DECODE_TOKENS_PER_SECOND,
            "Tokens generated in a second of decoding, over the last minute.",
            speed.decode,
        ),
        Gauge(
            f"{ENGINE_PREFIX}prefix_cache_blocks",
            "Blocks of cached prefixes that gateways can see.",
            lambda: len(gauges.prefix_blocks),
        ),
        Gauge(
            f"{ENGINE_PREFIX}memory_peak_bytes",
            "Peak memory of this process.",
            lambda: gauges.process_peak_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}kv_cache_usage_ratio",
            "The part of the memory for KV caches that running sequences have, reservations included, from 0 to 1.",
            lambda: gauges.kv_usage,
        ),
    )
