"""Event stream of an engine: whole events for the client, until the end, or until another engine continues it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from gateway.forwarding.resume_log import ResumeLog
from gateway.metrics import response_summary
from gateway.metrics.response_summary import parse_usage
from gateway.routing.table import EngineEndpoint
from gateway.upstream.call import BrokenResponseError, SuspendedError
from machinery.http_chunks import CHUNK_END, SIZE_LINES
from schemas.wire.streams import DONE

if TYPE_CHECKING:  # they make streams, or continue them
    from gateway.forwarding.attempt import EngineAttempt
    from gateway.forwarding.resumption import Continuation, Resumption

# A larger event is passed on in parts, to bound the memory.
_HELD_LIMIT = 1 << 20


def split_events(held: bytes, piece: bytes) -> tuple[bytes, bytes]:
    """Return the complete events, and the beginning of an incomplete one.

    An incomplete event must not be passed on: if the engine then dies, no error event could follow.
    """
    if not held and piece.endswith(b"\n\n"):
        return piece, b""
    data = held + piece
    end = max(_end(data, b"\n\n"), _end(data, b"\r\n\r\n"))
    if len(data) - end > _HELD_LIMIT:
        return data, b""
    return data[:end], data[end:]


def _end(data: bytes, separator: bytes) -> int:
    at = data.rfind(separator)
    return 0 if at < 0 else at + len(separator)


class StreamReceiver(Protocol):
    """Receives a stream's events as they arrive."""

    def on_events(self, events: bytes) -> None:
        """Receive one or more complete events."""
        ...

    def chunk_writer(self) -> "ChunkWriter | None":
        """Return a function that takes events as HTTP/1.1 chunks in place of `on_events`; None if there is none."""
        return None

    def on_stream_end(self) -> None:
        """Handle the end of the stream."""
        ...

    def on_stream_broken(self, error: BrokenResponseError) -> None:
        """Handle a stream that broke and that no engine continues."""
        ...

    def on_engine_died(self) -> None:
        """Handle the death of the engine: `EngineStream.find_next` must be awaited."""
        ...

    def on_suspended(self) -> None:
        """Handle a stream without an engine: `EngineStream.find_next` must be awaited once the client reads again."""
        ...


ChunkWriter: TypeAlias = Callable[[bytes], object]
"""Writes HTTP/1.1 chunks to a client."""
EarlyAct: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of a stream and its arguments, for what arrives before there is a receiver."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineStream:
    """A stream whose first event has arrived. The holder must `attach` a receiver, and close it."""

    attempt: "EngineAttempt"
    """The request that the engine answers now."""
    status: int
    passed: bytes
    """Header lines for the client."""
    first: bytes
    rest: bytes = b""
    """The beginning of the next event."""
    records: list[bytes] = field(default_factory=list)
    """The resume records of the first events, if another engine can continue the stream."""
    resume_log: ResumeLog | None = None
    """Resume records of the stream, if it has any."""
    continuation: "Continuation | None" = None
    """None if no other engine can continue the stream."""
    is_whole: bool = True
    """False if an engine ended the stream with an error for the client; valid at the end."""
    last: bytes = b""
    """The last events that the client got."""
    early: list[EarlyAct] = field(default_factory=list)
    """Acts of the engine that wait for a receiver."""
    _receiver: StreamReceiver | None = None
    _found: "Resumption | None" = None
    """The search for the next engine; meanwhile nothing more of the last one counts."""
    _write: ChunkWriter | None = None
    """Takes events in place of the receiver, if nothing else is done with them."""
    _pieces: int = 0
    """Events after the first, or with a resume log, what arrived with a record or at once with several."""
    _replayed: int = 0
    """Tokens that other engines generated."""
    _is_over: bool = False

    @property
    def endpoint(self) -> EngineEndpoint:
        """The endpoint that answers now."""
        return self.attempt.endpoint

    def attach(self, receiver: StreamReceiver) -> None:
        """Hand the events to the receiver from now on, those that have arrived at once."""
        self._receiver = receiver
        self.attempt.resume()
        first, self.first = self.first, b""
        if first:
            self.last = first
            receiver.on_events(first)
        # What arrived meanwhile: more events, and the error with which the engine gave up after them.
        early, self.early = self.early, []
        for act, values in early:
            act(self, *values)
        self._write = receiver.chunk_writer()

    def pause(self) -> None:
        """Read no more for now, because the client reads too slowly."""
        self.attempt.pause()

    def resume(self) -> None:
        """Read again."""
        self.attempt.resume()

    def feed(self, piece: bytes) -> None:
        """Take a piece of a response that no other engine can continue."""
        receiver = self._receiver
        if receiver is None:
            self.early.append((EngineStream.feed, (piece,)))
            return
        if self._is_over or self._found is not None:
            return
        if self.rest or not piece.endswith(b"\n\n"):
            piece, self.rest = split_events(self.rest, piece)
            if not piece:
                return
        # Most pieces hold one event, and `find` costs half of `count`.
        is_single = piece.find(b"\n\n") == len(piece) - 2
        self._pieces += 1 if is_single else piece.count(b"\n\n")
        self._pass(receiver, piece)

    def feed_recorded(self, events: bytes, records: list[bytes]) -> None:
        """Take whole events and their resume records."""
        receiver = self._receiver
        if receiver is None:
            self.early.append((EngineStream.feed_recorded, (events, records)))
            return
        if self._is_over or self._found is not None:
            return
        if self.resume_log is not None:
            for record in records:
                self.resume_log.add(record)
        self._pieces += 1
        if events:
            self._pass(receiver, events)

    def _pass(self, receiver: StreamReceiver, events: bytes) -> None:
        self.last = events
        if self._write is None:
            receiver.on_events(events)
        else:
            self._write(b"".join((SIZE_LINES[len(events)], events, CHUNK_END)))

    def close(self) -> None:
        """Release the stream, complete or not. May be called again."""
        if not self._is_over:
            self._is_over = True
            if self.resume_log is not None:
                self.attempt.state.usage = self.resume_log.usage()
        self.attempt.close()

    def finish(self) -> None:
        """Take the end of the engine's response."""
        if self._receiver is None:
            self.early.append((EngineStream.finish, ()))
        elif self._is_over or self._found is not None:
            return
        elif self.resume_log is not None and not self._has_end:
            why = "the engine ended it before its end"
            self.break_off(BrokenResponseError(why, had_bytes=True))
        else:
            whole, self.rest = self.rest, b""
            self._record_end(self.last + whole)
            if whole:
                self._receiver.on_events(whole)
            self._receiver.on_stream_end()

    def break_off(self, error: BrokenResponseError) -> None:
        """Take the death of the engine: search another one, unless the client has everything."""
        receiver, self.rest = self._receiver, b""
        if receiver is None:
            self.early.append((EngineStream.break_off, (error,)))
            return
        if self._is_over or self._found is not None:
            return
        if self._has_end:
            self._record_end(self.last)
            receiver.on_stream_end()
            return
        self._record_broken(self.attempt.interrupt(error), str(error))
        self.attempt.close()
        try:
            if self.continuation is None:
                raise error
            self._found = self.continuation.search(self, error)
        except BrokenResponseError as final:
            receiver.on_stream_broken(final)
        else:
            receiver.on_engine_died()

    @property
    def _has_end(self) -> bool:
        """Return whether the client has the stream's last event."""
        return self.last.endswith(DONE) or response_summary.is_response_end(self.last)

    def suspend(self) -> bool:
        """Free the engine, to continue later with `find_next`; return False if the stream cannot be continued."""
        receiver = self._receiver
        if (
            self._is_over
            or self._found is not None
            or self.continuation is None
            or receiver is None
        ):
            return False
        why = "its client reads nothing while other requests wait"
        error = SuspendedError(why, had_bytes=True)
        try:
            self._found = self.continuation.search(self, error)
        except BrokenResponseError:
            return False
        self.rest = b""
        self._record_broken("suspended", why)
        self.attempt.is_counted = True  # the engine that ends the stream is counted
        self.attempt.close()
        receiver.on_suspended()
        return True

    def refuse(self, last_event: bytes) -> None:
        """Take the error with which the engine ends the stream, as any other engine would."""
        if self._receiver is None:
            self.early.append((EngineStream.refuse, (last_event,)))
        elif not self._is_over and self._found is None:
            self._record_end(last_event)
            self._receiver.on_events(last_event)
            self._receiver.on_stream_end()

    def _record_end(self, last: bytes) -> None:
        """Record the end of the stream and its usage."""
        self._is_over = True
        usage = parse_usage(last) if self.resume_log is None else self.resume_log.usage()
        if usage is not None:
            self.attempt.state.usage = usage
        # Without a usage they are the events, without the finish reason and [DONE].
        tokens = self._pieces - 2 if usage is None else usage[2] - self._replayed - 1
        count = tokens if self._pieces else 0
        broken = self.attempt.record_end(count, last)
        if broken:
            self.is_whole = False
            self._record_broken(broken, response_summary.stream_error(last))

    def _record_broken(self, outcome: str, why: str) -> None:
        self.attempt.state.record_broken(self.endpoint, outcome, why)

    async def find_next(self) -> bool:
        """Search an engine that continues the stream; return False if a keep-alive event is due.

        `attach` must follow once there is one.

        Raises:
            BrokenResponseError: no engine continues it.

        """
        search, resume_log = self._found, self.resume_log
        assert search is not None
        assert resume_log is not None
        stream = await search.step()
        if stream is None:
            return False
        for record in stream.records:
            resume_log.add(record)
        self.first, self.attempt, self.early = stream.first, stream.attempt, stream.early
        self.attempt.stream, self._receiver, self._found = self, None, None
        self._pieces, self._replayed = 0, search.resume_point.tokens
        return True
