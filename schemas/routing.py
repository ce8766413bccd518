"""Routing: how gateways distribute requests over the endpoints of a name, and what they do when one fails."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.duration import Duration, PositiveDuration, parse
from schemas.meta import ApiModel

Strategy = Literal["Scored", "HardwareAware", "LeastLoaded", "RoundRobin", "Random", "PowerOfTwo"]

MAX_RATE = 1_000_000_000
"""The largest limit in a minute."""
_DEPTH, _TIMEOUT = 100, "30s"
CacheSharing = Literal["Key", "Deployment"]
CanonicalPrompts = Literal["Auto", "Off"]

Weight = Annotated[int, Field(ge=0, le=1000)]


class ScoreWeights(ApiModel):
    """Weights of the parts of a score, relative to each other; each part is between 0 and 1."""

    model_loaded: Weight = 40
    """Weight of an engine that has loaded the model and answers."""
    memory_headroom: Weight = 20
    """Weight of the share of free memory of the engine."""
    queue_depth: Weight = 30
    """Weight of a short queue of the engine."""
    prefix_affinity: Weight = 10
    """Weight of the share of the prompt that the engine has cached."""

    @model_validator(mode="after")
    def _not_all_zero(self) -> Self:
        if not any(
            (self.model_loaded, self.memory_headroom, self.queue_depth, self.prefix_affinity)
        ):
            raise ValueError(
                "are all 0, so every endpoint gets the same score; use strategy Random for that"
            )
        return self


class Sessions(ApiModel):
    """Session affinity: the requests of one conversation go to one endpoint."""

    enabled: bool = True
    """Sessions are known by session_id, the header x-session-id, a conversation's id, or the opening messages."""
    ttl: PositiveDuration = "5m"
    """Time for which a session is kept after its last request."""


class PrefixAffinity(ApiModel):
    """Prefix affinity: prompts go to the endpoint that has cached their beginning."""

    enabled: bool = True
    """Ignored with the strategies RoundRobin and Random."""
    bound: Annotated[int, Field(ge=100, le=10_000)] = 125
    """Load up to which an endpoint is preferred for its cache, in percent of the average."""


class Retries(ApiModel):
    """Retries of requests that got no byte of a response, on other endpoints."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 8
    """Most endpoints to try."""
    budget: Annotated[int, Field(ge=0, le=100)] = 20
    """Retries in percent of all requests of the last 10 s, plus a few; more would make an outage worse."""


class Resumption(ApiModel):
    """Resumption of answers whose engine fails, on another endpoint, without lost or repeated tokens."""

    max_resumptions: Annotated[int, Field(ge=0, le=100)] = 3
    """Most resumptions of one stream; 0 turns resumption off."""
    max_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 65_536
    """Longest stream that is resumed, in tokens; the gateway keeps them in memory."""


class Timeouts(ApiModel):
    """Time limits of a request. Default: the gateway's own limits."""

    request: PositiveDuration | None = None
    """From the request's arrival to the end of its response."""
    attempt: PositiveDuration | None = None
    """Time without progress of one endpoint, before the first token or between tokens, after which another is tried or
    continues the answer. Default: 120s (`--request-timeout` of the gateway)."""
    first_token: PositiveDuration | None = None
    """Of streams: from sending a request to its first event, after which another endpoint is tried."""

    @model_validator(mode="after")
    def _each_can_apply(self) -> Self:
        if self.request is None:
            return self
        for name, text in (("attempt", self.attempt), ("firstToken", self.first_token)):
            if text is not None and parse(text) >= parse(self.request):
                raise ValueError(
                    f"{name} is {text} and request is {self.request}, so the request would end before another "
                    f"endpoint is tried; make {name} shorter than request, or leave it out"
                )
        return self


_INTERVALS, _CHECK_TIMEOUTS = ("1s", "1h"), ("100ms", "1m")


class HealthCheck(ApiModel):
    """Checks of endpoints by gateways, and the failures that eject an endpoint."""

    interval: PositiveDuration | None = None
    """Silence of an endpoint after which it is asked for its health, 1s to 1h. Default: 10s; external endpoints 30s."""
    timeout: PositiveDuration | None = None
    """Longest wait for the answer to a check, 100ms to 1m. Default: 3s."""
    unhealthy_threshold: Annotated[int, Field(ge=1, le=100)] = 3
    """Failures in a row, of requests or checks, that eject an endpoint for a while."""

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        for name, text, (least, most) in (
            ("interval", self.interval, _INTERVALS),
            ("timeout", self.timeout, _CHECK_TIMEOUTS),
        ):
            if text is not None and not parse(least) <= parse(text) <= parse(most):
                raise ValueError(f"{name} is {text}; give {least} to {most}")
        return self


class Hedging(ApiModel):
    """A second endpoint is tried when the first is slow; the first response wins."""

    after: PositiveDuration
    """Time that the first endpoint has to begin its response."""
    budget: Annotated[int, Field(ge=1, le=50)] = 5
    """Hedged requests in percent of all requests."""


class Queueing(ApiModel):
    """Limits of the requests that one gateway sends to the name's engines, and of those that wait."""

    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most requests at engines at once. Default: no limit."""
    depth: Annotated[int, Field(ge=0, le=1_000_000)] = _DEPTH
    """Most requests that wait; further clients get 429."""
    timeout: Duration = _TIMEOUT
    """Longest wait for one of these; then the client gets 503."""
    cold_start: Duration | None = None
    """Longest wait for a replica or a free slot, of requests and of streams whose engine died. Default: 120s
    (`--hold-timeout` of the gateway); while engines that died start again, about 1.5 times the time in which they started
    last, between 10s and 2m."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self.concurrency is None and self.cold_start is None:
            raise ValueError("limits nothing; set concurrency or coldStart, or leave queueing out")
        # Documents in the store have the defaults.
        if self.concurrency is None and (self.depth, self.timeout) != (_DEPTH, _TIMEOUT):
            raise ValueError("depth and timeout have no effect without concurrency; set it as well")
        return self


class RateLimit(ApiModel):
    """Limits of all callers together, over all gateways; each gateway grants its share. Beyond them clients get 429."""

    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_RATE)] | None = None
    """Most requests in a minute. Default: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_RATE)] | None = None
    """Most tokens of prompts and answers in a minute, counted when an answer ends. Default: no limit."""

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            raise ValueError(
                "limits nothing; set requestsPerMinute or tokensPerMinute, or leave rateLimit out"
            )
        return self


class Routing(ApiModel):
    """The choice among the endpoints of one name by gateways."""

    strategy: Strategy = "Scored"
    """Scored: loaded model, free memory, short queue, cached prompt. HardwareAware: points for the chip, its GPU
    cores and memory, less for load. LeastLoaded: fewest requests. PowerOfTwo: the less loaded of two random ones.
    RoundRobin: each in turn. Random: any."""
    weights: ScoreWeights = ScoreWeights()
    """Weights of the parts of the score, for strategy Scored."""
    sessions: Sessions = Sessions()
    """Affinity of conversations to one endpoint."""
    prefix_affinity: PrefixAffinity = PrefixAffinity()
    """Affinity of prompts to the endpoint that has cached their beginning."""
    cache_sharing: CacheSharing = "Key"
    """Clients that share cached prompts. Key: those with the same API key. Deployment: all; the time of an answer and
    its cached_tokens then tell whether another client has sent the same beginning. A route needs it as well as each
    of its deployments."""
    canonical_prompts: CanonicalPrompts = "Auto"
    """Changes of the prompts of known coding agents, so that their beginnings are cached. Auto: dates, folders and ids
    move from the system prompt to the first user message, and tools are sorted by name; the response header
    x-fleet-canonical names the rules. Off: prompts pass unchanged."""
    site_affinity: bool = True
    """Prefer endpoints at the gateway's own site while there are any."""
    retries: Retries = Retries()
    """Retries of failed requests on other endpoints."""
    resumption: Resumption = Resumption()
    """Resumption of broken streams on other endpoints."""
    timeouts: Timeouts = Timeouts()
    """Time limits of a request."""
    health_check: HealthCheck = HealthCheck()
    """Checks of endpoints. Of a ModelRoute: of its external endpoints; an engine follows its ModelDeployment."""
    hedging: Hedging | None = None
    """A second request beside the one to a slow endpoint. Default: none."""
    queueing: Queueing | None = None
    """Limits of requests in flight. Default: only the engines' own limits."""
    rate_limit: RateLimit | None = None
    """Limits of all callers together. All names that these settings apply to share them. Default: none."""
