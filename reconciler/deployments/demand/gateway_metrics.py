"""Gateway metrics: parsed from the Prometheus text format, and added up over gateways and their restarts. Pure.

Counts are cumulative, as those of a gateway: the difference of two values is what happened in between. The text comes
from a process that may be hostile, so lines that make no sense are skipped. Names: schemas/wire/metrics.py.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite

from pydantic import ValidationError

from machinery.prometheus import parse_samples
from schemas.deployment import HubReference
from schemas.wire import metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand for a deployment, over all gateways."""

    in_flight: int = 0
    """Requests that engines work on."""
    waiting: int = 0
    """Requests that gateways hold because no replica is ready."""
    released: int = 0
    """1: a client said that it needs the model no longer; 2: an operator unloads it; 0 while requests run or wait."""
    finished: int = 0
    """Requests that ended since scraping began; only its changes are meaningful."""
    silent: tuple[str, ...] = ()
    """Addresses of gateways that did not answer the last scrape; their previous answer counts for a while."""
    is_complete: bool = False
    """True if there is a gateway, and all answered the last scrape."""

    @property
    def requests(self) -> int:
        """Return the number of requests that need a replica now."""
        return self.in_flight + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMetrics:
    """The results of the requests to one version of a deployment."""

    requests: float = 0
    """Requests that succeeded or failed; refused and abandoned ones do not count."""
    errors: float = 0
    """Requests that its engines failed, even if another engine then answered."""
    first_tokens: tuple[tuple[float, float], ...] = ()
    """Histogram of the time to the first token: (upper bound in seconds, cumulative count), the last bound infinite."""
    tokens: float = 0
    """Output tokens."""
    token_seconds: float = 0
    """Seconds that the output tokens took, over all requests."""

    def since(self, before: "VersionMetrics") -> "VersionMetrics":
        """Return the difference to an earlier value."""
        return self._combined(before, -1)

    def plus(self, more: "VersionMetrics") -> "VersionMetrics":
        """Return the sum of both."""
        return self._combined(more, 1)

    def _combined(self, other: "VersionMetrics", sign: int) -> "VersionMetrics":
        mine, others = self.first_tokens or other.first_tokens, other.first_tokens
        base = self.first_tokens or tuple((le, 0.0) for le, _ in others)
        # Histograms with other bounds, of another release, cannot be combined: they are left out.
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
        """Return whether this may follow `before`; if not, a gateway restarted its counters."""
        return (
            self.requests >= before.requests
            and self.errors >= before.errors
            and self.tokens >= before.tokens
            and self.token_seconds >= before.token_seconds
            and self.first_token_count >= before.first_token_count
        )

    @property
    def first_token_count(self) -> float:
        """Return the number of measured first tokens."""
        return self.first_tokens[-1][1] if self.first_tokens else 0

    @property
    def error_rate(self) -> float:
        """Return the share of requests that failed, 0..1."""
        return self.errors / self.requests if self.requests else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Return the average speed of one request; None without a measurement."""
        return self.tokens / self.token_seconds if self.token_seconds > 0 else None

    def first_token_quantile(self, quantile: float) -> float | None:
        """Return the quantile (0..1) of the time to the first token in seconds; None without a measurement.

        Computed as Prometheus' histogram_quantile: linear within a bucket, and the highest finite bound for
        values above it.
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


_TTFT_BUCKET = metrics.VERSION_TTFT + metrics.BUCKET_SUFFIX
_KNOWN = frozenset(
    {
        metrics.DEPLOYMENT_IN_FLIGHT,
        metrics.DEPLOYMENT_WAITING,
        metrics.DEPLOYMENT_RELEASED,
        metrics.ON_DEMAND,
        metrics.VERSION_REQUESTS,
        _TTFT_BUCKET,
        metrics.VERSION_OUTPUT_TOKENS,
        metrics.VERSION_OUTPUT_SECONDS,
    }
)

# More than any fleet needs: made-up values must not cost memory or break arithmetic.
_MOST = 1e12
_MOST_BUSY = 100_000
_VERSIONS = 50
_BUCKETS = 64
_REPOSITORIES = 64


@dataclass(slots=True)
class VersionSample:
    """The counters of one version, as one gateway exports them."""

    outcomes: dict[str, float] = field(default_factory=dict)
    buckets: dict[float, float] = field(default_factory=dict)
    tokens: float = 0
    token_seconds: float = 0

    def finished(self) -> float:
        """Return the number of requests that ended, with any outcome."""
        return sum(self.outcomes.values())

    def measured(self) -> VersionMetrics:
        """Return the counters as metrics of the version."""
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
    """The metrics that one gateway exports about the needed deployments."""

    in_flight: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    versions: dict[str, dict[str, VersionSample]] = field(default_factory=dict)
    """By deployment and template."""
    requested: set[str] = field(default_factory=set)
    """Repositories of a hub that clients ask for."""

    def finished(self, deployment: str) -> float:
        """Return the number of the deployment's requests that ended."""
        return sum(version.finished() for version in self.versions.get(deployment, {}).values())


def parse(text: str, needed: AbstractSet[str]) -> GatewaySample:
    """Parse the metrics of the needed deployments; lines that make no sense are skipped."""
    sample = GatewaySample()
    for found in parse_samples(text, _KNOWN):
        name, labels, value = found.name, found.labels, _number(found.value)
        if name == metrics.ON_DEMAND:
            repo = labels.get(metrics.REPOSITORY_LABEL, "")
            if len(sample.requested) < _REPOSITORIES and _is_repo(repo):
                sample.requested.add(repo)
            continue
        deployment = labels.get(metrics.DEPLOYMENT_LABEL, "")
        if deployment not in needed or value is None or not isfinite(value):
            continue
        gauges = {
            metrics.DEPLOYMENT_IN_FLIGHT: sample.in_flight,
            metrics.DEPLOYMENT_WAITING: sample.waiting,
            metrics.DEPLOYMENT_RELEASED: sample.released,
        }
        if name in gauges:
            gauges[name][deployment] = int(min(value, _MOST_BUSY))
            continue
        versions = sample.versions.setdefault(deployment, {})
        template = labels.get(metrics.TEMPLATE_LABEL, "")
        if template in versions or len(versions) < _VERSIONS:
            _count(versions.setdefault(template, VersionSample()), name, labels, value)
    return sample


def _is_repo(text: str) -> bool:
    try:
        HubReference(repo=text)
    except ValidationError:
        return False
    return True


def _count(version: VersionSample, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == metrics.VERSION_REQUESTS:
        outcome = labels.get(metrics.OUTCOME_LABEL, "")
        if outcome in metrics.VERSION_OUTCOMES:
            version.outcomes[outcome] = value
    elif name == _TTFT_BUCKET:
        bound = _number(labels.get(metrics.BUCKET_LABEL, ""))
        if bound is not None and (bound in version.buckets or len(version.buckets) < _BUCKETS):
            version.buckets[bound] = value
    elif name == metrics.VERSION_OUTPUT_TOKENS:
        version.tokens = value
    else:
        version.token_seconds = value


def _number(text: str) -> float | None:
    """Parse a number that is at least 0, infinity included; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST or value == inf else None


# The last answer of a silent gateway counts for this long.
_KEPT_S = 10.0


@dataclass(slots=True)
class _Gateway:
    """The last answer of one gateway."""

    url: str
    answered_s: float = float("-inf")
    is_silent: bool = True
    sample: GatewaySample = field(default_factory=GatewaySample)
    scraped: set[str] = field(default_factory=set)
    """Deployments that the answer covers: for others, the difference to the next answer is unknown."""


@dataclass(slots=True)
class _Totals:
    finished: float = 0
    versions: dict[str, VersionMetrics] = field(default_factory=dict)


class DemandTotals:
    """The sums over all gateways, for each deployment since it was first needed."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._totals: dict[str, _Totals] = {}
        self._demands: dict[str, Demand] = {}

    def record(
        self,
        samples: dict[str, GatewaySample | None],
        urls: dict[str, str],
        needed: AbstractSet[str],
        now_s: float,
    ) -> None:
        """Record one round of answers by gateway; None for a gateway that did not answer."""
        self._gateways = {
            id_: self._gateways.get(id_, _Gateway(urls[id_])) for id_ in sorted(samples)
        }
        self._totals = {name: self._totals.get(name, _Totals()) for name in needed}
        for id_, sample in samples.items():
            gateway = self._gateways[id_]
            gateway.is_silent = sample is None
            if sample is None:
                continue
            for name in needed & gateway.scraped:
                self._add(name, gateway.sample, sample)
            gateway.sample, gateway.scraped = sample, set(needed)
            gateway.answered_s = now_s
        self._demands = {name: self._demand(name, now_s) for name in needed}

    def demand(self, deployment: str) -> Demand | None:
        """Return the demand for a deployment; None if it was not needed in the last round."""
        return self._demands.get(deployment)

    @property
    def is_used(self) -> bool:
        """True once a round of answers was recorded."""
        return bool(self._gateways or self._demands)

    def requested(self) -> frozenset[str]:
        """Return the repositories of a hub that clients of any gateway ask for, by the last answers."""
        asked = (g.sample.requested for g in self._gateways.values() if not g.is_silent)
        return frozenset().union(*asked)

    def measured(self, deployment: str, template: str) -> VersionMetrics | None:
        """Return the metrics of a version since its deployment was first needed; None if it is not needed."""
        if deployment not in self._demands:
            return None
        return self._totals[deployment].versions.get(template, VersionMetrics())

    def _add(self, name: str, before: GatewaySample, now: GatewaySample) -> None:
        """Add the difference to the gateway's previous answer."""
        totals = self._totals[name]
        for template, version in now.versions.get(name, {}).items():
            last = before.versions.get(name, {}).get(template, VersionSample())
            ended, ended_before = version.finished(), last.finished()
            measured, before_that = version.measured(), last.measured()
            if ended < ended_before or not measured.is_after(before_that):
                # The gateway restarted, and its counters began at 0.
                ended_before, before_that = 0, VersionMetrics()
            totals.finished += ended - ended_before
            total = totals.versions.get(template, VersionMetrics())
            totals.versions[template] = total.plus(measured.since(before_that))

    def _demand(self, name: str, now_s: float) -> Demand:
        recent = [g for g in self._gateways.values() if now_s - g.answered_s <= _KEPT_S]
        silent = tuple(sorted(g.url for g in self._gateways.values() if g.is_silent))
        in_flight = sum(g.sample.in_flight.get(name, 0) for g in recent)
        waiting = sum(g.sample.waiting.get(name, 0) for g in recent)
        released = max((g.sample.released.get(name, 0) for g in recent), default=0)
        return Demand(
            in_flight=in_flight,
            waiting=waiting,
            released=0 if silent or in_flight or waiting else released,
            finished=int(self._totals[name].finished),
            silent=silent,
            is_complete=bool(self._gateways) and not silent,
        )
