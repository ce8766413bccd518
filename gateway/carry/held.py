"""A request at an engine: counted as its load until it is closed, and once for its version."""

from dataclasses import dataclass

from gateway.carry.loads import Loads
from gateway.routing.table import Target
from gateway.upstream.pool import Answer
from gateway.watch import endings
from gateway.watch.usage import Tokens
from gateway.watch.versions import Version

_NEVER = float("inf")
_TIMEOUT = 504


@dataclass(slots=True)
class Held:
    """A request at an engine, counted as its load until it is closed, and once for its version."""

    target: Target
    asked_s: float
    _loads: Loads
    _version: Version
    until_s: float = float("inf")
    """When its client wants it no more: it is not the engine's fault then that it ends."""
    is_clients_time: bool = False
    """Whether the client itself said so, and not the name's `timeouts.request`, which a bad version may be too slow for."""
    answer: Answer | None = None
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
        if endings.is_whole(last):
            self._version.streamed(lines, last, now_s - self._first_s)
            return ""
        is_late = now_s >= self.until_s or (self.until_s < _NEVER and endings.is_timeout(last))
        self._end_early(is_late=is_late)
        return "timed_out" if is_late else "interrupted"

    def answered(self, status: int, body: bytes, now_s: float) -> Tokens:
        """Note an answer that was not streamed; return the tokens that it took."""
        self.is_counted = True
        if status == _TIMEOUT and self.is_timeout(body):
            self._end_early(is_late=True)
            return 0, 0, 0
        return self._version.answered(status, body, now_s - self.asked_s)

    def is_timeout(self, body: bytes) -> bool:
        """Return whether a 504 with this body is the engine's word that the request's own time was up."""
        return self.until_s < _NEVER and endings.is_timeout(body)

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
