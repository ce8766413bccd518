"""Rollout: how a deployment changes from one version of its template to the next."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from schemas.duration import Duration, PositiveDuration
from schemas.meta import CANARY_DECISION, ApiModel
from schemas.quantity import Amount, Percent


class CanaryStep(ApiModel):
    """One step of a canary: a share of the traffic for some time."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Percent of the requests that the new version gets."""
    pause: Duration = "1m"
    """Minimum time before the next step; the analysis must also have enough requests."""


class CanaryAnalysis(ApiModel):
    """Limits for the new version, checked against the gateways' measurements during a step."""

    max_error_rate: Percent = "5%"
    """Most requests that may fail."""
    max_ttft_p95: Duration | None = None
    """Longest time to the first token, for 95 of 100 requests."""
    min_tokens_per_second: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Fewest output tokens a second of one request, on average; 0 sets no limit."""
    min_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    """Requests that the analysis needs; a step does not end before. 0: do not wait."""


class Canary(ApiModel):
    """A new version first gets a share of the traffic, and is rolled back if it exceeds a limit."""

    steps: Annotated[tuple[CanaryStep, ...], Field(min_length=1, max_length=20)]
    """The steps in order; after the last one the new version gets all traffic."""
    analysis: CanaryAnalysis = CanaryAnalysis()
    """Limits for the new version."""

    @model_validator(mode="after")
    def _upwards(self) -> Self:
        weights = [step.weight for step in self.steps]
        if weights != sorted(weights):
            raise ValueError(
                f"has steps whose weights go down ({weights}); weights must not decrease"
            )
        return self


CanaryDecision: TypeAlias = Literal["promote", "abort"]
"""promote: the new version passes now. abort: it fails now, and is rolled back."""


def canary_decision_notes(decision: CanaryDecision, generation: int) -> dict[str, str]:
    """Return the annotation of a decision, which counts for this generation of the deployment only."""
    return {CANARY_DECISION: f"{decision} {generation}"}


def canary_decision(annotations: Mapping[str, str], generation: int) -> CanaryDecision | None:
    """Return the decision that the annotations of a deployment hold for this generation, if any."""
    words = annotations.get(CANARY_DECISION, "").split()
    match words:
        case ["promote" | "abort" as decision, number] if number == str(generation):
            return decision
        case _:
            return None


class Rollout(ApiModel):
    """The replacement of replicas when the template changes."""

    strategy: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """RollingUpdate: a few at a time. Recreate: all old replicas end before the first new one starts."""
    max_surge: Amount = 1
    """Replicas allowed above the wanted number, or a percentage (rounded up). Where no node has room for one
    more, replicas are replaced in place, one at a time."""
    max_unavailable: Amount = 0
    """Wanted replicas that may be unavailable meanwhile, or a percentage (rounded down). If both are 0, every
    replica is replaced in place, one at a time."""
    progress_deadline: PositiveDuration = "10m"
    """Time without progress after which the rollout is reported as Stalled. Large models take long to load."""
    paused: bool = False
    """Changes wait until this is false; lost replicas are still replaced."""
    revision_history_limit: Annotated[int, Field(ge=0, le=100)] = 10
    """Earlier revisions to keep for rollback."""
    canary: Canary | None = None
    """Try a new version with a share of the traffic first."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.canary is not None and self.strategy == "Recreate":
            raise ValueError(
                "has a canary, which runs beside the old version; strategy Recreate ends that first. Remove one"
            )
        return self
