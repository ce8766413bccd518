"""How gateways share out the requests of a name over its endpoints, and what they do when one fails."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.duration import FineDuration, PositiveFineDuration, parse_fine
from schemas.meta import ApiModel

Strategy = Literal["Scored", "HardwareAware", "LeastLoaded", "RoundRobin", "Random", "PowerOfTwo"]

Weight = Annotated[int, Field(ge=0, le=1000)]


class ScoreWeights(ApiModel):
    """What the parts of a score count, relative to each other; each part lies between 0 and 1."""

    model_loaded: Weight = 40
    """Whether the model is loaded and answers."""
    memory_headroom: Weight = 20
    """Which part of its memory the engine has left."""
    queue_depth: Weight = 30
    """How little it has to do."""
    prefix_affinity: Weight = 10
    """How much of the prompt it has read before."""

    @model_validator(mode="after")
    def _not_all_zero(self) -> Self:
        if not any(
            (self.model_loaded, self.memory_headroom, self.queue_depth, self.prefix_affinity)
        ):
            raise ValueError(
                "are all 0, so that every endpoint is as good; use strategy Random for that"
            )
        return self


class Sessions(ApiModel):
    """Whether the requests of one conversation go to one endpoint."""

    enabled: bool = True
    """By session_id, the header x-session-id, a conversation's id, or the opening messages once it goes on."""
    ttl: PositiveFineDuration = "5m"
    """How long a session is remembered after its last request."""


class PrefixAffinity(ApiModel):
    """Whether prompts go where their beginning was read before."""

    enabled: bool = True
    """Not with RoundRobin and Random, which look at nobody."""
    bound: Annotated[int, Field(ge=100, le=10_000)] = 125
    """How busy an endpoint may be, in percent of the average, and still be chosen for what it has cached."""


class Retries(ApiModel):
    """How often a request that got no byte of an answer is tried elsewhere."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 8
    """How many endpoints are asked at most."""
    budget: Annotated[int, Field(ge=0, le=100)] = 20
    """Repeated attempts in percent of all requests of the last 10 s, plus a few: more would feed an outage."""


class Resumption(ApiModel):
    """Whether a stream whose engine dies goes on elsewhere, without a token lost or doubled."""

    max_resumptions: Annotated[int, Field(ge=0, le=100)] = 3
    """How often for one stream; 0 turns it off."""
    max_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 65_536
    """A stream that has got longer than this is not resumed, for its tokens are kept at the gateway."""


class Timeouts(ApiModel):
    """How long a request may take; without a value the gateway's own limit counts."""

    request: PositiveFineDuration | None = None
    """From the request's arrival to the end of its answer."""
    attempt: PositiveFineDuration | None = None
    """Silence of one endpoint, after which another is asked, or the stream resumed there."""
    first_token: PositiveFineDuration | None = None
    """Of streams: from asking an endpoint to its first event, after which another is asked."""

    @model_validator(mode="after")
    def _each_can_apply(self) -> Self:
        if self.request is None:
            return self
        for name, text in (("attempt", self.attempt), ("firstToken", self.first_token)):
            if text is not None and parse_fine(text) >= parse_fine(self.request):
                raise ValueError(
                    f"{name} is {text} and request {self.request}, so that the request ends before another "
                    f"endpoint is asked; make {name} shorter than request, or leave it out"
                )
        return self


class Hedging(ApiModel):
    """A second endpoint is asked when the first takes long; the first answer counts."""

    after: PositiveFineDuration
    """How long the first may take to begin."""
    budget: Annotated[int, Field(ge=1, le=50)] = 5
    """Second requests in percent of all requests."""


class Queueing(ApiModel):
    """How many requests one gateway lets through to the name's engines, and how many wait before."""

    concurrency: Annotated[int, Field(ge=1, le=1_000_000)]
    """How many may be at engines at once."""
    depth: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """How many more may wait; beyond it clients get 429."""
    timeout: FineDuration = "30s"
    """How long one may wait; then it gets 503."""


class Routing(ApiModel):
    """How gateways choose among the endpoints of one name."""

    strategy: Strategy = "Scored"
    """Scored: loaded model, free memory, short queue, prefix read before. HardwareAware: points for the chip, its
    GPU cores and memory, less for load. LeastLoaded: fewest requests. PowerOfTwo: the less loaded of two drawn.
    RoundRobin, Random: each in turn, anybody."""
    weights: ScoreWeights = ScoreWeights()
    """What the parts of the score count, for strategy Scored."""
    sessions: Sessions = Sessions()
    """Whether conversations stay where they are."""
    prefix_affinity: PrefixAffinity = PrefixAffinity()
    """Whether prompts go where their beginning is cached."""
    site_affinity: bool = True
    """Whether endpoints at the gateway's own site are asked first, as long as there are any."""
    retries: Retries = Retries()
    """How often and where else a failed request is tried."""
    resumption: Resumption = Resumption()
    """Whether broken streams go on elsewhere."""
    timeouts: Timeouts = Timeouts()
    """How long things may take."""
    hedging: Hedging | None = None
    """Whether slow endpoints get a rival; left out, they do not."""
    queueing: Queueing | None = None
    """How many requests may be under way; left out, the engines alone say when they are full."""
