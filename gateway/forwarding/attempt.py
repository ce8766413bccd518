"""One attempt: sends a request to one endpoint and checks the response. Selects no endpoint and retries nothing.

An attempt is driven by the connection, without a task or a future. An `AttemptWaiter` awaits one, for requests that
wait anyway.
"""

import asyncio
import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
from typing_extensions import override

from gateway.forwarding.engine_stream import EngineStream, split_events
from gateway.forwarding.outlier_detection import PAUSE_S, Fault
from gateway.forwarding.resume_log import ResumeLog
from gateway.forwarding.retry_state import Attempt, RetryState, WholeResponse
from gateway.forwarding.router import LoadTracker
from gateway.metrics import response_summary
from gateway.metrics.gateway_metrics import GatewayMetrics
from gateway.metrics.response_summary import VersionCounts
from gateway.metrics.version_metrics import VersionMetrics
from gateway.request import JSON, InferenceRequest
from gateway.routing.table import EngineEndpoint
from gateway.state.table_cache import TableCache
from gateway.upstream.call import (
    BrokenResponseError,
    EngineCall,
    UnreachableError,
    Upstream,
    UpstreamError,
)
from gateway.upstream.request_encoder import encode_external, encode_link, rename_model
from gateway.upstream.response_head import ResponseHead
from machinery.clock import NEVER, Clock
from schemas.wire import headers

log = logging.getLogger(__name__)

# Statuses after which another engine may succeed. Includes 500, which engines use only for their
# own failures.
RETRYABLE_STATUSES = frozenset({429, 500, 502, 503, 504})
# Responses that are not streamed are buffered. No real one comes near this size.
_WHOLE_LIMIT = 64 << 20

# Answers of external servers that say nothing about the client's request, and must not look as if they did.
_EXTERNAL_FAULTS: Mapping[int, str] = {
    401: "the external server refuses the fleet's key",
    402: "the external server wants to be paid",
    403: "the external server refuses the fleet's key",
    404: "the external server does not know the model or the path",
    405: "the external server does not know the path",
    407: "a proxy before the external server asks for a password",
    **dict.fromkeys(
        range(300, 309), "the external server has moved; its url must lead to it directly"
    ),
}

TIMEOUT_STATUS, _UNAVAILABLE_STATUS = 504, 503
_CACHE_MISS, _LONGEST_MISS = headers.CACHE_MISS.encode(), 500
_RETRY_AFTER = headers.RETRY_AFTER.encode()
_PROGRESS_LINE = headers.PROGRESS.encode() + b": %.3g\r\n"
_PROGRESS_S = 1.0
_USUAL_PROGRESS_LINE = _PROGRESS_LINE % _PROGRESS_S
_RESUMABLE_LINE = f"{headers.RESUMABLE}: 1\r\n".encode()
_MODEL_LINE = headers.MODEL.encode() + b": %b\r\n"
_SALT_LINE = headers.CACHE_SALT.encode() + b": %b\r\n"
_TIMEOUT_LINE = f"{headers.REQUEST_TIMEOUT}: %.3f\r\n".encode()

AttemptResult: TypeAlias = EngineStream | WholeResponse


class AttemptOwner(Protocol):
    """Receives the result of an attempt."""

    def on_result(self, attempt: "EngineAttempt", result: AttemptResult) -> None:
        """Receive a complete response, or a stream whose first event has arrived."""
        ...

    def on_failure(self, attempt: "EngineAttempt", error: UpstreamError) -> None:
        """Receive the reason for which there is no response."""
        ...


class EngineAttempt(EngineCall, kw_only=True):
    """One request at one endpoint, from its head to its last byte. Counts as load until it is closed."""

    runner: "AttemptRunner"
    request: InferenceRequest
    state: RetryState
    owner: AttemptOwner
    endpoint: EngineEndpoint
    sent_s: float
    version: VersionCounts
    stream: EngineStream | None = None
    """The stream of the response, once its first event has arrived."""
    is_counted: bool = False
    """True once the outcome is recorded in the metrics of the version."""
    is_closed: bool = False
    """True once it no longer counts as load."""
    is_trusted: bool = True
    """True unless the endpoint was ejected when the attempt began."""
    is_trial: bool = False
    """True while the attempt is the trial of an endpoint that was ejected."""
    is_resumed: bool = False
    """True if the engine continues an answer that is not streamed."""
    resume_log: ResumeLog | None = None
    """The tokens of such an answer so far; None before the first sign of them."""
    _is_streamed: bool = False
    _head: ResponseHead | None = None
    _parts: list[bytes] = msgspec.field(default_factory=list)
    _size: int = 0
    _rest: bytes = b""
    _first_s: float = 0.0

    @override
    def on_progress(self, record: bytes) -> None:
        if record:
            if self.resume_log is None:
                self.resume_log = ResumeLog(self.state.terms.policy.resumable_tokens)
            self.resume_log.add(record)

    @override
    def on_head(self, head: ResponseHead) -> None:
        fields, status, self._head = head.fields, head.status, head
        kind = fields.get(b"content-type", b"")
        self._is_streamed = (
            kind.startswith(b"text/event-stream") and status not in RETRYABLE_STATUSES
        )
        if self.endpoint.external is not None:
            if status in _EXTERNAL_FAULTS:
                self._fail(f"{_EXTERNAL_FAULTS[status]} (status {status})")
            return
        miss = fields.get(_CACHE_MISS)
        if miss is not None:
            self.state.cache_miss = miss[:_LONGEST_MISS].decode("latin-1")

    @override
    def on_body(self, data: bytes) -> None:
        if self.stream is not None:
            self.stream.feed(data)
        elif self._is_streamed:
            # A failure before the end of the first event can be retried.
            first, self._rest = split_events(self._rest, data)
            if first:
                self._begin_stream(first, [])
        else:
            self._parts.append(data)
            self._size += len(data)
            if self._size > _WHOLE_LIMIT:
                self._fail(f"the response is larger than {_WHOLE_LIMIT} bytes")

    @override
    def on_recorded(self, events: bytes, records: list[bytes]) -> None:
        if self.stream is not None:
            self.stream.feed_recorded(events, records)
        elif self._is_streamed:
            self._begin_stream(events, records)
        else:
            self._fail("the response is not a stream")

    @override
    def on_refused(self, last_event: bytes) -> None:
        if self.stream is not None:
            self.stream.refuse(last_event)
        elif self._is_streamed:
            self._begin_stream(last_event, [])
            self.on_end(b"")
        else:
            self._fail("the response is not a stream")

    @override
    def on_end(self, data: bytes) -> None:
        if not self._is_streamed:
            assert self._head is not None
            self._finish_whole(self._head, b"".join((*self._parts, data)))
            return
        if data:
            self.on_body(data)
        if self.stream is None:
            self._fail("the stream ended before its first event")
        else:
            self.stream.finish()

    @override
    def on_error(self, error: UpstreamError) -> None:
        if self.stream is not None:
            assert isinstance(error, BrokenResponseError)
            self.stream.break_off(error)
            return
        self._record_death(error)
        self.close()
        self._end_trial()
        self.owner.on_failure(self, error)

    def interrupt(self, error: BrokenResponseError) -> str:
        """Record that the engine died during the stream; return the outcome of the attempt."""
        outcome = "timed_out" if self._record_death(error) else "interrupted"
        self.runner.metrics.attempts.add(outcome)
        return outcome

    def _record_death(self, error: UpstreamError) -> bool:
        """Record that the engine did not answer, or not to the end; return whether the deadline was the reason."""
        runner = self.runner
        is_late = runner.clock.monotonic() >= self.state.terms.deadline.at_s
        self._count_early_end(is_late=is_late)
        is_own_fault = isinstance(error, UnreachableError) and error.is_own_fault
        if not is_late and not is_own_fault:
            runner.blame(self.endpoint, _fault(error))
            runner.table_cache.drop_orphan(self.endpoint)
        return is_late

    def _count_early_end(self, *, is_late: bool) -> None:
        self.is_counted = True
        if is_late and self.state.terms.deadline.is_clients:
            self.version.client_gone += 1
        else:
            self.version.error += 1

    def record_end(self, tokens: int, last: bytes) -> str:
        """Record the end of the stream, with the number of tokens after the first event.

        Return the failure as in fleet_gateway_attempts_total; empty if the stream is complete.
        """
        now_s = self.runner.clock.monotonic()
        if response_summary.is_complete_stream(last):
            self.is_counted = True
            self.version.record_stream(tokens, now_s - self._first_s)
            return ""
        is_late = now_s >= self.state.terms.deadline.at_s or self.is_timeout(last)
        self._count_early_end(is_late=is_late)
        return "timed_out" if is_late else "interrupted"

    def is_timeout(self, body: bytes) -> bool:
        """Return whether a 504 with this body, or a stream with this end, reports the request's own deadline."""
        return self.state.terms.deadline.at_s < NEVER and response_summary.is_timeout(body)

    def close(self) -> None:
        """Release the request. Without a recorded outcome the client left. May be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        if not self.is_counted:
            self.version.client_gone += 1
        self.cancel()
        self.runner.load_tracker.end(self.endpoint)

    def record(self, outcome: str, why: str = "") -> None:
        """Add the attempt, which has ended or got a response, to those of its request."""
        self.runner.metrics.attempts.add(outcome)
        ended_s = self.runner.clock.monotonic()
        self.state.attempts += (Attempt(self.endpoint.name, outcome, self.sent_s, ended_s, why),)

    def abandon(self) -> None:
        """End the attempt without a result, because the client left or another attempt won."""
        if self.stream is not None:
            self.stream.close()
        self.close()
        self._end_trial()

    def _fail(self, why: str) -> None:
        """Give up a response that is not valid."""
        self.cancel()
        self.on_error(BrokenResponseError(why, had_bytes=True))

    def _finish_whole(self, head: ResponseHead, body: bytes) -> None:
        # A truncated body whose head declares it complete. Two bytes tell, without parsing.
        if not (body.startswith(b"{") and body.rstrip().endswith(b"}")) and _is_json(head):
            self._fail("the response is not a JSON object")
            return
        endpoint, status, tracker = self.endpoint, head.status, self.runner.load_tracker
        now_s = self.runner.clock.monotonic()
        # As `close`, of a call that its connection has released.
        self.is_closed = self.is_counted = True
        tracker.end(endpoint)
        if status < 400:
            self.state.usage = self.version.record_response(status, body, now_s - self.sent_s)
        else:
            self._record_error_status(head, body, now_s)
        if tracker.outliers.breakers and status not in RETRYABLE_STATUSES:
            tracker.outliers.record_success(endpoint, self.sent_s, now_s)
        if self.is_trial:
            self._end_trial()
        self.owner.on_result(self, WholeResponse(endpoint, status, head.passed, body))

    def _end_trial(self) -> None:
        if self.is_trial:
            self.is_trial = False
            now_s = self.runner.clock.monotonic()
            self.runner.load_tracker.outliers.abandon_trial(self.endpoint, now_s)

    def _begin_stream(self, first: bytes, records: list[bytes]) -> None:
        runner, head = self.runner, self._head
        assert head is not None
        self._first_s = now_s = runner.clock.monotonic()
        self.until_s = self.state.terms.deadline.at_s
        self.version.record_first_token(now_s - self.sent_s)
        outliers = runner.load_tracker.outliers
        if outliers.breakers:
            outliers.record_success(self.endpoint, self.sent_s, now_s)
        self._end_trial()
        self.stream = EngineStream(
            attempt=self,
            status=head.status,
            passed=head.passed,
            first=first,
            rest=self._rest,
            records=records,
        )
        self.owner.on_result(self, self.stream)

    def _record_error_status(self, head: ResponseHead, body: bytes, now_s: float) -> None:
        """Record a complete response with an error, which may be the engine's fault."""
        status = head.status
        is_late = status == TIMEOUT_STATUS and self.is_timeout(body)
        if is_late:
            self._count_early_end(is_late=True)
        else:
            self.version.record_response(status, body, now_s - self.sent_s)
        if status in RETRYABLE_STATUSES and now_s < self.state.terms.deadline.at_s and not is_late:
            fault: Fault = "full" if status in (429, 503) else "bad"
            if is_loading(self.endpoint, status, body):
                fault = "gone"
            self.runner.blame(self.endpoint, fault, pause_s=_pause_s(head.fields))


class AttemptWaiter(AttemptOwner):
    """The result of an attempt, to be awaited."""

    def __init__(self) -> None:
        self.result: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()

    @override
    def on_result(self, attempt: EngineAttempt, result: AttemptResult) -> None:
        if self.result.done():
            attempt.abandon()  # the reader left in this moment
            return
        if isinstance(result, EngineStream):
            result.pause()  # until it has a receiver
        self.result.set_result(result)

    @override
    def on_failure(self, attempt: EngineAttempt, error: UpstreamError) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    async def wait(self, attempt: EngineAttempt) -> AttemptResult:
        """Return the result: a stream once its first event has arrived. One that is not awaited is abandoned.

        Raises:
            UnreachableError: the endpoint accepts no connection.
            BrokenResponseError: the response is missing or incomplete.

        """
        try:
            return await self.result
        except asyncio.CancelledError:
            attempt.abandon()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunner:
    """Sends requests to engines and records their failures."""

    upstream: Upstream
    load_tracker: LoadTracker
    versions: VersionMetrics
    table_cache: TableCache
    metrics: GatewayMetrics
    clock: Clock

    def start(
        self,
        request: InferenceRequest,
        endpoint: EngineEndpoint,
        state: RetryState,
        owner: AttemptOwner,
    ) -> EngineAttempt:
        """Send the request to one endpoint. The owner gets the result, later.

        Raises:
            RefusedError: the request cannot be sent to this endpoint.

        """
        now_s, tracker, terms = self.clock.monotonic(), self.load_tracker, state.terms
        policy, deadline, outliers = terms.policy, terms.deadline, tracker.outliers
        resume_log = None if state.failures is None else state.failures.resume_log
        if resume_log is not None:
            # What an external server generated is another model's.
            point = resume_log.resume_point(request.choices) if endpoint.external is None else None
            resume_log = None if point is None else copy.deepcopy(resume_log)
            if point is not None:
                body = point.resume_body(request.body)
                request = msgspec.structs.replace(request, body=body)
        if endpoint.external is None:
            raw, rest = encode_request(request, endpoint, state, now_s)
        else:
            raw, rest = encode_external(request, endpoint.external)
        until_s, silence_s = deadline.at_s, policy.silence_s
        if endpoint.external is not None and not request.is_streamed:
            silence_s = policy.external_silence_s
        if request.is_streamed and policy.first_token_s < NEVER:
            until_s = min(until_s, now_s + policy.first_token_s)
        attempt = EngineAttempt(
            origin=endpoint.origin,
            raw=raw,
            body=rest,
            replica=endpoint.replica,
            silence_s=silence_s,
            until_s=until_s,
            endpoint=endpoint,
            sent_s=now_s,
            version=(
                self.versions.found.get((endpoint.deployment, endpoint.template))
                or self.versions.of(endpoint)
            ),
            runner=self,
            request=request,
            state=state,
            owner=owner,
        )
        tracker.begin(endpoint)
        attempt.is_resumed, attempt.resume_log = resume_log is not None, resume_log
        if outliers.breakers:
            attempt.is_trusted = endpoint.origin not in outliers.ejected_origins
            attempt.is_trial = outliers.begin_trial(endpoint, now_s)
        self.upstream.send(attempt)
        return attempt

    def blame(self, endpoint: EngineEndpoint, fault: Fault, *, pause_s: float = PAUSE_S) -> None:
        """Record the failure of an endpoint, so that others are preferred for a while."""
        now_s = self.clock.monotonic()
        if self.load_tracker.outliers.record_failure(endpoint, fault, now_s, pause_s=pause_s):
            self.metrics.ejections.add(endpoint.replica)
            log.warning(
                "endpoint ejected; other endpoints are preferred",
                extra={"replica": endpoint.replica, "node": endpoint.node, "reason": fault},
            )


def is_loading(endpoint: EngineEndpoint, status: int, body: bytes) -> bool:
    """Return whether the engine was started again where it is still published, and has not loaded its model yet.

    It is as one that accepts no connection yet: it has not seen the request.
    """
    is_full = status == _UNAVAILABLE_STATUS and endpoint.external is None
    return is_full and response_summary.is_loading(body)


def encode_request(
    request: InferenceRequest, endpoint: EngineEndpoint, state: RetryState, now_s: float
) -> tuple[bytes, memoryview]:
    """Return the request for an engine, with the header lines of this attempt only, and the rest of a large body."""
    lines = b"" if state.trace is None else state.trace.attempt(endpoint.replica, endpoint.node)
    terms, body = state.terms, request.body
    silence_s = terms.policy.silence_s
    lines += _USUAL_PROGRESS_LINE if silence_s > 3 else _PROGRESS_LINE % (silence_s / 3)
    if request.is_resumable and terms.policy.resumptions:
        lines += _RESUMABLE_LINE
    if request.key_salt:
        lines += _SALT_LINE % request.key_salt
    if terms.deadline.at_s < NEVER:
        # The engine enforces the deadline too, so that an abandoned request frees its slot.
        lines += _TIMEOUT_LINE % max(0.001, terms.deadline.at_s - now_s)
    if request.model not in endpoint.names and endpoint.names:
        # The engine does not know a route's name, or a served name younger than itself.
        if request.content_type == JSON:
            body = rename_model(body, request.model, endpoint.names[0])
        else:  # an upload is large, and stays as it is
            lines += _MODEL_LINE % endpoint.names[0].encode("latin-1", "replace")
    return encode_link(request, request.path, lines, body)


def outcome_of(error: UpstreamError) -> str:
    """Return the outcome of an attempt without a response, as in fleet_gateway_attempts_total."""
    if isinstance(error, UnreachableError):
        return error.outcome
    return "silent" if error.is_silence else "broken"


def _is_json(head: ResponseHead) -> bool:
    return head.fields.get(b"content-type", b"").startswith(b"application/json")


def _fault(error: UpstreamError) -> Fault:
    if isinstance(error, UnreachableError):
        return "gone"
    return "silent" if error.is_silence else "bad"


def _pause_s(fields: dict[bytes, bytes]) -> float:
    """Return the engine's `retry-after` in seconds; the default if it is missing or not a number."""
    text = fields.get(_RETRY_AFTER, b"")
    return float(text) if text.isdigit() and len(text) < 6 else PAUSE_S
