"""State of one request's attempts, in parts that each have one writer. Values only."""

from collections.abc import Coroutine
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from gateway.forwarding.admission import ClientWait, KeepAlive, Slot, WaitingRequest
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.model_state import RequestTerms
from gateway.forwarding.resume_log import ResumeLog
from gateway.metrics.response_summary import TokenCounts
from gateway.routing.table import EndpointName, EngineEndpoint
from gateway.upstream.request_encoder import Trace
from schemas.wire.errors import Refusal

if TYPE_CHECKING:  # it is driven with this state
    from gateway.forwarding.attempt import EngineAttempt

_NO_ENDPOINTS: frozenset[EngineEndpoint] = frozenset()
LATER_STATUSES = frozenset({429, 503})
"""Statuses with which an engine turns a request away that it could answer later: full, loading or shutting down."""
STARTED_OUTCOMES = frozenset({"answered", "resumed"})
"""Outcomes of attempts that got a response."""


class WholeResponse(msgspec.Struct):
    """A complete response."""

    endpoint: EngineEndpoint
    status: int
    passed: bytes
    """Header lines for the client."""
    body: bytes


ForwardResult: TypeAlias = EngineStream | WholeResponse | Refusal


class ForwardClient(ClientWait, Protocol):
    """Receives the result of a request, or waits for it."""

    def on_result(self, result: ForwardResult) -> None:
        """Receive the first response, or the refusal."""
        ...

    def wait_for(self, result: Coroutine[Any, Any, ForwardResult]) -> None:
        """Await the result in a task."""
        ...


class Attempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One finished attempt at an endpoint. The garbage collector need not know it: it is in no cycle."""

    endpoint: EndpointName
    outcome: str
    """As in fleet_gateway_attempts_total."""
    began_s: float
    ended_s: float
    """Time of the first bytes or of the failure; both times by the gateway's monotonic clock."""
    why: str = ""
    """The reason of a failure, if it is known."""


_NO_TERMS = RequestTerms()


class Waiting(msgspec.Struct):
    """The waits of a request for a replica or a free slot of one."""

    since_s: float
    """Time at which the first wait began."""
    keep_alive: KeepAlive
    """Keep-alive events for the client."""
    place: WaitingRequest | None = None
    """The place in the line, once it has one."""


class AdmissionState(msgspec.Struct):
    """The waits of a request for a slot and for a replica. Written by the forwarder."""

    slot: Slot | None = None
    """The slot in the model's queue, until the end of the response."""
    queued_s: float = 0.0
    """Total wait for a slot or a replica."""
    waiting: Waiting | None = None
    """The waits for a replica or a free slot; None before the first."""


class AttemptFailures(msgspec.Struct):
    """The failed attempts of a request and the answer if no other succeeds. Written by the forwarder."""

    endpoints: set[EngineEndpoint] = msgspec.field(default_factory=set)
    """Endpoints that are not tried again."""
    later: set[EngineEndpoint] = msgspec.field(default_factory=set)
    """Those of them that may take the request later: they accepted no connection, or turned it away unseen."""
    refusal: Refusal | None = None
    """The refusal if no endpoint is left and none answered."""
    rejection: WholeResponse | None = None
    """The last response of an engine that cannot serve now; preferred to `refusal`."""
    was_seen: bool = False
    """True if an engine accepted the request and then failed."""
    is_timed_out: bool = False
    """True if an attempt ended at the deadline. The engine's clock may be slightly ahead."""
    resume_log: ResumeLog | None = None
    """The tokens so far of an answer that is not streamed; the next engine continues it."""
    is_retry_free: bool = True
    """True if the next attempt is not charged to the retry budget."""
    excused: int = 0
    """Attempts before a wait, which do not count."""

    def add_error(self, endpoint: EngineEndpoint, refusal: Refusal, *, is_unreached: bool) -> None:
        """Record the error of an attempt and the refusal that it stands for."""
        self.refusal = refusal
        if is_unreached:
            self.later.add(endpoint)
        else:
            self.was_seen = True

    def add(
        self, endpoint: EngineEndpoint, *, rejection: WholeResponse | None, is_retry_free: bool
    ) -> None:
        """Record a failed attempt. `rejection`: the response if the engine sent one."""
        self.endpoints.add(endpoint)
        if rejection is not None:
            self.rejection = rejection
            if _is_for_now(rejection):
                self.later.add(endpoint)
        self.is_retry_free = is_retry_free

    @property
    def is_rejected_for_now(self) -> bool:
        """True if an engine turned the request away that may take it later."""
        last = self.rejection
        return last is not None and _is_for_now(last)

    def excuse(self) -> None:
        """Allow another attempt at the endpoints that may take the request later."""
        if self.later:
            self.excused += len(self.later)
            self.endpoints -= self.later
            self.later.clear()
            self.is_retry_free = True


def _is_for_now(rejection: WholeResponse) -> bool:
    return rejection.status in LATER_STATUSES and rejection.endpoint.external is None


class RetryState(msgspec.Struct, eq=False):
    """The attempts of one request, and what they need to know about it."""

    trace: Trace | None = None
    """Trace context for the engines. Written by the recorder."""
    terms: RequestTerms = _NO_TERMS
    """Replaced by the forwarder, never changed."""
    admission: AdmissionState | None = None
    """None until the request waits; see `add_admission`."""
    failures: AttemptFailures | None = None
    """None until an attempt fails; see `failed` and `add_failures`."""
    client: ForwardClient | None = None
    """Gets the result. Written by the forwarder."""
    running: "EngineAttempt | None" = None
    """The first attempt, until it has a result. Written by the forwarder."""
    draw: float = -1.0
    """Random number, 0..1, for all choices of endpoints; negative before the first."""
    started: int = 0
    """The number of attempts, running ones included."""
    attempts: tuple[Attempt, ...] = ()
    """Finished attempts in the order of their end."""
    served_by: EngineEndpoint | None = None
    """The endpoint that answered, or that worked on the request at its deadline."""
    resumptions: int = 0
    """The number of times that the stream continued on another engine. Changed by `record_resumption`."""
    usage: TokenCounts = (0, 0, 0)
    """Tokens of the prompt, its cached part, and the answer. Changed by `record_usage`."""
    cache_miss: str = ""
    """Explanation of the engine for the tokens of the prompt that it read; empty if nothing was lost. Written by attempts."""

    @property
    def failed(self) -> AbstractSet[EngineEndpoint]:
        """The endpoints that are not tried again."""
        return _NO_ENDPOINTS if self.failures is None else self.failures.endpoints

    @property
    def queued_s(self) -> float:
        """The total wait for a slot or a replica."""
        return 0.0 if self.admission is None else self.admission.queued_s

    def add_admission(self) -> AdmissionState:
        """Return the record of the request's waits, created if necessary."""
        if self.admission is None:
            self.admission = AdmissionState()
        return self.admission

    def add_failures(self) -> AttemptFailures:
        """Return the record of failed attempts, created if necessary."""
        if self.failures is None:
            self.failures = AttemptFailures()
        return self.failures

    def record_resumption(self, endpoint: EngineEndpoint) -> None:
        """Record that the stream continues at this endpoint."""
        self.resumptions += 1
        self.served_by = endpoint

    def record_broken(self, endpoint: EngineEndpoint, outcome: str, why: str) -> None:
        """Record that an engine failed after it had begun to answer."""
        attempts = self.attempts
        for at in reversed(range(len(attempts))):
            attempt = attempts[at]
            if attempt.endpoint == endpoint.name and attempt.outcome in STARTED_OUTCOMES:
                broken = msgspec.structs.replace(attempt, outcome=outcome, why=why)
                self.attempts = (*attempts[:at], broken, *attempts[at + 1 :])
                return
