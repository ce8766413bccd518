"""The metrics of an engine that /v1/vitals of its node includes, and their names there. Pure."""

from collections.abc import Mapping
from typing import Final

from machinery.prometheus import parse_samples
from schemas.wire import metrics

FORWARDED: Final[Mapping[str, str]] = {
    metrics.ENGINE_SEQUENCES_IN_FLIGHT: "inFlight",
    metrics.ENGINE_REQUESTS_WAITING: "waiting",
    metrics.ENGINE_DECODE_TOKENS_PER_SECOND: "tokensPerSecond",
    metrics.ENGINE_PREFILL_TOKENS_PER_SECOND: "promptTokensPerSecond",
    metrics.ENGINE_GENERATION_TOKENS: "tokens",
    metrics.ENGINE_PREFILL_TOKENS: "promptTokens",
    metrics.ENGINE_MEMORY_ACTIVE_BYTES: "activeBytes",
    metrics.ENGINE_MEMORY_LIMIT_BYTES: "limitBytes",
    metrics.ENGINE_PREFIX_CACHE_BYTES: "prefixCacheBytes",
}
"""The names in /v1/vitals of an engine's Prometheus metrics."""


def parse_engine_metrics(text: str) -> dict[str, float]:
    """Return the forwarded metrics in an engine's Prometheus text, by their names in /v1/vitals.

    Raises:
        ValueError: a value is not a number.

    """
    engine_metrics = {}
    for sample in parse_samples(text, FORWARDED):
        number = float(sample.value)
        engine_metrics[FORWARDED[sample.name]] = int(number) if number.is_integer() else number
    return engine_metrics
