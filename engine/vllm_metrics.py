"""The engine's metrics under the names of vLLM: the same numbers, with the labels `model_name` and `engine`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.cache.interface import BLOCK_TOKENS
from engine.metrics import EngineMetrics
from engine.request_log import RequestRecord
from machinery.prometheus import Gauge, Histogram, MetricFamily, render
from schemas.wire import vllm_metrics as vllm

_LABELS = (vllm.MODEL_LABEL, vllm.ENGINE_LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """The metrics of one engine as vLLM names them."""

    metrics: EngineMetrics
    model: str
    """The first served name."""
    adapters: Sequence[str]
    """The served names of LoRA adapters."""
    under_way: Callable[[], Sequence[RequestRecord]]
    """Returns the records of the requests in flight."""
    now: Callable[[], float]
    """Returns the seconds since 1970."""

    def text(self) -> str:
        """Return all of them in the Prometheus text format."""
        return render(self._families())

    def _families(self) -> Iterator[MetricFamily]:
        sources = self.metrics.sources
        gauges = sources.gauges
        yield from self._gauges(vllm.RUNNING, "Sequences that hold a slot.", sources.in_flight)
        yield from self._gauges(vllm.WAITING, "Requests in the queue.", sources.queued)
        help_ = "The part of the KV caches' memory that running sequences have, from 0 to 1."
        yield from self._gauges(vllm.KV_USAGE, help_, lambda: gauges.kv_usage)
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_config()
        if self.adapters:
            yield self._lora()

    def _gauges(
        self,
        names: Sequence[str],
        help_: str,
        read: Callable[[], float],
        type_: Literal["gauge", "counter"] = "gauge",
    ) -> Iterator[Gauge]:
        for name in names:
            yield Gauge(name, help_, lambda: {self._values: read()}, type_, labels=_LABELS)

    def _counters(self) -> Iterator[MetricFamily]:
        gauges = self.metrics.sources.gauges
        for names, help_, read in (
            (vllm.GENERATION_TOKENS, "Tokens generated.", lambda: gauges.decode_tokens),
            (vllm.PREFIX_QUERIES, "Prompt tokens looked up.", lambda: gauges.prefix_query_tokens),
            (vllm.PREFIX_HITS, "Prompt tokens found.", lambda: gauges.prefix_hit_tokens),
            (vllm.PREEMPTIONS, "Sequences that were stopped.", lambda: gauges.preemptions),
        ):
            yield from self._gauges(names, help_, read, "counter")
        for name in vllm.PROMPT_TOKENS:
            yield self.metrics.prompt_tokens.summed(name, _LABELS, lambda _: self._values)
        labels = (*_LABELS, vllm.REASON_LABEL)
        for name in vllm.FINISHED:
            yield self.metrics.finished.summed(name, labels, lambda of: (*self._values, of[1]))

    def _histograms(self) -> Iterator[MetricFamily]:
        times = self.metrics.times
        sources: tuple[tuple[Sequence[str], Histogram], ...] = (
            (vllm.FIRST_TOKEN, times.first_token),
            (vllm.BETWEEN_TOKENS, times.between_tokens),
            (vllm.PER_TOKEN, times.per_token),
            (vllm.WHOLE, times.whole),
            (vllm.QUEUE, times.queue),
            (vllm.INFERENCE, times.inference),
            (vllm.PREFILL, times.prefill),
            (vllm.DECODE, times.decode),
            (vllm.PROMPT_LENGTHS, times.prompt_lengths),
            (vllm.GENERATION_LENGTHS, times.answer_lengths),
        )
        for names, histogram in sources:
            for name in names:
                yield histogram.summed(name, _LABELS, lambda _: self._values)

    def _cache_config(self) -> Gauge:
        blocks = self.metrics.sources.gauges.kv_limit_tokens // BLOCK_TOKENS
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        values = (*self._values, str(BLOCK_TOKENS), str(blocks))
        help_ = "1, with the room for KV caches in blocks of so many tokens."
        return Gauge(vllm.CACHE_CONFIG, help_, lambda: {values: 1}, labels=labels)

    def _lora(self) -> Gauge:
        running: set[str] = set()
        waiting: set[str] = set()
        for record in self.under_way():
            if record.model in self.adapters and record.ticket is not None:
                (waiting if record.ticket.started_s is None else running).add(record.model)
        labels = (*_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        found = (",".join(sorted(running)), ",".join(sorted(waiting)))
        values = (*self._values, str(len(self.adapters)), *found)
        help_ = "Seconds since 1970, with the adapters that run and wait."
        return Gauge(vllm.LORA, help_, lambda: {values: self.now()}, labels=labels)

    @property
    def _values(self) -> tuple[str, ...]:
        return (self.model, vllm.ENGINE_INDEX)
