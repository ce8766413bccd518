"""Asks one engine once, and looks at what it says. Chooses nobody, repeats nothing, sends nothing to the client."""

import logging
from dataclasses import dataclass
from typing import TypeAlias

from gateway.forwarding.engine_stream import EngineStream, InFlight, split_events
from gateway.forwarding.load_tracker import LoadTracker
from gateway.forwarding.outlier_detection import PAUSE_S, Fault
from gateway.forwarding.retry_state import RetryState, WholeResponse
from gateway.metrics import response_summary
from gateway.metrics.gateway_metrics import GatewayMetrics
from gateway.metrics.version_metrics import VersionMetrics
from gateway.request import InferenceRequest
from gateway.routing.table import EngineEndpoint
from gateway.state.table_cache import TableCache
from gateway.upstream import request_encoder
from gateway.upstream.connection import BrokenResponseError
from gateway.upstream.connection_pool import UnreachableError, Upstream, UpstreamResponse
from machinery.clock import Clock

log = logging.getLogger(__name__)

# An engine that says so cannot serve this request now; another may. 500 too: engines use it only
# where they are to blame themselves.
TURNED_AWAY = frozenset({429, 500, 502, 503, 504})
# Answers that are not streamed are kept until they are complete; no real one is near this.
_WHOLE_LIMIT = 64 << 20
_NEVER = float("inf")

HeaderMap: TypeAlias = dict[bytes, bytes]
"""An answer's headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunner:
    """Asks engines, and blames those that fail."""

    upstream: Upstream
    loads: LoadTracker
    versions: VersionMetrics
    keeper: TableCache
    metrics: GatewayMetrics
    clock: Clock

    async def ask(
        self, ask: InferenceRequest, target: EngineEndpoint, trail: RetryState
    ) -> EngineStream | WholeResponse:
        """Ask one engine; a stream is returned once its first event is there.

        Raises:
            UnreachableError, BrokenError: it did not answer, or not to the end.

        """
        now_s, circuits = self.clock.monotonic(), self.loads.circuits
        is_trial = bool(circuits.breakers) and circuits.asked(target, now_s)
        version, own = self.versions.of(target), trail.is_clients_time
        held = InFlight(target, now_s, self.loads, version, trail.deadline_s, own)
        self.loads.begin(target)
        try:
            until_s = trail.deadline_s
            if ask.is_streamed:
                until_s = min(until_s, now_s + trail.policy.first_token_s)
            answer = held.answer = await self.upstream.request(
                target.origin,
                request_encoder.encode_request(ask, target, _more(ask, target, trail, now_s)),
                silence_s=trail.policy.silence_s,
                until_s=until_s,
            )
            found = dict(answer.headers)
            self.loads.hear(target.origin, found, self.clock.monotonic())
            _check_identity(found, target)
            kind = found.get(b"content-type", b"")
            if kind.startswith(b"text/event-stream") and answer.status not in TURNED_AWAY:
                return await self._stream(held, answer, trail)
            body = await answer.read()
            if not answer.is_complete:
                body = await whole_body(answer, body)
            return self._whole(held, found, body, trail)
        except (UnreachableError, BrokenResponseError) as error:
            now_s = self.clock.monotonic()
            held.failed(now_s)
            held.close()
            if now_s < trail.deadline_s:  # else the client is to blame
                self.blame(target, _fault(error))
                self.keeper.drop_orphan(target)
            raise
        except BaseException:
            held.close()
            raise
        finally:
            if is_trial:
                circuits.left(target, self.clock.monotonic())

    def _whole(
        self, held: InFlight, found: HeaderMap, body: bytes, trail: RetryState
    ) -> WholeResponse:
        """Note a complete answer, which is not streamed.

        Raises:
            BrokenError: it is none.

        """
        target, answer = held.target, held.answer
        assert answer is not None
        _check_whole(answer, found, body)
        now_s = self.clock.monotonic()
        trail.took(held.answered(answer.status, body, now_s))
        held.close()
        if answer.status not in TURNED_AWAY:
            if self.loads.circuits.breakers:
                self.loads.circuits.succeeded(target, held.asked_s, now_s)
        elif now_s < trail.deadline_s and not (answer.status == 504 and held.is_timeout(body)):
            is_full = answer.status in (429, 503)
            self.blame(target, "full" if is_full else "bad", pause_s=_pause_s(found))
        return WholeResponse(target=target, status=answer.status, headers=answer.headers, body=body)

    def blame(self, target: EngineEndpoint, fault: Fault, *, pause_s: float = PAUSE_S) -> None:
        """Note that an engine failed: others are asked first for a while."""
        now_s = self.clock.monotonic()
        if self.loads.circuits.failed(target, fault, now_s, pause_s=pause_s):
            self.metrics.ejections.add(target.replica)
            log.warning(
                "an engine is asked last from now on",
                extra={"replica": target.replica, "node": target.node, "fault": fault},
            )

    def interrupted(self, held: InFlight, error: BrokenResponseError) -> str:
        """Note that an engine died in the middle of a stream; return what came of the attempt in a word."""
        now_s = self.clock.monotonic()
        held.failed(now_s)
        is_late = now_s >= held.until_s
        if not is_late:
            self.blame(held.target, _fault(error))
            self.keeper.drop_orphan(held.target)
        outcome = "timed_out" if is_late else "interrupted"
        self.metrics.attempts.add(outcome)
        return outcome

    async def _stream(
        self, held: InFlight, answer: UpstreamResponse, trail: RetryState
    ) -> EngineStream:
        first, rest = await _first_event(answer)
        now_s = self.clock.monotonic()
        answer.until_s = trail.deadline_s
        held.begun(now_s)
        if self.loads.circuits.breakers:
            self.loads.circuits.succeeded(held.target, held.asked_s, now_s)
        return EngineStream(
            held=held,
            answer=answer,
            first=first,
            rest=rest,
            clock=self.clock,
            interrupted=self.interrupted,
            taker=trail,
        )


def is_timeout(result: EngineStream | WholeResponse, trail: RetryState) -> bool:
    """Return whether an engine says that the request's own time was up, which it was told."""
    if isinstance(result, EngineStream) or result.status != 504 or trail.deadline_s == _NEVER:
        return False
    return response_summary.is_timeout(result.body)


async def whole_body(answer: UpstreamResponse, first: bytes = b"") -> bytes:
    """Read an answer to its end; `first` was read before.

    Raises:
        BrokenError: it has none, or not within reason.

    """
    parts = bytearray(first)
    while piece := await answer.read():
        parts += piece
        if len(parts) > _WHOLE_LIMIT:
            raise BrokenResponseError(
                f"the answer is larger than {_WHOLE_LIMIT} bytes", had_bytes=True
            )
    return bytes(parts)


def _more(ask: InferenceRequest, target: EngineEndpoint, trail: RetryState, now_s: float) -> bytes:
    """Return the header lines of this attempt alone."""
    lines = b"" if trail.trace is None else trail.trace.attempt(target.replica, target.node)
    if ask.is_resumable and trail.policy.resumptions:
        lines += b"x-fleet-resumable: 1\r\n"
    if trail.deadline_s == _NEVER:
        return lines
    # The engine ends it, too: what nobody waits for any more must not hold a place there.
    return lines + b"x-request-timeout: %.3f\r\n" % max(0.001, trail.deadline_s - now_s)


def _fault(error: UnreachableError | BrokenResponseError) -> Fault:
    if isinstance(error, UnreachableError):
        return "gone"
    return "silent" if error.is_silence else "bad"


def _pause_s(found: HeaderMap) -> float:
    """Return for how long an engine asks to be left alone, in seconds; what is no such number asks for nothing."""
    text = found.get(b"retry-after", b"")
    return float(text) if text.isdigit() and len(text) < 6 else PAUSE_S


def _check_identity(found: HeaderMap, target: EngineEndpoint) -> None:
    """Refuse the answer of somebody else: ports of engines that are gone are used again."""
    named = found.get(b"x-fleet-replica")
    if named and (replica := named.decode("latin-1")) != target.replica:
        raise BrokenResponseError(f"{replica} answers there, not {target.replica}", had_bytes=True)


def _check_whole(answer: UpstreamResponse, found: HeaderMap, body: bytes) -> None:
    """Refuse half an answer with a head that says it is whole. Two bytes tell, without parsing any of it."""
    if answer.is_surplus and b"content-length" in found:
        raise BrokenResponseError("the answer is longer than it says", had_bytes=True)
    is_json = found.get(b"content-type", b"").startswith(b"application/json")
    if is_json and not (body[:1] == b"{" and body.rstrip()[-1:] == b"}"):
        raise BrokenResponseError("the answer is no JSON object", had_bytes=True)


async def _first_event(answer: UpstreamResponse) -> tuple[bytes, bytes]:
    """Read up to the end of the first event, so that a death before it can still be mended.

    Returns it, and the beginning of the next one.

    Raises:
        BrokenError: there is none.

    """
    first, rest = b"", b""
    while not first:
        piece = await answer.read()
        if not piece:
            raise BrokenResponseError("the stream ended before its first event", had_bytes=True)
        first, rest = split_events(rest, piece)
    return first, rest
