"""How a deployment goes from one version of its template to the next."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.duration import Duration, PositiveDuration
from schemas.meta import ApiModel
from schemas.quantity import Amount, Percent


class CanaryStep(ApiModel):
    """One step: so much of the traffic goes to the new version for so long."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Percent of the requests that the new version gets."""
    pause: Duration = "1m"
    """How long to watch before the next step; analysis must have enough requests as well."""


class CanaryAnalysis(ApiModel):
    """When the new version counts as bad: what the gateways measured of it during a step."""

    max_error_rate: Percent = "5%"
    """Most requests that may fail."""
    max_ttft_p95: Duration | None = None
    """Most time to the first token, for 95 of 100 requests."""
    min_tokens_per_second: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Least output tokens a second of one request, on average; 0 asks for nothing."""
    min_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    """Fewest requests that say something; until there were so many a step does not end. 0: never wait."""


class Canary(ApiModel):
    """The new version first gets a part of the traffic, and is rolled back if it is bad."""

    steps: Annotated[tuple[CanaryStep, ...], Field(min_length=1, max_length=20)]
    """One after the other; after the last one the new version gets everything."""
    analysis: CanaryAnalysis = CanaryAnalysis()
    """When the new version counts as bad."""

    @model_validator(mode="after")
    def _upwards(self) -> Self:
        weights = [step.weight for step in self.steps]
        if weights != sorted(weights):
            raise ValueError(f"has steps whose weights go down ({weights}); a trial only grows")
        return self


class Rollout(ApiModel):
    """How replicas are replaced when what they run changes."""

    strategy: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """RollingUpdate: a few at a time. Recreate: all old ones end before the first new one starts."""
    max_surge: Amount = 1
    """How many replicas there may be above the wanted number, or a percentage (rounded up). Where no node has
    room for one more, replicas are replaced in place, one at a time."""
    max_unavailable: Amount = 0
    """How many of the wanted replicas may be missing meanwhile, or a percentage (rounded down). Where both are 0
    every replica is replaced in place, one at a time."""
    progress_deadline: PositiveDuration = "10m"
    """After so long without any progress the rollout is reported as Stalled. Big models take long to load."""
    paused: bool = False
    """Changes wait until this is false; replicas that are lost are replaced all the same."""
    revision_history_limit: Annotated[int, Field(ge=0, le=100)] = 10
    """How many earlier revisions are kept to go back to."""
    canary: Canary | None = None
    """Try a new version with a part of the traffic first."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.canary is not None and self.strategy == "Recreate":
            raise ValueError(
                "has a canary, which runs beside the old version; strategy Recreate ends that first. Remove one"
            )
        return self
