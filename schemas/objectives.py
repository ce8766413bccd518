"""Objectives of a deployment's service: what its clients are promised. The recorder measures them."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from schemas.meta import ApiModel


class Objectives(ApiModel):
    """Service level objectives, measured over one hour and over a day at the gateways."""

    first_token_p95_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Milliseconds within which 95 % of the streams have their first token."""
    tokens_per_second: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Tokens a second that 95 % of the streams reach after their first token."""
    availability_percent: Annotated[float, Field(ge=50, lt=100)] | None = None
    """Percentage of requests that do not fail, such as 99.5."""

    @model_validator(mode="after")
    def _promises_something(self) -> Self:
        if self.first_token_p95_ms is self.tokens_per_second is self.availability_percent is None:
            raise ValueError(
                "promises nothing: set firstTokenP95Ms, tokensPerSecond or availabilityPercent"
            )
        return self
