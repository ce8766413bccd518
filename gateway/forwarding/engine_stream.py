"""Where server-sent events end. Pure; looks at no event's content.

A request at an engine: counted as its load until it is closed, and once for its version.

A stream on its way from engines: whole events, as they come, without marks. Sends nothing and chooses nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.forwarding import resume_log
from gateway.forwarding.load_tracker import LoadTracker
from gateway.forwarding.resume_log import ResumeLog
from gateway.metrics import response_summary
from gateway.metrics.response_summary import TokenCounts, parse_usage
from gateway.metrics.version_metrics import VersionCounts
from gateway.routing.table import EngineEndpoint
from gateway.upstream.connection import BrokenResponseError, Headers
from gateway.upstream.connection_pool import UpstreamResponse
from machinery.clock import Clock

# A single event larger than this is passed on in parts: memory matters more than whole events.
_HELD_LIMIT = 1 << 20


def split_events(held: bytes, piece: bytes, limit: int = _HELD_LIMIT) -> tuple[bytes, bytes]:
    """Return what may be passed on, and the beginning of an event that is not all there yet.

    Half an event must not be passed on: if the engine dies then, no error event could follow it.
    """
    if not held and piece.endswith(b"\n\n"):
        return piece, b""
    data = held + piece
    end = max(_end(data, b"\n\n"), _end(data, b"\r\n\r\n"))
    if len(data) - end > limit:
        return data, b""
    return data[:end], data[end:]


def _end(data: bytes, separator: bytes) -> int:
    at = data.rfind(separator)
    return 0 if at < 0 else at + len(separator)


_NEVER = float("inf")
_TIMEOUT = 504


@dataclass(slots=True)
class InFlight:
    """A request at an engine, counted as its load until it is closed, and once for its version."""

    target: EngineEndpoint
    asked_s: float
    _loads: LoadTracker
    _version: VersionCounts
    until_s: float = float("inf")
    """When its client wants it no more: it is not the engine's fault then that it ends."""
    is_clients_time: bool = False
    """Whether the client itself said so, and not the name's `timeouts.request`, which a bad version may be too slow for."""
    answer: UpstreamResponse | None = None
    _first_s: float = 0.0
    is_counted: bool = False
    """Whether it is known how it ended."""
    _is_closed: bool = False

    def begun(self, now_s: float) -> None:
        """Note that a stream's first event is there."""
        self._version.first_token(now_s - self.asked_s)
        self._first_s = now_s

    def ended(self, lines: int, last: bytes, now_s: float) -> str:
        """Note that a stream ended, so many lines after the first event.

        Return how it did, as in fleet_gateway_attempts_total; empty if it is whole.
        """
        self.is_counted = True
        if response_summary.is_complete_stream(last):
            self._version.streamed(lines, last, now_s - self._first_s)
            return ""
        is_late = now_s >= self.until_s or (
            self.until_s < _NEVER and response_summary.is_timeout(last)
        )
        self._end_early(is_late=is_late)
        return "timed_out" if is_late else "interrupted"

    def answered(self, status: int, body: bytes, now_s: float) -> TokenCounts:
        """Note an answer that was not streamed; return the tokens that it took."""
        self.is_counted = True
        if status == _TIMEOUT and self.is_timeout(body):
            self._end_early(is_late=True)
            return 0, 0, 0
        return self._version.answered(status, body, now_s - self.asked_s)

    def is_timeout(self, body: bytes) -> bool:
        """Return whether a 504 with this body is the engine's word that the request's own time was up."""
        return self.until_s < _NEVER and response_summary.is_timeout(body)

    def failed(self, now_s: float) -> None:
        """Note that the engine did not answer, or died in the middle of it."""
        self._end_early(is_late=now_s >= self.until_s)

    def _end_early(self, *, is_late: bool) -> None:
        self.is_counted = True
        if is_late and self.is_clients_time:
            self._version.client_gone += 1
        else:
            self._version.error += 1

    def close(self) -> None:
        """Have done with it; whom nobody counted is a client that left. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_counted:
            self._version.client_gone += 1
        if self.answer is not None:
            self.answer.close()
        self._loads.end(self.target)


WAITING = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
# Of the last chunk, if there is one after all text: with the usage.
_NO_CHOICES = b'"choices":[]'
# Events of streams with marks are never passed on in parts; the largest are bursts of likelihoods for slow readers.
_LARGEST = 16 << 20


class ResumeSearch(Protocol):
    """A search for another engine that goes on with a stream."""

    @property
    def is_finished(self) -> bool:
        """Whether the client was told already why the answer is over."""
        ...

    async def step(self) -> "EngineStream | None":
        """Return the rest of the stream; None if the client should hear that it is being waited for.

        Raises:
            BrokenError: nobody goes on with it.

        """
        ...


class StreamObserver(Protocol):
    """Who wants to know what an answer took, and who broke off."""

    def took(self, tokens: TokenCounts) -> None:
        """Note the tokens of the prompt, those of it that were cached, and of the answer."""
        ...

    def broke(self, target: EngineEndpoint, outcome: str, why: str) -> None:
        """Note that an engine which had begun to answer did not do so to the end."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class EngineStream:
    """A stream whose first event is there; the receiver closes it."""

    held: InFlight
    answer: UpstreamResponse
    first: bytes
    rest: bytes
    """The beginning of the next event."""
    clock: Clock
    interrupted: Callable[[InFlight, BrokenResponseError], str]
    """Called when an engine dies; says what came of the attempt in a word."""
    taker: StreamObserver
    tape: ResumeLog | None = None
    """Its marks, if it has any."""
    search: Callable[["EngineStream", BrokenResponseError], ResumeSearch] | None = None
    """Begins the search for another engine, or raises what it is given."""
    is_resumed: bool = False
    is_whole: bool = True
    """Whether no engine ended it with an error that is for the client; known at the end."""
    _found: ResumeSearch | None = None
    _last: bytes = b""
    _events: int = 0
    """How many there were after the first; of marked ones, what the tape had counted before."""
    _is_over: bool = False

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def headers(self) -> Headers:
        return self.answer.headers

    @property
    def target(self) -> EngineEndpoint:
        """Who answers now."""
        return self.held.target

    def watch(
        self,
        tape: ResumeLog,
        search: Callable[["EngineStream", BrokenResponseError], ResumeSearch] | None,
    ) -> None:
        """Take the marks out of it, and have it go on elsewhere should its engine die."""
        self.tape, self.search = tape, search
        self.first = tape.take(self.first)
        self._events = tape.events

    async def read(self) -> bytes:
        """Return one or more whole events; empty at the end.

        Raises:
            BrokenError: it ended before its end, and nobody can go on with it.

        """
        while not self._is_over:
            if self._found is not None and not await self._goes_on(self._found):
                return WAITING
            try:
                if self.first:
                    self._last, self.first = self.first, b""
                    return self._last
                if self.tape is not None and self.tape.fault is not None:
                    return self._last_words(self.tape.fault)
                if not (piece := await self.answer.read()):
                    return self._ended()
                if self.tape is None:
                    whole, self.rest = split_events(self.rest, piece)
                    if whole:
                        # Most pieces are one event, and finding costs half of counting.
                        is_one = whole.find(b"\n\n") == len(whole) - 2
                        self._events += 1 if is_one else whole.count(b"\n\n")
                else:
                    whole, self.rest = split_events(self.rest, piece, _LARGEST)
                    whole = self.tape.take(whole) if whole else whole
                if whole:
                    self._last = whole
                    return whole
            except BrokenResponseError as error:
                self._broken(error)
        return b""

    def close(self) -> None:
        """Have done with it, read to its end or not. May be called again."""
        if not self._is_over:
            self._is_over = True
            if self.tape is not None:
                self.taker.took(self.tape.usage())
        self.held.close()

    def _ended(self) -> bytes:
        """Return what is left when the engine says that this was all."""
        if self.tape is not None and not self._last.endswith(DONE):
            raise BrokenResponseError("the engine ended it before its end", had_bytes=True)
        whole, self.rest = self.rest, b""
        self._count(self._last + whole)
        return whole

    def _last_words(self, fault: bytes) -> bytes:
        """Return the error with which the engine ended it, if that is for the client.

        Raises:
            BrokenError: another engine may do better.

        """
        why, is_resumable = resume_log.parse_fault(fault)
        if is_resumable:
            raise BrokenResponseError(why, had_bytes=True)
        event = fault + b"\n\n"
        self._count(event)
        return event

    def _count(self, last: bytes) -> None:
        """Note that there is no more, and what it took."""
        self._is_over = True
        end = last if self.tape is None else self.tape.last()
        if found := parse_usage(end):
            self.taker.took(found)
        # Of a resumed one, the tokens were not all made in the time since.
        told = last if self.is_resumed else end + last
        count = self._events if self.tape is None else self.tape.events - self._events
        broken = self.held.ended(2 * count, told, self.clock.monotonic())
        if broken:
            self.is_whole = False
            self.taker.broke(self.held.target, broken, response_summary.stream_error(last))

    def _broken(self, error: BrokenResponseError) -> None:
        """Begin to look for somebody else.

        Raises:
            BrokenError: there is nobody.

        """
        if self._last.endswith(DONE):
            self._count(self._last)
            return
        self.rest = b""
        if self.tape is not None and _NO_CHOICES in self._last:
            self.first = DONE  # all but this was said
            return
        outcome = self.interrupted(self.held, error)
        self.taker.broke(self.held.target, outcome, str(error))
        self.held.close()
        if self.search is None:
            raise error
        self._found = self.search(self, error)

    async def _goes_on(self, search: ResumeSearch) -> bool:
        found = await search.step()
        if found is None:
            return False
        assert self.tape is not None
        first = found.first
        if search.is_finished:
            # It says once more why the answer is over.
            first = first[first.index(b"\n\n") + 2 :]
        self.held, self.answer, self.rest = found.held, found.answer, found.rest
        self.tape.fault = None
        self.first = self.tape.take(first)
        self.is_resumed, self._found, self._events = True, None, self.tape.events
        return True
