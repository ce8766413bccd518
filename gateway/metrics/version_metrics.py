"""Metrics by version of a deployment, from which the reconciler judges a canary.

Every attempt counts for the version of its engine, even if another engine then answers: a bad
version must not hide behind a good one. Only streams have a time to first token.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from gateway.metrics.response_summary import VersionCounts
from gateway.routing.table import EngineEndpoint
from machinery.prometheus import family_header, format_labels, histogram_lines
from schemas.wire import metrics as wire_metrics
from schemas.wire.metrics import FIRST_TOKEN_BOUNDS_S, VERSION_OUTCOMES

# Versions come and go for months. The oldest is dropped and starts anew if it returns.
_LIMIT = 1000

AttemptOutcome: TypeAlias = Literal["ok", "error", "refused", "client_gone"]
_NAMES = ("deployment", "template")
_FAMILIES = (
    (wire_metrics.VERSION_REQUESTS, "Attempts at engines by outcome.", "counter"),
    (
        wire_metrics.VERSION_TTFT,
        "From the start of an attempt to the first event of a stream.",
        "histogram",
    ),
    (
        wire_metrics.VERSION_OUTPUT_TOKENS,
        "Output tokens, of streams those after the first.",
        "counter",
    ),
    (
        wire_metrics.VERSION_OUTPUT_SECONDS,
        "Time that the output tokens took.",
        "counter",
    ),
)
Texts: TypeAlias = tuple[str, str, str, str]
"""The lines of one version in each metric family."""


class VersionMetrics:
    """Counts of all versions."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], VersionCounts] = {}
        """By deployment and template."""
        self._texts: dict[tuple[str, str], tuple[object, Texts]] = {}

    def of(self, endpoint: EngineEndpoint) -> VersionCounts:
        """Return the counts of the endpoint's version."""
        key = (endpoint.deployment, endpoint.template)
        version_counts = self.found.get(key)
        if version_counts is None:
            if len(self.found) >= _LIMIT:
                oldest = next(iter(self.found))
                del self.found[oldest]
                self._texts.pop(oldest, None)
            version_counts = self.found[key] = VersionCounts()
        return version_counts

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format, several lines at once.

        The reconciler reads every second, and most versions had no request since: their text is
        cached.
        """
        texts = [self._text(key) for key in sorted(self.found)]
        for place, (name, help_, type_) in enumerate(_FAMILIES):
            yield from family_header(name, help_, type_)
            for text in texts:
                yield text[place]

    def _text(self, key: tuple[str, str]) -> Texts:
        version = self.found[key]
        state = (*version.outcomes(), version.first_token_s, version.tokens)
        before, text = self._texts.get(key, (None, None))
        if text is None or before != state:
            (requests, *_), (first_tokens, *_), (tokens, *_), (seconds, *_) = _FAMILIES
            labels = format_labels(_NAMES, key)
            ends = zip(VERSION_OUTCOMES, version.outcomes(), strict=True)
            counts = (
                f"{requests}{format_labels((*_NAMES, 'outcome'), (*key, outcome))} {n}"
                for outcome, n in ends
            )
            buckets = histogram_lines(
                first_tokens,
                _NAMES,
                key,
                bounds=FIRST_TOKEN_BOUNDS_S,
                counts=version.first_tokens,
                total_s=version.first_token_s,
            )
            text = (
                "\n".join(counts),
                "\n".join(buckets),
                f"{tokens}{labels} {version.tokens}",
                f"{seconds}{labels} {version.token_s:.6f}",
            )
            self._texts[key] = (state, text)
        return text
