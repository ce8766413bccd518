"""Metrics by version of a deployment, from which the reconciler judges a canary.

Every attempt counts for the version of its engine, even if another engine then answers: a bad
version must not hide behind a good one. Only streams have a time to first token.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gateway.metrics.response_summary import TokenCounts, parse_usage
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


@dataclass(slots=True)
class VersionCounts:
    """Counts of one version since the gateway started."""

    ok: int = 0
    error: int = 0
    """A 5xx response, no connection, or an incomplete response."""
    refused: int = 0
    """4xx: the request was invalid, or there was no room."""
    client_gone: int = 0
    """The client left, or its own timeout (x-request-timeout) passed."""
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BOUNDS_S) + 1))
    first_token_s: float = 0.0
    tokens: int = 0
    token_s: float = 0.0

    def outcomes(self) -> tuple[int, int, int, int]:
        """Return the counts in the order of `VERSION_OUTCOMES`."""
        return self.ok, self.error, self.refused, self.client_gone

    def record_response(self, status: int, body: bytes, seconds: float) -> TokenCounts:
        """Count a response that was not streamed; return its token counts."""
        if status >= 400:
            if status >= 500:
                self.error += 1
            else:
                self.refused += 1
            return 0, 0, 0
        self.ok += 1
        found = parse_usage(body)
        if found is None:
            return 0, 0, 0
        if found[2] and seconds > 0:
            self.tokens += found[2]
            self.token_s += seconds
        return found

    def record_first_token(self, seconds: float) -> None:
        """Count the first event of a stream."""
        self.first_tokens[bisect_left(FIRST_TOKEN_BOUNDS_S, seconds)] += 1
        self.first_token_s += seconds

    def record_stream(self, lines: int, last: bytes, seconds: float) -> None:
        """Count a complete stream.

        `lines` lines, two for each event, followed the first event within `seconds`; `last` is the
        last piece. The tokens are those of `usage` if the client asked for it. Else they are the
        events, without the finish reason and [DONE].
        """
        self.ok += 1
        events = lines // 2
        if events:
            found = parse_usage(last)
            self._generated(events - 2 if found is None else found[2] - 1, seconds)

    def _generated(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self.tokens += tokens
            self.token_s += seconds


class VersionMetrics:
    """Counts of all versions."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], VersionCounts] = {}
        self._texts: dict[tuple[str, str], tuple[object, Texts]] = {}

    def of(self, endpoint: EngineEndpoint) -> VersionCounts:
        """Return the counts of the endpoint's version."""
        key = (endpoint.deployment, endpoint.template)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _LIMIT:
                oldest = next(iter(self._found))
                del self._found[oldest]
                self._texts.pop(oldest, None)
            found = self._found[key] = VersionCounts()
        return found

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format, several lines at once.

        The reconciler reads every second, and most versions had no request since: their text is
        cached.
        """
        texts = [self._text(key) for key in sorted(self._found)]
        for place, (name, help_, type_) in enumerate(_FAMILIES):
            yield from family_header(name, help_, type_)
            for text in texts:
                yield text[place]

    def _text(self, key: tuple[str, str]) -> Texts:
        version = self._found[key]
        state = (*version.outcomes(), version.first_token_s, version.tokens)
        before, text = self._texts.get(key, (None, None))
        if text is None or before != state:
            text = _written(key, version)
            self._texts[key] = (state, text)
        return text


def _written(key: tuple[str, str], version: VersionCounts) -> Texts:
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
    return (
        "\n".join(counts),
        "\n".join(buckets),
        f"{tokens}{labels} {version.tokens}",
        f"{seconds}{labels} {version.token_s:.6f}",
    )
