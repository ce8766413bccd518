"""What became of the requests to each version of a deployment: what a canary is judged by. No I/O.

Every attempt at an engine counts for the engine's version, also if another engine then answered: a bad
version must not hide behind the good one. Only streams tell when the first token came.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gateway.metrics.gateway_metrics import SECONDS
from gateway.metrics.response_summary import TokenCounts, parse_usage
from gateway.routing.table import EngineEndpoint
from machinery.prometheus import family_header, format_labels, histogram_lines

# Versions come and go for months: the oldest is forgotten, and begins anew if it comes back.
_LIMIT = 1000

AttemptOutcome: TypeAlias = Literal["ok", "error", "refused", "client_gone"]
ATTEMPT_OUTCOMES: tuple[AttemptOutcome, ...] = ("ok", "error", "refused", "client_gone")


@dataclass(slots=True)
class VersionCounts:
    """One version's counts since the gateway started."""

    ok: int = 0
    error: int = 0
    """An answer of 5xx, no connection, or one that broke."""
    refused: int = 0
    """4xx: what the client asked for was wrong, or there was no room."""
    client_gone: int = 0
    """The client left, or the time was up that it gave itself (x-request-timeout)."""
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    first_token_s: float = 0.0
    tokens: int = 0
    token_s: float = 0.0

    def outcomes(self) -> tuple[int, int, int, int]:
        """Return how requests ended, in the order of `OUTCOMES`."""
        return self.ok, self.error, self.refused, self.client_gone

    def answered(self, status: int, body: bytes, seconds: float) -> TokenCounts:
        """Count an answer that was not streamed; return its tokens, which took as long as the answer."""
        if status >= 400:
            if status >= 500:
                self.error += 1
            else:
                self.refused += 1
            return 0, 0, 0
        self.ok += 1
        found = parse_usage(body) or (0, 0, 0)
        self._generated(found[2], seconds)
        return found

    def first_token(self, seconds: float) -> None:
        """Count a stream's first event."""
        self.first_tokens[bisect_left(SECONDS, seconds)] += 1
        self.first_token_s += seconds

    def streamed(self, lines: int, last: bytes, seconds: float) -> None:
        """Count a stream that is whole.

        `lines` came after the first event, two for each, within `seconds`; `last` is its last piece. The tokens
        are those of `usage` where the client asked for it, and else the events: engines send one for
        each token, one that says why it ended, and [DONE].
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


_NAMES = ("deployment", "template")
_FAMILIES = (
    ("fleet_gateway_version_requests_total", "Attempts at engines, by how they ended.", "counter"),
    (
        "fleet_gateway_version_first_token_seconds",
        "From asking an engine to a stream's first event.",
        "histogram",
    ),
    (
        "fleet_gateway_version_output_tokens_total",
        "Output tokens; of streams those after the first.",
        "counter",
    ),
    (
        "fleet_gateway_version_output_seconds_total",
        "How long the output tokens took, by request.",
        "counter",
    ),
)
Texts: TypeAlias = tuple[str, str, str, str]
"""A version's lines in each of the families."""


class VersionMetrics:
    """All versions' counts."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], VersionCounts] = {}
        self._texts: dict[tuple[str, str], tuple[object, Texts]] = {}

    def of(self, target: EngineEndpoint) -> VersionCounts:
        """Return the counts of the target's version."""
        key = (target.deployment, target.template)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _LIMIT:
                oldest = next(iter(self._found))
                del self._found[oldest]
                self._texts.pop(oldest, None)
            found = self._found[key] = VersionCounts()
        return found

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text, several lines at once.

        The reconciler asks every second, and most versions have had no request since: theirs is kept.
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
    ends = zip(ATTEMPT_OUTCOMES, version.outcomes(), strict=True)
    counts = (
        f"{requests}{format_labels((*_NAMES, 'outcome'), (*key, outcome))} {n}"
        for outcome, n in ends
    )
    buckets = histogram_lines(
        first_tokens,
        _NAMES,
        key,
        bounds=SECONDS,
        counts=version.first_tokens,
        total_s=version.first_token_s,
    )
    return (
        "\n".join(counts),
        "\n".join(buckets),
        f"{tokens}{labels} {version.tokens}",
        f"{seconds}{labels} {version.token_s:.6f}",
    )
