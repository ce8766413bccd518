"""Requests as gateways show them, ended or under way: the records of journals, feeds and the recorder's history.

Gateways write them. The dashboard and `fleetctl routes` read them, and believe no figure out of its range.
"""

from datetime import datetime
from typing import Annotated, Final, TypeAlias

import msgspec

_MOST_MILLISECONDS: Final = 30 * 24 * 3600 * 1000

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=_MOST_MILLISECONDS)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=10**10)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]
Instant: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]


class RequestTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request."""

    prompt: Count = 0
    cached: Count = 0
    output: Count = 0


class RequestAttempt(msgspec.Struct, frozen=True, gc=False):
    """One attempt at an engine."""

    replica: Text
    worker: Text
    outcome: Text
    ms: Milliseconds
    why: Text | None = None


class EndedRequest(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """One ended request.

    The garbage collector does not know it, because it is in no cycle: processes hold thousands.
    """

    time: Instant
    """Arrival of the complete request."""
    id: Text
    gateway: Text
    model: Text
    """As the client wrote it, truncated."""
    outcome: Text = msgspec.field(name="status")
    latency_ms: Milliseconds = 0.0
    tokens: RequestTokens = RequestTokens()
    queue_ms: Milliseconds = 0.0
    first_token_ms: Milliseconds | None = None
    worker: Text | None = None
    """The node that answered."""
    replica: Text | None = None
    deployment: Text | None = None
    api_key: Text | None = None
    """The name of the API key."""
    path: Text = ""
    http_status: Count | None = None
    """The HTTP status that the client got; None if it left before."""
    strategy: Text | None = None
    """The load balancing strategy; None if the model is unknown."""
    streamed: bool = False
    resumptions: Count = 0
    attempts: Annotated[tuple[RequestAttempt, ...], msgspec.Meta(max_length=1000)] = ()
    endpoint: Text | None = None
    """The URL of the engine that answered."""
    session: Text | None = None
    """A digest of the session key."""
    cache_miss: Text | None = None
    """Explanation of the engine for the tokens of the prompt that it read; None if nothing was lost."""

    @property
    def time_s(self) -> float:
        """Arrival in seconds since 1970."""
        return self.time.timestamp()

    @property
    def whole_s(self) -> float:
        """Seconds from arrival to the end."""
        return self.latency_ms / 1000

    @property
    def first_s(self) -> float:
        """Seconds to the first token; 0 if it was not streamed."""
        return (self.first_token_ms or 0.0) / 1000

    @property
    def queued_s(self) -> float:
        """Seconds in the gateway's queue."""
        return self.queue_ms / 1000

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.prompt

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer."""
        return self.tokens.output


class RunningRequest(msgspec.Struct, frozen=True, rename="camel"):
    """One request under way."""

    id: Text
    model: Text
    phase: Text
    seconds: Seconds
    path: Text = ""
    worker: Text | None = None
    replica: Text | None = None
    api_key: Text | None = None
    streamed: bool = False
    attempts: Count = 0
    resumptions: Count = 0
    engine_phase: Text | None = None
    """The engine's own report, as those below; None if it was not asked."""
    prompt_tokens: Count | None = None
    prefilled_tokens: Count | None = None
    """Tokens of the prompt that were read."""
    tokens: Count | None = None
    """Tokens that were generated."""


class GatewayFeed(msgspec.Struct, frozen=True, rename="camel"):
    """One answer of a gateway's feed for recorders."""

    gateway: str
    cursor: str
    is_complete: bool
    """False if requests that ended after the cursor of the question are gone."""
    requests: list[EndedRequest]
    running: list[RunningRequest]
    queue_depth: Count = 0
    active: Count = 0
    waiting_by_model: dict[str, Count] = {}
    active_by_deployment: dict[str, Count] = {}
    uptime_seconds: Seconds = 0.0
    lost: Count = 0
    """The number of requests that are gone; 0 if it is unknown."""
