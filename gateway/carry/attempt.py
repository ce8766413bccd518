"""Asks one engine once, and looks at what it says. Chooses nobody, repeats nothing, sends nothing to the client."""

import logging
from dataclasses import dataclass
from typing import TypeAlias

from gateway.asks import Ask
from gateway.carry.breaker import PAUSE_S, Fault
from gateway.carry.held import Held
from gateway.carry.loads import Loads
from gateway.carry.streaming import Streaming
from gateway.carry.trail import Trail, Whole
from gateway.known.keeper import TableKeeper
from gateway.routing.table import Target
from gateway.upstream import request
from gateway.upstream.exchange import BrokenError
from gateway.upstream.pool import Answer, UnreachableError, Upstream
from gateway.upstream.sse import whole_events
from gateway.watch import endings
from gateway.watch.metrics import Metrics
from gateway.watch.versions import Versions
from machinery.clock import Clock

log = logging.getLogger(__name__)

# An engine that says so cannot serve this request now; another may. 500 too: engines use it only
# where they are to blame themselves.
TURNED_AWAY = frozenset({429, 500, 502, 503, 504})
# Answers that are not streamed are kept until they are complete; no real one is near this.
_WHOLE_LIMIT = 64 << 20
_NEVER = float("inf")

Found: TypeAlias = dict[bytes, bytes]
"""An answer's headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Asks engines, and blames those that fail."""

    upstream: Upstream
    loads: Loads
    versions: Versions
    keeper: TableKeeper
    metrics: Metrics
    clock: Clock

    async def ask(self, ask: Ask, target: Target, trail: Trail) -> Streaming | Whole:
        """Ask one engine; a stream is returned once its first event is there.

        Raises:
            UnreachableError, BrokenError: it did not answer, or not to the end.

        """
        now_s, circuits = self.clock.monotonic(), self.loads.circuits
        is_trial = bool(circuits.breakers) and circuits.asked(target, now_s)
        version, own = self.versions.of(target), trail.is_clients_time
        held = Held(target, now_s, self.loads, version, trail.deadline_s, own)
        self.loads.begin(target)
        try:
            until_s = trail.deadline_s
            if ask.is_streamed:
                until_s = min(until_s, now_s + trail.policy.first_token_s)
            answer = held.answer = await self.upstream.request(
                target.origin,
                request.encode(ask, target, _more(ask, target, trail, now_s)),
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
        except (UnreachableError, BrokenError) as error:
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

    def _whole(self, held: Held, found: Found, body: bytes, trail: Trail) -> Whole:
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
        return Whole(target=target, status=answer.status, headers=answer.headers, body=body)

    def blame(self, target: Target, fault: Fault, *, pause_s: float = PAUSE_S) -> None:
        """Note that an engine failed: others are asked first for a while."""
        now_s = self.clock.monotonic()
        if self.loads.circuits.failed(target, fault, now_s, pause_s=pause_s):
            self.metrics.ejections.add(target.replica)
            log.warning(
                "an engine is asked last from now on",
                extra={"replica": target.replica, "node": target.node, "fault": fault},
            )

    def interrupted(self, held: Held, error: BrokenError) -> str:
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

    async def _stream(self, held: Held, answer: Answer, trail: Trail) -> Streaming:
        first, rest = await _first_event(answer)
        now_s = self.clock.monotonic()
        answer.until_s = trail.deadline_s
        held.begun(now_s)
        if self.loads.circuits.breakers:
            self.loads.circuits.succeeded(held.target, held.asked_s, now_s)
        return Streaming(
            held=held,
            answer=answer,
            first=first,
            rest=rest,
            clock=self.clock,
            interrupted=self.interrupted,
            taker=trail,
        )


def is_timeout(result: Streaming | Whole, trail: Trail) -> bool:
    """Return whether an engine says that the request's own time was up, which it was told."""
    if isinstance(result, Streaming) or result.status != 504 or trail.deadline_s == _NEVER:
        return False
    return endings.is_timeout(result.body)


async def whole_body(answer: Answer, first: bytes = b"") -> bytes:
    """Read an answer to its end; `first` was read before.

    Raises:
        BrokenError: it has none, or not within reason.

    """
    parts = bytearray(first)
    while piece := await answer.read():
        parts += piece
        if len(parts) > _WHOLE_LIMIT:
            raise BrokenError(f"the answer is larger than {_WHOLE_LIMIT} bytes", had_bytes=True)
    return bytes(parts)


def _more(ask: Ask, target: Target, trail: Trail, now_s: float) -> bytes:
    """Return the header lines of this attempt alone."""
    lines = b"" if trail.trace is None else trail.trace.attempt(target.replica, target.node)
    if ask.is_resumable and trail.policy.resumptions:
        lines += b"x-fleet-resumable: 1\r\n"
    if trail.deadline_s == _NEVER:
        return lines
    # The engine ends it, too: what nobody waits for any more must not hold a place there.
    return lines + b"x-request-timeout: %.3f\r\n" % max(0.001, trail.deadline_s - now_s)


def _fault(error: UnreachableError | BrokenError) -> Fault:
    if isinstance(error, UnreachableError):
        return "gone"
    return "silent" if error.is_silence else "bad"


def _pause_s(found: Found) -> float:
    """Return for how long an engine asks to be left alone, in seconds; what is no such number asks for nothing."""
    text = found.get(b"retry-after", b"")
    return float(text) if text.isdigit() and len(text) < 6 else PAUSE_S


def _check_identity(found: Found, target: Target) -> None:
    """Refuse the answer of somebody else: ports of engines that are gone are used again."""
    named = found.get(b"x-fleet-replica")
    if named and (replica := named.decode("latin-1")) != target.replica:
        raise BrokenError(f"{replica} answers there, not {target.replica}", had_bytes=True)


def _check_whole(answer: Answer, found: Found, body: bytes) -> None:
    """Refuse half an answer with a head that says it is whole. Two bytes tell, without parsing any of it."""
    if answer.is_surplus and b"content-length" in found:
        raise BrokenError("the answer is longer than it says", had_bytes=True)
    is_json = found.get(b"content-type", b"").startswith(b"application/json")
    if is_json and not (body[:1] == b"{" and body.rstrip()[-1:] == b"}"):
        raise BrokenError("the answer is no JSON object", had_bytes=True)


async def _first_event(answer: Answer) -> tuple[bytes, bytes]:
    """Read up to the end of the first event, so that a death before it can still be mended.

    Returns it, and the beginning of the next one.

    Raises:
        BrokenError: there is none.

    """
    first, rest = b"", b""
    while not first:
        piece = await answer.read()
        if not piece:
            raise BrokenError("the stream ended before its first event", had_bytes=True)
        first, rest = whole_events(rest, piece)
    return first, rest
