"""Metrics of the engine: counters of requests, and the throughput of the last minute.

Counters are updated on the event loop only; figures of the worker are read from its gauges. Names follow vLLM,
buckets are those of `schemas/wire/metrics.py`. Times are in seconds of `Clock.monotonic`.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
            _counter(
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

    def parts(self) -> tuple[MetricFamily, ...]:
        """Return all metric families."""
        return (
            self.queue,
            self.first_token,
            self.prefill,
            self.decode,
            self.inference,
            self.per_token,
            self.between_tokens,
            self.prompt_lengths,
            self.answer_lengths,
            self.whole,
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
            *self.times.parts(),
            *_load_series(sources),
            *_token_series(sources.gauges, sources.speed),
            *_prefix_cache_series(sources.gauges),
            *_memory_series(sources.gauges),
            *self.tls.parts(),
        )

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return prometheus.render(self._parts)


def _counter(name: str, help_: str, read: Callable[[], float]) -> Gauge:
    return Gauge(name, help_, read, "counter")


def _load_series(sources: MetricSources) -> tuple[MetricFamily, ...]:
    gauges = sources.gauges
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
            f"{ENGINE_PREFIX}num_sequences_running",
            "Sequences that decode.",
            lambda: gauges.running,
        ),
        Gauge(
            f"{ENGINE_PREFIX}num_sequences_prefilling",
            "Sequences whose prompt is not computed yet.",
            lambda: gauges.prefilling,
        ),
        Gauge(
            f"{ENGINE_PREFIX}prefill_chunk_tokens",
            "Prompt tokens computed in one chunk.",
            lambda: gauges.chunk_tokens,
        ),
        _counter(
            f"{ENGINE_PREFIX}preemptions_total",
            "Sequences that gave up their memory to others, and continued later.",
            lambda: gauges.preemptions,
        ),
        _counter(f"{ENGINE_PREFIX}steps_total", "Steps of the batch.", lambda: gauges.steps),
        _counter(
            f"{ENGINE_PREFIX}faults_total",
            "Steps whose error cost sequences.",
            lambda: gauges.faults,
        ),
    )


def _token_series(gauges: Gauges, speed: Throughput) -> tuple[MetricFamily, ...]:
    return (
        _counter(
            wire_metrics.ENGINE_GENERATION_TOKENS, "Tokens generated.", lambda: gauges.decode_tokens
        ),
        _counter(
            wire_metrics.ENGINE_PREFILL_TOKENS,
            "Prompt tokens computed; the last of each prompt counts as decoding.",
            lambda: gauges.prefill_tokens,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefill_seconds_total",
            "Seconds of prefill.",
            lambda: gauges.prefill_seconds,
        ),
        _counter(
            f"{ENGINE_PREFIX}decode_seconds_total",
            "Seconds of decoding.",
            lambda: gauges.decode_seconds,
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
        _counter(
            f"{ENGINE_PREFIX}draft_tokens_total",
            "Tokens that a draft model or n-grams proposed.",
            lambda: gauges.draft_tokens,
        ),
        _counter(
            f"{ENGINE_PREFIX}draft_accepted_tokens_total",
            "Proposed tokens that the model accepted.",
            lambda: gauges.draft_accepted_tokens,
        ),
    )


def _prefix_cache_series(gauges: Gauges) -> tuple[MetricFamily, ...]:
    return (
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_lookups_total",
            "Prompts looked up.",
            lambda: gauges.prefix_lookups,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_queries_total",
            "Prompt tokens looked up.",
            lambda: gauges.prefix_query_tokens,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_hits_total",
            "Prompt tokens found.",
            lambda: gauges.prefix_hit_tokens,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_evictions_total",
            "Blocks evicted to free memory.",
            lambda: gauges.prefix_evictions,
        ),
        Gauge(
            wire_metrics.ENGINE_PREFIX_CACHE_BYTES,
            "Memory of cached prefixes.",
            lambda: gauges.prefix_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}prefix_cache_blocks",
            "Blocks of cached prefixes that gateways can see.",
            lambda: len(gauges.prefix_blocks),
        ),
        *_prefix_disk_series(gauges),
    )


def _prefix_disk_series(gauges: Gauges) -> tuple[MetricFamily, ...]:
    return (
        Gauge(
            f"{ENGINE_PREFIX}prefix_cache_disk_bytes",
            "Size of the folder of cached prefixes, as last counted.",
            lambda: gauges.prefix_disk_bytes,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_disk_written_blocks_total",
            "Blocks of cached prefixes written to disk.",
            lambda: gauges.prefix_disk_written,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_disk_read_blocks_total",
            "Blocks of cached prefixes read from disk and used.",
            lambda: gauges.prefix_disk_read,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_disk_dropped_blocks_total",
            "Blocks not written, because the disk was too slow or full.",
            lambda: gauges.prefix_disk_dropped,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_disk_damaged_blocks_total",
            "Files deleted because their content was wrong.",
            lambda: gauges.prefix_disk_damaged,
        ),
        _counter(
            f"{ENGINE_PREFIX}prefix_cache_disk_evictions_total",
            "Files deleted for lack of room.",
            lambda: gauges.prefix_disk_evicted,
        ),
    )


def _memory_series(gauges: Gauges) -> tuple[MetricFamily, ...]:
    return (
        Gauge(
            wire_metrics.ENGINE_MEMORY_ACTIVE_BYTES,
            "Memory of MLX's arrays.",
            lambda: gauges.active_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}memory_buffer_cache_bytes",
            "Freed memory that MLX keeps for reuse.",
            lambda: gauges.buffer_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}memory_peak_bytes",
            "Peak memory of this process.",
            lambda: gauges.process_peak_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}memory_kv_bytes",
            "Memory of the KV caches of running sequences, reservations included.",
            lambda: gauges.kv_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}memory_kv_limit_bytes",
            "Memory that these caches may have together.",
            lambda: gauges.kv_limit_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}kv_cache_usage_ratio",
            "The part of that memory which running sequences have, reservations included, from 0 to 1.",
            lambda: gauges.kv_usage,
        ),
        Gauge(
            wire_metrics.ENGINE_MEMORY_LIMIT_BYTES,
            "Memory that MLX may use.",
            lambda: gauges.limit_bytes,
        ),
        Gauge(
            f"{ENGINE_PREFIX}model_loaded_bytes",
            "Memory of the loaded weights.",
            lambda: gauges.loaded_bytes,
        ),
    )
