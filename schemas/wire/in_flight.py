"""Requests in flight at an engine, and their cancellation: the routes and their documents.

Nothing in them is what a client wrote, except the id of a request.
"""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from schemas.meta import ApiModel

ENGINE_PATH: Final = "/v1/in-flight"
"""The engine's route. POST to CANCEL_PATH ends the requests with one id."""
CANCEL_PATH: Final = "/v1/in-flight/{id:path}/cancel"
MAX_REQUESTS: Final = 4096
MAX_BODY_BYTES: Final = 2 << 20

RequestPhase: TypeAlias = Literal["queued", "prefill", "generating"]
Count = Annotated[int, Field(ge=0)]


class InFlightRequest(ApiModel):
    """One request."""

    id: Annotated[str, StringConstraints(max_length=128)]
    """Its `x-request-id`; the ids of clients need not be unique."""
    endpoint: Annotated[str, StringConstraints(max_length=200)]
    model: Annotated[str, StringConstraints(max_length=200)]
    """Empty while its body is read."""
    phase: RequestPhase
    seconds: Annotated[float, Field(ge=0)]
    """Time since its arrival."""
    prompt_tokens: Count = 0
    prefilled_tokens: Count = 0
    """Prompt tokens that are read, cached ones included; as many as there are once it generates."""
    generated_tokens: Count = 0
    trace_id: Annotated[str, StringConstraints(max_length=32)] = ""


class InFlightRequests(ApiModel):
    """The requests of one engine, oldest first."""

    requests: Annotated[tuple[InFlightRequest, ...], Field(max_length=MAX_REQUESTS)] = ()
    total: Count = 0
    """All there are; the list is bounded."""


class CancelledRequests(ApiModel):
    """The answer to a cancellation."""

    id: str
    cancelled: Count
    """The number of requests with this id that were ended."""
