"""What gateways measured of a deployment, as values. Pure; where they come from is `reconciler.demand.scraper`'s.

Counts are cumulative, as a gateway's own: two of them are compared to learn what happened in between.

From a gateway's metrics to what it measured. Pure; believes nothing of what it reads to be well formed.

Prometheus' text form, as far as gateways write it: gateway/versions.py and gateway/loads.py.

Adds up what gateways show, across their restarts. Pure: samples and time arrive as arguments.
"""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How busy a deployment is, over all gateways."""

    in_flight: int = 0
    """Requests at engines."""
    waiting: int = 0
    """Requests that gateways hold because nothing is ready."""
    finished: int = 0
    """Requests that ended since we began to look; only its changes mean something."""
    silent: tuple[str, ...] = ()
    """Gateways that did not answer just now, by their addresses; for those the last answer counts for a while."""
    is_complete: bool = False
    """Whether every gateway answered just now, and there is one."""

    @property
    def requests(self) -> int:
        """Return how many requests want a replica now."""
        return self.in_flight + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMetrics:
    """What became of the requests to one version of a deployment."""

    requests: float = 0
    """Requests that succeeded or failed. What clients did wrong or gave up says nothing of a version."""
    errors: float = 0
    """Those that its engines failed, also if another engine then answered."""
    first_tokens: tuple[tuple[float, float], ...] = ()
    """How many first tokens took at most so many seconds, cumulative; the last bound is infinite."""
    tokens: float = 0
    """Output tokens."""
    token_seconds: float = 0
    """How long they took, all requests together."""

    def since(self, before: "VersionMetrics") -> "VersionMetrics":
        """Return what happened between `before` and this."""
        return self._combined(before, -1)

    def plus(self, more: "VersionMetrics") -> "VersionMetrics":
        """Return both together."""
        return self._combined(more, 1)

    def _combined(self, other: "VersionMetrics", sign: int) -> "VersionMetrics":
        mine, others = self.first_tokens or other.first_tokens, other.first_tokens
        base = self.first_tokens or tuple((le, 0.0) for le, _ in others)
        # Counts by other bounds, of another release, cannot be told apart: they are left out.
        if [le for le, _ in mine] == [le for le, _ in others]:
            pairs = zip(base, others, strict=True)
            base = tuple((le, n + sign * m) for (le, n), (_, m) in pairs)
        return VersionMetrics(
            requests=self.requests + sign * other.requests,
            errors=self.errors + sign * other.errors,
            first_tokens=base,
            tokens=self.tokens + sign * other.tokens,
            token_seconds=self.token_seconds + sign * other.token_seconds,
        )

    def is_after(self, before: "VersionMetrics") -> bool:
        """Return whether `before` can have become this; if not, somebody began to count anew."""
        return (
            self.requests >= before.requests
            and self.errors >= before.errors
            and self.tokens >= before.tokens
            and self.token_seconds >= before.token_seconds
            and self.first_token_count >= before.first_token_count
        )

    @property
    def first_token_count(self) -> float:
        """Return how many first tokens were timed."""
        return self.first_tokens[-1][1] if self.first_tokens else 0

    @property
    def error_rate(self) -> float:
        """Return the part of the requests that failed, in 0..1."""
        return self.errors / self.requests if self.requests else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of one request, on average; None if nothing was measured."""
        return self.tokens / self.token_seconds if self.token_seconds > 0 else None

    def first_token_quantile(self, quantile: float) -> float | None:
        """Return the seconds within which such a part of the first tokens came; None without any.

        As Prometheus' histogram_quantile: linear within a bucket, and the highest finite bound for
        what lies above it.
        """
        total = self.first_token_count
        if total <= 0:
            return None
        rank = quantile * total
        for (low, below), (high, upto) in pairwise(((0.0, 0.0), *self.first_tokens)):
            if upto < rank or upto == below:
                continue
            if high == inf:
                return low
            return low + (high - low) * (rank - below) / (upto - below)
        return None


_IN_FLIGHT = "fleet_gateway_deployment_in_flight"
_WAITING = "fleet_gateway_deployment_waiting"
_REQUESTS = "fleet_gateway_version_requests_total"
_FIRST_TOKENS = "fleet_gateway_version_first_token_seconds_bucket"
_TOKENS = "fleet_gateway_version_output_tokens_total"
_SECONDS = "fleet_gateway_version_output_seconds_total"
_KNOWN = frozenset({_IN_FLIGHT, _WAITING, _REQUESTS, _FIRST_TOKENS, _TOKENS, _SECONDS})

_LINE = re.compile(r"(?m)^([a-z_]{1,100})\{([^\n]{1,1000})\} ([^ \n]{1,40})")
_LABEL = re.compile(r'([a-z_]{1,40})="((?:[^"\\]|\\.){0,300})",?')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE = re.compile(r"\\[\\\"n]")

# More than any fleet needs; what somebody makes up must cost neither memory nor sense.
_MOST = 1e12
_MOST_BUSY = 100_000
_VERSIONS = 50
_BUCKETS = 64


@dataclass(slots=True)
class VersionSample:
    """One version's counters, as one gateway shows them."""

    outcomes: dict[str, float] = field(default_factory=dict)
    buckets: dict[float, float] = field(default_factory=dict)
    tokens: float = 0
    token_seconds: float = 0

    def finished(self) -> float:
        """Return how many requests ended, however they did."""
        return sum(self.outcomes.values())

    def measured(self) -> VersionMetrics:
        """Return them as what a version is judged by."""
        errors = self.outcomes.get("error", 0)
        return VersionMetrics(
            requests=self.outcomes.get("ok", 0) + errors,
            errors=errors,
            first_tokens=tuple(sorted(self.buckets.items())),
            tokens=self.tokens,
            token_seconds=self.token_seconds,
        )


@dataclass(slots=True)
class GatewaySample:
    """What one gateway shows of the deployments that matter."""

    in_flight: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    versions: dict[str, dict[str, VersionSample]] = field(default_factory=dict)
    """By deployment and template."""

    def finished(self, deployment: str) -> float:
        """Return how many requests of the deployment ended."""
        return sum(version.finished() for version in self.versions.get(deployment, {}).values())


def parse(text: str, needed: AbstractSet[str]) -> GatewaySample:
    """Return what the text says of the needed deployments; whatever makes no sense is passed by."""
    sample = GatewaySample()
    for name, labels, value in _lines(text):
        deployment = labels.get("deployment", "")
        if deployment not in needed:
            continue
        if name in (_IN_FLIGHT, _WAITING):
            gauges = sample.in_flight if name == _IN_FLIGHT else sample.waiting
            gauges[deployment] = int(min(value, _MOST_BUSY))
            continue
        versions = sample.versions.setdefault(deployment, {})
        template = labels.get("template", "")
        if template in versions or len(versions) < _VERSIONS:
            _count(versions.setdefault(template, VersionSample()), name, labels, value)
    return sample


def _lines(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for found in _LINE.finditer(text):
        if found[1] not in _KNOWN:
            continue
        value = _number(found[3])
        if value is not None and isfinite(value):
            yield found[1], _labels(found[2]), value


def _labels(text: str) -> dict[str, str]:
    found, at = {}, 0
    # One after the other from the start: a search would cost a hostile text's length squared.
    while (label := _LABEL.match(text, at)) is not None:
        found[label[1]] = _unescaped(label[2])
        at = label.end()
    return found


def _count(version: VersionSample, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == _REQUESTS:
        outcome = labels.get("outcome", "")
        if outcome in ("ok", "error", "refused", "client_gone"):
            version.outcomes[outcome] = value
    elif name == _FIRST_TOKENS:
        bound = _number(labels.get("le", ""))
        if bound is not None and (bound in version.buckets or len(version.buckets) < _BUCKETS):
            version.buckets[bound] = value
    elif name == _TOKENS:
        version.tokens = value
    else:
        version.token_seconds = value


def _number(text: str) -> float | None:
    """Return a number from 0 up, infinity included; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST or value == inf else None


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES[found[0]], text) if "\\" in text else text


# For so long the last word of a gateway that does not answer counts.
_KEPT_S = 10.0


@dataclass(slots=True)
class _Gateway:
    """What one gateway said last."""

    url: str
    answered_s: float = float("-inf")
    is_silent: bool = True
    sample: GatewaySample = field(default_factory=GatewaySample)
    known: set[str] = field(default_factory=set)
    """Deployments that it was asked about: of the others nobody knows what is new."""


@dataclass(slots=True)
class _Totals:
    finished: float = 0
    versions: dict[str, VersionMetrics] = field(default_factory=dict)


class DemandTotals:
    """What all gateways together said of each deployment, since it is needed."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._totals: dict[str, _Totals] = {}
        self._demands: dict[str, Demand] = {}

    def note(
        self,
        samples: dict[str, GatewaySample | None],
        urls: dict[str, str],
        needed: AbstractSet[str],
        now_s: float,
    ) -> None:
        """Take a round of answers, by gateway; None where one did not answer."""
        self._gateways = {
            id_: self._gateways.get(id_, _Gateway(urls[id_])) for id_ in sorted(samples)
        }
        self._totals = {name: self._totals.get(name, _Totals()) for name in needed}
        for id_, sample in samples.items():
            gateway = self._gateways[id_]
            gateway.is_silent = sample is None
            if sample is None:
                continue
            for name in needed & gateway.known:
                self._add(name, gateway.sample, sample)
            gateway.sample, gateway.known = sample, set(needed)
            gateway.answered_s = now_s
        self._demands = {name: self._demand(name, now_s) for name in needed}

    def demand(self, deployment: str) -> Demand | None:
        """Return how busy it is; None if it was not needed in the last round."""
        return self._demands.get(deployment)

    def measured(self, deployment: str, template: str) -> VersionMetrics | None:
        """Return what became of its requests since it is needed."""
        if deployment not in self._demands:
            return None
        return self._totals[deployment].versions.get(template, VersionMetrics())

    def _add(self, name: str, before: GatewaySample, now: GatewaySample) -> None:
        """Count what is new since the gateway's last answer."""
        totals = self._totals[name]
        for template, version in now.versions.get(name, {}).items():
            last = before.versions.get(name, {}).get(template, VersionSample())
            ended, had = version.finished(), last.finished()
            measured, was = version.measured(), last.measured()
            if ended < had or not measured.is_after(was):
                had, was = 0, VersionMetrics()  # It was restarted, and began to count anew.
            totals.finished += ended - had
            sum_ = totals.versions.get(template, VersionMetrics())
            totals.versions[template] = sum_.plus(measured.since(was))

    def _demand(self, name: str, now_s: float) -> Demand:
        heard = [g for g in self._gateways.values() if now_s - g.answered_s <= _KEPT_S]
        silent = tuple(sorted(g.url for g in self._gateways.values() if g.is_silent))
        return Demand(
            in_flight=sum(g.sample.in_flight.get(name, 0) for g in heard),
            waiting=sum(g.sample.waiting.get(name, 0) for g in heard),
            finished=int(self._totals[name].finished),
            silent=silent,
            is_complete=bool(self._gateways) and not silent,
        )
