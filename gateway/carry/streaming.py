"""A stream on its way from engines: whole events, as they come, without marks. Sends nothing and chooses nobody."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.carry import marks
from gateway.carry.held import Held
from gateway.carry.marks import Tape
from gateway.routing.table import Target
from gateway.upstream.exchange import BrokenError, Headers
from gateway.upstream.pool import Answer
from gateway.upstream.sse import whole_events
from gateway.watch import endings
from gateway.watch.usage import Tokens, usage
from machinery.clock import Clock

WAITING = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
# Of the last chunk, if there is one after all text: with the usage.
_NO_CHOICES = b'"choices":[]'
# Events of streams with marks are never passed on in parts; the largest are bursts of likelihoods for slow readers.
_LARGEST = 16 << 20


class Search(Protocol):
    """A search for another engine that goes on with a stream."""

    @property
    def is_finished(self) -> bool:
        """Whether the client was told already why the answer is over."""
        ...

    async def step(self) -> "Streaming | None":
        """Return the rest of the stream; None if the client should hear that it is being waited for.

        Raises:
            BrokenError: nobody goes on with it.

        """
        ...


class Taker(Protocol):
    """Who wants to know what an answer took, and who broke off."""

    def took(self, tokens: Tokens) -> None:
        """Note the tokens of the prompt, those of it that were cached, and of the answer."""
        ...

    def broke(self, target: Target, outcome: str, why: str) -> None:
        """Note that an engine which had begun to answer did not do so to the end."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Streaming:
    """A stream whose first event is there; the receiver closes it."""

    held: Held
    answer: Answer
    first: bytes
    rest: bytes
    """The beginning of the next event."""
    clock: Clock
    interrupted: Callable[[Held, BrokenError], str]
    """Called when an engine dies; says what came of the attempt in a word."""
    taker: Taker
    tape: Tape | None = None
    """Its marks, if it has any."""
    search: Callable[["Streaming", BrokenError], Search] | None = None
    """Begins the search for another engine, or raises what it is given."""
    is_resumed: bool = False
    is_whole: bool = True
    """Whether no engine ended it with an error that is for the client; known at the end."""
    _found: Search | None = None
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
    def target(self) -> Target:
        """Who answers now."""
        return self.held.target

    def watch(
        self, tape: Tape, search: Callable[["Streaming", BrokenError], Search] | None
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
                    whole, self.rest = whole_events(self.rest, piece)
                    if whole:
                        # Most pieces are one event, and finding costs half of counting.
                        is_one = whole.find(b"\n\n") == len(whole) - 2
                        self._events += 1 if is_one else whole.count(b"\n\n")
                else:
                    whole, self.rest = whole_events(self.rest, piece, _LARGEST)
                    whole = self.tape.take(whole) if whole else whole
                if whole:
                    self._last = whole
                    return whole
            except BrokenError as error:
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
            raise BrokenError("the engine ended it before its end", had_bytes=True)
        whole, self.rest = self.rest, b""
        self._count(self._last + whole)
        return whole

    def _last_words(self, fault: bytes) -> bytes:
        """Return the error with which the engine ended it, if that is for the client.

        Raises:
            BrokenError: another engine may do better.

        """
        why, is_resumable = marks.error_of(fault)
        if is_resumable:
            raise BrokenError(why, had_bytes=True)
        event = fault + b"\n\n"
        self._count(event)
        return event

    def _count(self, last: bytes) -> None:
        """Note that there is no more, and what it took."""
        self._is_over = True
        end = last if self.tape is None else self.tape.last()
        if found := usage(end):
            self.taker.took(found)
        # Of a resumed one, the tokens were not all made in the time since.
        told = last if self.is_resumed else end + last
        count = self._events if self.tape is None else self.tape.events - self._events
        broken = self.held.ended(2 * count, told, self.clock.monotonic())
        if broken:
            self.is_whole = False
            self.taker.broke(self.held.target, broken, endings.why(last))

    def _broken(self, error: BrokenError) -> None:
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

    async def _goes_on(self, search: Search) -> bool:
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
