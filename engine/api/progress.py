"""Signs of progress for gateways, until the response begins.

A gateway gives up an engine that shows no progress for some time, and a place in the queue, a long prompt or an answer
that is not streamed send nothing of the response for minutes. See docs/internals/engine.md, "Signs of progress".
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from starlette.types import Scope

from schemas.wire import headers

WRITE_PROGRESS: Final = "write_progress"
"""The key in an ASGI scope's `state` with the function that sends a sign of progress, with a resume record or none."""
_LEAST_S, _MOST_S = 0.05, 60.0
_ASKED = headers.PROGRESS.encode()
_KEY = "progress_reporter"


class ProgressReporter:
    """Reports the progress of one request to a gateway, at the interval that it wants, as long as the engine advances.

    The engine's progress counts, not the request's: one that waits for a slot, for the prompt before it or for memory
    goes on when its turn comes.
    """

    def __init__(
        self, write: Callable[[bytes], None], progress: Callable[[], int], interval_s: float
    ) -> None:
        self.resume_records: Callable[[], Iterable[bytes]] = tuple
        """Returns the resume records of the tokens since the last call."""
        self._write, self._progress = write, progress
        self._last = progress()
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._timer = self._loop.call_later(interval_s, self._tick)

    @staticmethod
    def of(scope: Scope) -> "ProgressReporter | None":
        """Return the reporter of a request; None if its sender asks for no signs of progress."""
        progress_reporter: ProgressReporter | None = scope.get("state", {}).get(_KEY)
        return progress_reporter

    @classmethod
    def start(cls, scope: Scope, progress: Callable[[], int]) -> "ProgressReporter | None":
        """Begin to report, if the sender of the request asks for it; `close` must follow."""
        write = scope.get("state", {}).get(WRITE_PROGRESS)
        asked = next((value for name, value in scope["headers"] if name == _ASKED), None)
        if write is None or asked is None:
            return None
        try:
            interval_s = min(_MOST_S, max(_LEAST_S, float(asked)))  # NaN is the least
        except ValueError:
            return None
        made = scope["state"][_KEY] = cls(write, progress, interval_s)
        return made

    def close(self) -> None:
        """End the reports: the response begins, or the request is over. May be called again."""
        self._timer.cancel()

    def has_advanced(self) -> bool:
        """Return whether the engine has advanced since the last call."""
        before, self._last = self._last, self._progress()
        return self._last != before

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        if self.has_advanced():
            # One sign for each record, which keeps them small.
            for record in (*self.resume_records(),) or (b"",):
                self._write(record)
