"""Time series of the gateway's rates over the last 24 h, in steps of 10 s. Pure; the time is an argument.

It takes 8,640 steps of 8 numbers, 553 kB, allocated at once.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from schemas.wire.metrics import REQUEST_ERRORS

STEP_S = 10
STEPS = 24 * 3600 // STEP_S
_REQUESTS, _ERRORS, _WHOLE_S, _STREAMS, _FIRST_S, _PROMPT, _OUTPUT, _QUEUED_S = range(8)
_WIDTH = 8
# Steps by which clocks of machines may differ.
_AHEAD = 6


class FinishedRequest(Protocol):
    """The figures of a finished request; times in seconds."""

    @property
    def time_s(self) -> float: ...

    @property
    def whole_s(self) -> float: ...

    @property
    def first_s(self) -> float: ...

    @property
    def queued_s(self) -> float: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def outcome(self) -> str: ...


@dataclass(frozen=True, slots=True)
class IntervalSums:
    """Sums over an interval."""

    seconds: float
    requests: float = 0.0
    errors: float = 0.0
    """Requests with the outcome unavailable, failed or interrupted."""
    whole_s: float = 0.0
    streams: float = 0.0
    first_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    queued_s: float = 0.0

    def since(self, begin_s: float, since_s: float) -> "IntervalSums | None":
        """Return the sums without the unmeasured time before `since_s`; None if nothing remains."""
        unseen_s = since_s - begin_s
        if unseen_s <= 0:
            return self
        return None if unseen_s >= self.seconds else replace(self, seconds=self.seconds - unseen_s)


def _mean_ms(total_s: float, count: float) -> float | None:
    return round(total_s / count * 1000, 3) if count else None


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 4) if seconds else 0.0


SERIES_METRICS: Mapping[str, tuple[str, Callable[[IntervalSums], float | None]]] = MappingProxyType(
    {
        "rps": ("requests/s", lambda s: _rate(s.requests, s.seconds)),
        "latency": ("ms", lambda s: _mean_ms(s.whole_s, s.requests)),
        "first_token": ("ms", lambda s: _mean_ms(s.first_s, s.streams)),
        "queue_time": ("ms", lambda s: _mean_ms(s.queued_s, s.requests)),
        "tokens_per_second": ("tokens/s", lambda s: _rate(s.output_tokens, s.seconds)),
        "prompt_tokens_per_second": ("tokens/s", lambda s: _rate(s.prompt_tokens, s.seconds)),
        "error_rate": ("ratio", lambda s: round(s.errors / s.requests, 4) if s.requests else None),
    }
)
"""The unit of each figure and its computation from sums; None if there was nothing to measure."""


class RateSeries:
    """Sums by step. A step is complete once a later one has begun; missing steps are 0."""

    def __init__(self) -> None:
        self._numbers = array("d", bytes(8 * STEPS * _WIDTH))
        self._last = -1
        """The latest step with data, counted from 1970."""
        self._step = -1
        """The step that is added to."""
        self._now = [0.0] * _WIDTH
        """Its sums; adding to an array would take twice as long."""

    def add(self, entry: FinishedRequest) -> None:
        """Count a finished request."""
        self.extend((entry,))

    def extend(self, entries: Iterable[FinishedRequest]) -> None:
        """Count finished requests, each for the step in which it ended; nothing that ended before all steps."""
        now = self._now
        for entry in entries:
            whole_s, first_s, queued_s = entry.whole_s, entry.first_s, entry.queued_s
            step = int(entry.time_s + whole_s) // STEP_S
            if step != self._step:
                self._move(step)
                now = self._now
            now[_REQUESTS] += 1.0
            now[_WHOLE_S] += whole_s
            now[_OUTPUT] += entry.output_tokens
            now[_PROMPT] += entry.prompt_tokens
            if first_s:
                now[_STREAMS] += 1.0
                now[_FIRST_S] += first_s
            if queued_s:
                now[_QUEUED_S] += queued_s
            if entry.outcome != "ok" and entry.outcome in REQUEST_ERRORS:
                now[_ERRORS] += 1.0

    def add_totals(self, begin_s: int, seconds: int, totals: Sequence[float]) -> None:
        """Add the sums of an interval, in the order of IntervalSums, spread evenly over its steps.

        For sums that were kept elsewhere; intervals come in order.
        """
        steps = max(1, seconds // STEP_S)
        for step in range(begin_s // STEP_S, begin_s // STEP_S + steps):
            if step != self._step:
                self._move(step)
            for place, number in enumerate(totals):
                self._now[place] += number / steps

    def points(
        self, time_s: float, duration_s: float, most: int
    ) -> Iterator[tuple[int, IntervalSums]]:
        """Yield the start and the sums of at most `most` intervals within the last `duration_s`, oldest first."""
        last = int(time_s) // STEP_S
        steps = min(STEPS - 1, max(1, int(duration_s) // STEP_S))
        width = -(-steps // most)
        for begin in range(last - steps, last, width):
            end = min(begin + width, last)
            yield begin * STEP_S, self._sums(begin, end, (end - begin) * STEP_S)

    def over(self, time_s: float, duration_s: float) -> IntervalSums:
        """Return the sums of the last `duration_s`, up to now."""
        last = int(time_s) // STEP_S
        steps = min(STEPS - 1, max(1, int(duration_s) // STEP_S))
        part_s = time_s - last * STEP_S
        return self._sums(last - steps, last + 1, steps * STEP_S + part_s)

    def fastest(self, time_s: float) -> float:
        """Return the largest output tokens per second of any step in the last 24 h."""
        last = int(time_s) // STEP_S
        self._store()
        parts = self._parts(last - STEPS + 1, last + 1)
        most = (max(self._numbers[a + _OUTPUT : b : _WIDTH]) for a, b in parts)
        return max(most, default=0.0) / STEP_S

    def _sums(self, begin: int, end: int, seconds: float) -> IntervalSums:
        self._store()
        parts = self._parts(begin, end)
        found = (
            sum(sum(self._numbers[a + place : b : _WIDTH]) for a, b in parts)
            for place in range(_WIDTH)
        )
        return IntervalSums(seconds, *found)

    def _parts(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the array that hold the steps from `begin` up to `end`."""
        # Later steps do not exist yet, and earlier ones are overwritten.
        first, after = max(begin, self._last - STEPS + 1, 0), min(end, self._last + 1)
        if first >= after:
            return ()
        low, high = first % STEPS * _WIDTH, ((after - 1) % STEPS + 1) * _WIDTH
        return ((low, high),) if low < high else ((low, STEPS * _WIDTH), (0, high))

    def _move(self, step: int) -> None:
        """Add to another step from now on: a new one, or one that is kept."""
        self._store()
        if self._last < 0 or step - self._last >= STEPS:
            self._numbers = array("d", bytes(8 * STEPS * _WIDTH))
        else:
            self._clear(self._last + 1, step + 1)
        self._last = max(self._last, step)
        if step <= self._last - STEPS or step < 0:
            self._step, self._now = -1, [0.0] * _WIDTH
            return
        base = step % STEPS * _WIDTH
        self._step, self._now = step, self._numbers[base : base + _WIDTH].tolist()

    def set_back(self, time_s: float) -> None:
        """Forget the steps after a time if they are more than a minute after it: the clock was set back."""
        step = int(time_s) // STEP_S
        if self._last - step <= _AHEAD:
            return
        self._store()
        self._clear(max(step + 1, self._last - STEPS + 1), self._last + 1)
        self._step, self._now, self._last = -1, [0.0] * _WIDTH, step

    def _clear(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            base = step % STEPS * _WIDTH
            self._numbers[base : base + _WIDTH] = array("d", bytes(8 * _WIDTH))

    def _store(self) -> None:
        if self._step >= 0:
            base = self._step % STEPS * _WIDTH
            self._numbers[base : base + _WIDTH] = array("d", self._now)
