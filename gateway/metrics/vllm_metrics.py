"""The gateway's metrics under the names of vLLM, summed by model; what only engines know is at theirs."""

from collections import Counter as CountOf
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from gateway.metrics.gateway_metrics import GatewayMetrics
from machinery.prometheus import Counter, Gauge, Histogram, MetricFamily
from schemas.wire import vllm_metrics as vllm

_LABELS = (vllm.MODEL_LABEL, vllm.ENGINE_LABEL)
# A gateway does not read answers: an answer that was cut off counts as complete.
_REASONS: Mapping[str, str] = MappingProxyType(
    {"ok": "stop", "client_gone": "abort", "cancelled": "abort"}
)


def vllm_families(
    metrics: GatewayMetrics,
    running: Iterable[str],
    waiting: Iterable[str],
    models: Mapping[str, float | None],
) -> Iterator[MetricFamily]:
    """Yield the metrics.

    `running` and `waiting` have the model of each request in flight; `models` are all that are served, with the use of
    their engines' KV caches.
    """
    none = dict.fromkeys(models, 0)
    yield from _gauges(vllm.RUNNING, "Requests at engines.", {**none, **CountOf(running)})
    yield from _gauges(vllm.WAITING, "Requests that wait for a slot.", {**none, **CountOf(waiting)})
    used = {model: part for model, part in models.items() if part is not None}
    yield from _gauges(vllm.KV_USAGE, "Use of KV caches, 0..1, mean of the engines.", used)
    served = metrics.served
    counters: tuple[tuple[Sequence[str], Counter], ...] = (
        (vllm.PROMPT_TOKENS, served.prompt),
        (vllm.GENERATION_TOKENS, served.output),
        (vllm.PREFIX_QUERIES, served.prompt),
        (vllm.PREFIX_HITS, served.cached),
    )
    for names, counter in counters:
        for name in names:
            yield counter.summed(name, _LABELS, _by_model)
    for name in vllm.FINISHED:
        yield served.requests.summed(name, (*_LABELS, vllm.REASON_LABEL), _by_reason)
    histograms: tuple[tuple[Sequence[str], Histogram], ...] = (
        (vllm.FIRST_TOKEN, served.first_token),
        (vllm.PER_TOKEN, served.per_token),
        (vllm.BETWEEN_TOKENS, served.between_tokens),
        (vllm.WHOLE, served.whole),
        (vllm.QUEUE, served.queue),
    )
    for names, histogram in histograms:
        for name in names:
            yield histogram.summed(name, _LABELS, _by_model)


def _gauges(names: Sequence[str], help_: str, numbers: Mapping[str, float]) -> Iterator[Gauge]:
    values: dict[tuple[str, ...], float] = {
        (model, vllm.ENGINE_INDEX): number for model, number in numbers.items()
    }
    for name in names:
        yield Gauge(name, help_, lambda: values, labels=_LABELS)


def _by_model(labels: tuple[str, ...]) -> tuple[str, ...]:
    return (labels[0], vllm.ENGINE_INDEX)


def _by_reason(labels: tuple[str, ...]) -> tuple[str, ...]:
    return (labels[0], vllm.ENGINE_INDEX, _REASONS.get(labels[1], "error"))
