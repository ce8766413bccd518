"""What was tried for one request, and what came of it. Values only."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gateway.errors import Refusal
from gateway.forwarding.admission import KeepAlive, Slot
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.model_state import ModelState
from gateway.forwarding.policy import DEFAULT_POLICY, NEVER, ForwardingPolicy
from gateway.routing.table import EngineEndpoint
from gateway.upstream.connection import Headers
from gateway.upstream.request_encoder import Trace


@dataclass(slots=True, kw_only=True)
class WholeResponse:
    """A complete answer. Not frozen: one is made for each request."""

    target: EngineEndpoint
    status: int
    headers: Headers
    body: bytes


STARTED_OUTCOMES = frozenset({"answered", "resumed"})
"""Outcomes of engines that answer, as far as is known yet."""
ForwardResult: TypeAlias = EngineStream | WholeResponse | Refusal


class Attempt(NamedTuple):
    """One engine that was asked."""

    target: EngineEndpoint
    outcome: str
    """As in fleet_gateway_attempts_total."""
    began_s: float
    ended_s: float
    """When its first bytes were there, or it had failed; both by the gateway's monotonic clock."""
    why: str = ""
    """Why it did not answer, as far as somebody wrote it down."""


@dataclass(slots=True)
class RetryState:
    """What was tried for one request."""

    attempts: int = 0
    failed: set[EngineEndpoint] = field(default_factory=set)
    unreached: set[EngineEndpoint] = field(default_factory=set)
    """Those of them that took no connection, and so have seen nothing of it."""
    refusal: Refusal | None = None
    """What to say if nobody is left and nobody answered."""
    turned_away: WholeResponse | None = None
    """What an engine said that could not serve now; better than any word of ours."""
    is_seen: bool = False
    """Whether an engine took the request."""
    waits_since_s: float | None = None
    """Since when the request waits for a replica to be started."""
    served_by: EngineEndpoint | None = None
    """Who answered in the end, or worked on it when its time was up."""
    named: ModelState | None = None
    """What is kept for the name that was asked for."""
    policy: ForwardingPolicy = DEFAULT_POLICY
    timeout_s: float = NEVER
    deadline_s: float = NEVER
    """When the answer must be complete, by the gateway's monotonic clock; `timeout_s` after it came."""
    is_clients_time: bool = False
    """Whether that is what the client asked for, and less than its name's `timeouts.request`."""
    is_timed_out: bool = False
    """Whether it ended at an engine because that time was up; the engine's clock may be ahead by a moment."""
    vigil: KeepAlive | None = None
    """Signs of life for its client, from the first wait on."""
    place: Slot | None = None
    """Its place in the queue of its name, until the answer's end."""
    is_repeat_free: bool = True
    """Whether the next attempt does not count for the retry budget."""
    tried: list[Attempt] = field(default_factory=list)
    """Every engine asked, in the order in which it was over; for the journal and traces."""
    queued_s: float = 0.0
    """How long it waited here for a place or a replica; whoever has it wait adds to it."""
    resumptions: int = 0
    """How often its stream was taken up elsewhere."""
    trace: Trace | None = None
    """What is passed to engines so that their spans belong to the client's trace."""
    prompt_tokens: int = 0
    """Of the answer, once it ended; 0 if nobody said. So the next two."""
    cached_tokens: int = 0
    """Those of the prompt that the engine did not have to read."""
    output_tokens: int = 0

    def took(self, tokens: tuple[int, int, int]) -> None:
        """Note the tokens of the prompt, those of it that were cached, and of the answer."""
        self.prompt_tokens, self.cached_tokens, self.output_tokens = tokens

    def broke(self, target: EngineEndpoint, outcome: str, why: str) -> None:
        """Note that an engine which had begun to answer did not do so to the end."""
        for at in reversed(range(len(self.tried))):
            one = self.tried[at]
            if one.target == target and one.outcome in STARTED_OUTCOMES:
                self.tried[at] = one._replace(outcome=outcome, why=why)
                return

    def may_wait(self) -> bool:
        """Return whether it may wait for a replica; one that engines died of would kill that, too."""
        return not self.is_seen and self.turned_away is None
