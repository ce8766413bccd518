"""A request at an engine: counted as its load until it is closed, and once for its version."""

from dataclasses import dataclass

from gateway.carry.loads import Loads
from gateway.routing.table import Target
from gateway.upstream.pool import Answer
from gateway.watch.usage import Tokens
from gateway.watch.versions import Version


@dataclass(slots=True)
class Held:
    """A request at an engine, counted as its load until it is closed, and once for its version."""

    target: Target
    asked_s: float
    _loads: Loads
    _version: Version
    until_s: float = float("inf")
    """When its client wants it no more: it is not the engine's fault then that it ends."""
    answer: Answer | None = None
    _first_s: float = 0.0
    is_counted: bool = False
    """Whether it is known how it ended."""
    _is_closed: bool = False

    def begun(self, now_s: float) -> None:
        """Note that a stream's first event is there."""
        self._version.first_token(now_s - self.asked_s)
        self._first_s = now_s

    def ended(self, lines: int, last: bytes, now_s: float) -> None:
        """Note that a stream came to its end, so many lines after the first event."""
        self._version.streamed(lines, last, now_s - self._first_s)
        self.is_counted = True

    def answered(self, status: int, body: bytes, now_s: float) -> Tokens:
        """Note an answer that was not streamed; return the tokens that it took."""
        self.is_counted = True
        return self._version.answered(status, body, now_s - self.asked_s)

    def failed(self) -> None:
        """Note that the engine did not answer, or died in the middle of it."""
        self._version.error += 1
        self.is_counted = True

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
