"""One attempt: sends a request to one endpoint and checks the response. Selects no endpoint and retries nothing."""

import logging
from dataclasses import dataclass
from typing import TypeAlias

from gateway.forwarding.engine_stream import EngineStream, InFlight, split_events
from gateway.forwarding.outlier_detection import PAUSE_S, Fault
from gateway.forwarding.retry_state import RetryState, WholeResponse
from gateway.forwarding.router import LoadTracker
from gateway.metrics import response_summary
from gateway.metrics.gateway_metrics import GatewayMetrics
from gateway.metrics.version_metrics import VersionMetrics
from gateway.request import InferenceRequest
from gateway.routing.table import EngineEndpoint
from gateway.state.table_cache import TableCache
from gateway.upstream import request_encoder
from gateway.upstream.connection import BrokenResponseError
from gateway.upstream.connection_pool import UnreachableError, Upstream, UpstreamResponse
from machinery.clock import NEVER, Clock
from schemas.wire import headers

log = logging.getLogger(__name__)

# Statuses after which another engine may succeed. Includes 500, which engines use only for their
# own failures.
RETRYABLE_STATUSES = frozenset({429, 500, 502, 503, 504})
# Responses that are not streamed are buffered. No real one comes near this size.
_WHOLE_LIMIT = 64 << 20

_REPLICA = headers.REPLICA.encode()
_RETRY_AFTER = headers.RETRY_AFTER.encode()
_RESUMABLE_LINE = f"{headers.RESUMABLE}: 1\r\n".encode()
_SALT_LINE = headers.CACHE_SALT.encode() + b": %b\r\n"
_TIMEOUT_LINE = f"{headers.REQUEST_TIMEOUT}: %.3f\r\n".encode()

HeaderMap: TypeAlias = dict[bytes, bytes]
"""Headers of a response by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunner:
    """Sends requests to engines and records their failures."""

    upstream: Upstream
    load_tracker: LoadTracker
    versions: VersionMetrics
    table_cache: TableCache
    metrics: GatewayMetrics
    clock: Clock

    async def run(
        self, request: InferenceRequest, endpoint: EngineEndpoint, state: RetryState
    ) -> EngineStream | WholeResponse:
        """Send the request to one endpoint; a stream is returned once its first event has arrived.

        Raises:
            UnreachableError: the endpoint accepts no connection.
            BrokenResponseError: the response is missing or incomplete.

        """
        now_s, outliers = self.clock.monotonic(), self.load_tracker.outliers
        is_trial = bool(outliers.breakers) and outliers.begin_trial(endpoint, now_s)
        policy, deadline = state.terms.policy, state.terms.deadline
        version = self.versions.of(endpoint)
        in_flight = InFlight(endpoint, now_s, self.load_tracker, version, deadline)
        self.load_tracker.begin(endpoint)
        try:
            until_s = deadline.at_s
            if request.is_streamed:
                until_s = min(until_s, now_s + policy.first_token_s)
            response = in_flight.response = await self.upstream.request(
                endpoint.origin,
                request_encoder.encode_request(
                    request, endpoint, _attempt_lines(request, endpoint, state, now_s)
                ),
                silence_s=policy.silence_s,
                until_s=until_s,
            )
            fields = dict(response.headers)
            self.load_tracker.record_report(endpoint.origin, fields, self.clock.monotonic())
            _check_identity(fields, endpoint)
            content_type = fields.get(b"content-type", b"")
            if (
                content_type.startswith(b"text/event-stream")
                and response.status not in RETRYABLE_STATUSES
            ):
                return await self._stream(in_flight, response, state)
            body = await response.read()
            if not response.is_complete:
                body = await read_body(response, body)
            return self._whole(in_flight, fields, body, state)
        except (UnreachableError, BrokenResponseError) as error:
            now_s = self.clock.monotonic()
            in_flight.record_failure(now_s)
            in_flight.close()
            is_own_fault = isinstance(error, UnreachableError) and error.is_own_fault
            # After the deadline the client's limit is the reason.
            if now_s < state.terms.deadline.at_s and not is_own_fault:
                self.blame(endpoint, _fault(error))
                self.table_cache.drop_orphan(endpoint)
            raise
        except BaseException:
            in_flight.close()
            raise
        finally:
            if is_trial:
                outliers.abandon_trial(endpoint, self.clock.monotonic())

    def _whole(
        self, in_flight: InFlight, fields: HeaderMap, body: bytes, state: RetryState
    ) -> WholeResponse:
        """Record a complete response that is not streamed.

        Raises:
            BrokenResponseError: the response is not valid.

        """
        endpoint, response = in_flight.endpoint, in_flight.response
        assert response is not None
        _check_whole(response, fields, body)
        now_s = self.clock.monotonic()
        state.record_usage(in_flight.record_response(response.status, body, now_s))
        in_flight.close()
        if response.status not in RETRYABLE_STATUSES:
            if self.load_tracker.outliers.breakers:
                self.load_tracker.outliers.record_success(endpoint, in_flight.sent_s, now_s)
        elif now_s < state.terms.deadline.at_s and not (
            response.status == 504 and in_flight.is_timeout(body)
        ):
            is_full = response.status in (429, 503)
            self.blame(endpoint, "full" if is_full else "bad", pause_s=_pause_s(fields))
        return WholeResponse(
            endpoint=endpoint, status=response.status, headers=response.headers, body=body
        )

    def blame(self, endpoint: EngineEndpoint, fault: Fault, *, pause_s: float = PAUSE_S) -> None:
        """Record the failure of an endpoint, so that others are preferred for a while."""
        now_s = self.clock.monotonic()
        if self.load_tracker.outliers.record_failure(endpoint, fault, now_s, pause_s=pause_s):
            self.metrics.ejections.add(endpoint.replica)
            log.warning(
                "endpoint ejected; other endpoints are preferred",
                extra={"replica": endpoint.replica, "node": endpoint.node, "fault": fault},
            )

    def interrupted(self, in_flight: InFlight, error: BrokenResponseError) -> str:
        """Record that an engine died during a stream; return the outcome of the attempt."""
        now_s = self.clock.monotonic()
        in_flight.record_failure(now_s)
        is_late = now_s >= in_flight.deadline.at_s
        if not is_late:
            self.blame(in_flight.endpoint, _fault(error))
            self.table_cache.drop_orphan(in_flight.endpoint)
        outcome = "timed_out" if is_late else "interrupted"
        self.metrics.attempts.add(outcome)
        return outcome

    async def _stream(
        self, in_flight: InFlight, response: UpstreamResponse, state: RetryState
    ) -> EngineStream:
        first, rest = await _first_event(response)
        now_s = self.clock.monotonic()
        response.until_s = state.terms.deadline.at_s
        in_flight.record_first_event(now_s)
        if self.load_tracker.outliers.breakers:
            self.load_tracker.outliers.record_success(in_flight.endpoint, in_flight.sent_s, now_s)
        return EngineStream(
            in_flight=in_flight,
            response=response,
            first=first,
            rest=rest,
            clock=self.clock,
            interrupted=self.interrupted,
            observer=state,
        )


def is_timeout(result: EngineStream | WholeResponse, state: RetryState) -> bool:
    """Return whether the engine reports that the request's own deadline has passed."""
    if (
        isinstance(result, EngineStream)
        or result.status != 504
        or state.terms.deadline.at_s == NEVER
    ):
        return False
    return response_summary.is_timeout(result.body)


async def read_body(response: UpstreamResponse, first: bytes = b"") -> bytes:
    """Read a response to its end. `first`: the part that was read already.

    Raises:
        BrokenResponseError: the response is incomplete or too large.

    """
    parts = bytearray(first)
    while piece := await response.read():
        parts += piece
        if len(parts) > _WHOLE_LIMIT:
            raise BrokenResponseError(
                f"the response is larger than {_WHOLE_LIMIT} bytes", had_bytes=True
            )
    return bytes(parts)


def _attempt_lines(
    request: InferenceRequest, endpoint: EngineEndpoint, state: RetryState, now_s: float
) -> bytes:
    """Return the header lines of this attempt only."""
    lines = b"" if state.trace is None else state.trace.attempt(endpoint.replica, endpoint.node)
    if request.is_resumable and state.terms.policy.resumptions:
        lines += _RESUMABLE_LINE
    if request.key_salt:
        lines += _SALT_LINE % request.key_salt
    if state.terms.deadline.at_s == NEVER:
        return lines
    # The engine enforces the deadline too, so that an abandoned request frees its slot.
    return lines + _TIMEOUT_LINE % max(0.001, state.terms.deadline.at_s - now_s)


def _fault(error: UnreachableError | BrokenResponseError) -> Fault:
    if isinstance(error, UnreachableError):
        return "gone"
    return "silent" if error.is_silence else "bad"


def _pause_s(fields: HeaderMap) -> float:
    """Return the engine's `retry-after` in seconds; the default if it is missing or not a number."""
    text = fields.get(_RETRY_AFTER, b"")
    return float(text) if text.isdigit() and len(text) < 6 else PAUSE_S


def _check_identity(fields: HeaderMap, endpoint: EngineEndpoint) -> None:
    """Refuse the response of another replica: ports of ended engines are reused."""
    name = fields.get(_REPLICA)
    if name and (replica := name.decode("latin-1")) != endpoint.replica:
        raise BrokenResponseError(
            f"replica {replica} answers there, not {endpoint.replica}", had_bytes=True
        )


def _check_whole(response: UpstreamResponse, fields: HeaderMap, body: bytes) -> None:
    """Refuse a truncated body whose head declares it complete. Two bytes tell, without parsing."""
    if response.is_surplus and b"content-length" in fields:
        raise BrokenResponseError("the response is longer than its content-length", had_bytes=True)
    is_json = fields.get(b"content-type", b"").startswith(b"application/json")
    if is_json and not (body[:1] == b"{" and body.rstrip()[-1:] == b"}"):
        raise BrokenResponseError("the response is not a JSON object", had_bytes=True)


async def _first_event(response: UpstreamResponse) -> tuple[bytes, bytes]:
    """Read up to the end of the first event, so that an earlier failure can be retried.

    Returns the event and the beginning of the next one.

    Raises:
        BrokenResponseError: the stream has no event.

    """
    first, rest = b"", b""
    while not first:
        piece = await response.read()
        if not piece:
            raise BrokenResponseError("the stream ended before its first event", had_bytes=True)
        first, rest = split_events(rest, piece)
    return first, rest
