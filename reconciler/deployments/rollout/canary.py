"""Canary analysis: moves a new version through its steps, or fails it. Pure, except for `CanaryBaselines`.

A step waits until its replicas are ready, with the weight of the step before. Then it runs: its weight counts, and
`since` is set.
"""

from dataclasses import dataclass
from datetime import datetime

from reconciler.deployments.demand.gateway_metrics import VersionMetrics
from schemas import duration, quantity
from schemas.deployment import CanaryStatus
from schemas.rollout import Canary, CanaryAnalysis, CanaryDecision

# With fewer requests nothing is concluded, even with a lower minRequests: one failure of one request is 100 %.
_FEWEST = 5
_P95 = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryProgress:
    """The state of a canary analysis."""

    status: CanaryStatus | None = None
    requeue_after_s: float | None = None
    """Seconds until it may change; None if only changes matter."""
    count: str = ""
    """Number of requests that the running step has had, in words; empty while no step runs."""


def advance(
    canary: Canary,
    status: CanaryStatus | None,
    template: str,
    *,
    is_new_ready: bool,
    measured: VersionMetrics | None,
    now: datetime,
) -> tuple[CanaryStatus, float | None]:
    """Return the state of the analysis of `template`, and the seconds until it may change.

    `is_new_ready`: as many replicas of the new version are ready as `next_weight` needs.
    `measured`: the result of `CanaryBaselines.since_step`; None until it is known.
    """
    if status is None or status.template != template:
        status = CanaryStatus(template=template, since=now, message=_prepares(canary, 0))
    if status.outcome != "Running":
        return status, None
    if status.step >= len(canary.steps):
        return _moved(
            status, now, outcome="Passed", message="the remaining steps were removed"
        ), None
    rules, step = canary.analysis, canary.steps[status.step]
    is_prepared = status.weight == step.weight
    left_s = duration.parse(step.pause) - (now - status.since).total_seconds()
    is_over = is_prepared and is_new_ready and left_s <= 0 and _says_enough(rules, measured)
    if status.weight and measured is not None:
        # Describe the metrics that are worse than allowed; empty while there are too few requests.
        few = rules.min_requests or _FEWEST
        # At the end of a step, a few streams are enough.
        few_streamed = min(few, _FEWEST) if is_over else few
        bad = []
        if measured.requests >= few and measured.error_rate > quantity.percent_fraction(
            rules.max_error_rate
        ):
            rate = f"{measured.error_rate:.1%}"
            bad.append(f"{rate} of the requests failed, {rules.max_error_rate} is allowed")
        ttft_s, most = measured.first_token_quantile(_P95), rules.max_ttft_p95
        if measured.first_token_count < few_streamed:
            ttft_s = None
        if ttft_s is not None and most is not None and ttft_s > duration.parse(most):
            bad.append(f"the first token took {ttft_s:.2f} s (p95), {most} is allowed")
        speed, least = measured.tokens_per_second, rules.min_tokens_per_second
        if measured.requests >= few and speed is not None and speed < least:
            bad.append(f"a request got {speed:.1f} tokens/s, {least} is required")
        if bad:
            message = f"{_step(canary, status.step)}: {'; '.join(bad)} ({_figures(measured)})"
            return _moved(status, now, weight=0, outcome="Failed", message=message), None
    if is_over and measured is not None:
        return _next(canary, status, measured, now)
    if not is_prepared and is_new_ready:
        message = _watches(canary, status.step)
        began = _moved(status, now, weight=step.weight, message=message)
        return began, duration.parse(step.pause)
    return status, left_s if is_prepared and left_s > 0 else None


def conclude(
    canary: Canary,
    status: CanaryStatus | None,
    template: str,
    decision: CanaryDecision,
    now: datetime,
) -> CanaryStatus:
    """Return the state of the analysis of `template` after a person's decision; a finished one stays as it is."""
    if status is None or status.template != template:
        status = CanaryStatus(template=template, since=now)
    if status.outcome != "Running":
        return status
    step = _step(canary, min(status.step, len(canary.steps) - 1))
    if decision == "abort":
        message = f"{step}: aborted by `fleetctl rollout abort`"
        return _moved(status, now, weight=0, outcome="Failed", message=message)
    message = f"{step}: promoted by `fleetctl rollout promote`"
    return _moved(
        status, now, step=len(canary.steps), weight=100, outcome="Passed", message=message
    )


def next_weight(canary: Canary, status: CanaryStatus | None, template: str) -> int:
    """Return the weight of the step that waits or runs, which replicas must be ready for."""
    if status is None or status.template != template:
        return canary.steps[0].weight
    return canary.steps[min(status.step, len(canary.steps) - 1)].weight


def count_text(canary: Canary, status: CanaryStatus | None, measured: VersionMetrics | None) -> str:
    """Return how many requests a running step has had; empty while no step runs.

    It is no part of the status of the analysis, which changes only with its steps.
    """
    is_running = status is not None and status.outcome == "Running"
    if status is None or not is_running or status.step >= len(canary.steps):
        return ""
    if status.weight != canary.steps[status.step].weight:
        return ""
    least = canary.analysis.min_requests
    if measured is None:
        return "the gateways' figures are not known yet"
    count = f"{measured.requests:.0f}" + (f" of {least}" if least else "")
    return f"{count} requests so far, {measured.errors:.0f} failed"


def canary_replicas(desired: int, weight: int) -> int:
    """Return how many of the desired replicas run the new version: at least one, if any is desired."""
    return min(desired, max(1, -(-desired * weight // 100)))


@dataclass(frozen=True, slots=True)
class _Baseline:
    status: CanaryStatus
    total: VersionMetrics


class CanaryBaselines:
    """The metrics at the start of the current step, by deployment.

    A new leader starts empty, so it counts the requests of a step again.
    """

    def __init__(self) -> None:
        self._baselines: dict[str, _Baseline] = {}

    def since_step(
        self, name: str, status: CanaryStatus | None, total: VersionMetrics | None
    ) -> VersionMetrics | None:
        """Return the metrics since the step began; `total` is the result of `DemandScraper.measured`."""
        if status is None or total is None:
            return None
        known = self._baselines.get(name)
        # A smaller total means that the scraper started to count again.
        is_usable = known is not None and total.is_after(known.total)
        if known is None or not is_usable or not _same_step(known.status, status):
            known = self._baselines[name] = _Baseline(status, total)
        return total.since(known.total)

    def forget(self, name: str) -> None:
        """Forget a deployment that is gone or has no running analysis."""
        self._baselines.pop(name, None)


def _same_step(one: CanaryStatus, other: CanaryStatus) -> bool:
    return (one.template, one.step, one.weight, one.since) == (
        other.template,
        other.step,
        other.weight,
        other.since,
    )


def _says_enough(rules: CanaryAnalysis, measured: VersionMetrics | None) -> bool:
    return measured is not None and measured.requests >= rules.min_requests


def _next(
    canary: Canary, status: CanaryStatus, measured: VersionMetrics, now: datetime
) -> tuple[CanaryStatus, float | None]:
    """Return the state after a passed step: the next step waits, or runs at once if its weight is equal."""
    after = status.step + 1
    if after == len(canary.steps):
        message = f"all {after} steps were passed ({_figures(measured)})"
        return _moved(status, now, step=after, weight=100, outcome="Passed", message=message), None
    step = canary.steps[after]
    is_begun = step.weight == status.weight
    text = _watches(canary, after) if is_begun else _prepares(canary, after)
    message = f"{text}; {_step(canary, status.step)} was passed ({_figures(measured)})"
    # Its replicas may be ready already, and then no change queues the deployment.
    pause_s = duration.parse(step.pause) if is_begun else 0.0
    return _moved(status, now, step=after, message=message), pause_s


def _figures(measured: VersionMetrics) -> str:
    ttft_s, speed = measured.first_token_quantile(_P95), measured.tokens_per_second
    figures = [
        quantity.counted(round(measured.requests), "request", "requests"),
        f"{measured.errors:.0f} failed",
    ]
    figures.append("no streams" if ttft_s is None else f"first token p95 {ttft_s:.2f} s")
    if speed is not None:
        figures.append(f"{speed:.1f} tokens/s")
    return ", ".join(figures)


def _step(canary: Canary, number: int) -> str:
    return f"step {number + 1} of {len(canary.steps)}"


def _prepares(canary: Canary, number: int) -> str:
    weight = canary.steps[number].weight
    return f"{_step(canary, number)} waits for replicas to take {weight}% of the requests"


def _watches(canary: Canary, number: int) -> str:
    step = canary.steps[number]
    least = canary.analysis.min_requests
    atleast = f" and at least {quantity.counted(least, 'request', 'requests')}" if least else ""
    return f"{_step(canary, number)}: {step.weight}% of the requests, for {step.pause}{atleast}"


def _moved(status: CanaryStatus, now: datetime, **changes: object) -> CanaryStatus:
    return status.model_copy(update={"since": now, **changes})
