"""Which prompt is read next, and how much of it. Pure: no mlx, no clock; speeds arrive as arguments.

Between two tokens of every running stream lies one piece of somebody's prompt, so a piece is sized to a time and
not to a number of tokens. A prompt that begins like one that is being read waits for it, and then takes the
shared part from the prefix cache: that is what makes a burst of requests with one long head cheap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.batch.step_plan import LARGEST_CHUNK, PromptChunk
from engine.jobs import Job

Tokens = npt.NDArray[np.int64]

# A stream may stall for a piece of a prompt as long as for this many of its own tokens, within these bounds: below a
# quarter of a second nobody sees it, above a second everybody does.
_STALL_STEPS, _STALL_MIN_S, _STALL_MAX_S = 3.0, 0.25, 1.0
# While more wait than run; on a GPU a piece of mlx-lm's own length takes as long.
_STALL_CROWD_S = 2.0
_SMALLEST_CHUNK = 16
# Prompts are read together if padding wastes no more than this part of the work.
_WASTE = 0.25
# So many are looked at in one step.
_CANDIDATES = 16
# What is shared has to be worth the wait for it.
_WORTH_WAITING = 32


@dataclass(slots=True, kw_only=True)
class StepSpeed:
    """What was measured lately, as moving averages."""

    decode_s: float = 0.05
    """Seconds a step of all sequences takes."""
    prefill_tokens_per_s: float = 200.0

    def decoded(self, seconds: float) -> None:
        """Learn from a step."""
        self.decode_s += 0.2 * (seconds - self.decode_s)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn from a piece of a prompt; tiny ones say little."""
        if tokens >= _SMALLEST_CHUNK and seconds > 0:
            self.prefill_tokens_per_s += 0.3 * (tokens / seconds - self.prefill_tokens_per_s)

    def chunk(self, *, running: int, waiting: int, factor: float = 1.0) -> int:
        """Return how many tokens of prompts the next step may read; `factor` below 1 spares memory.

        `running` sequences generate; as long as more than those wait to be read, reading comes first: passes for a
        few rows cost nearly as much as passes for all.
        """
        largest = max(_SMALLEST_CHUNK, int(LARGEST_CHUNK * factor))
        if not running:
            return largest
        seconds = min(max(_STALL_STEPS * self.decode_s, _STALL_MIN_S), _STALL_MAX_S)
        if waiting > running:
            seconds = _STALL_CROWD_S
        return min(max(int(self.prefill_tokens_per_s * seconds), _SMALLEST_CHUNK), largest)


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedPrompt:
    """A job whose prompt is not read yet, or in part."""

    job: Job
    tokens: Tokens
    """All that is read before the first new token, its last one excepted: that one makes the new token."""
    read: int = 0
    is_open: bool = False
    matched: tuple[int, int] = (-1, 0)
    """(version of the prefix cache, tokens it would bring)."""

    @classmethod
    def of(cls, job: Job) -> "QueuedPrompt":
        """Return a job that has just come."""
        return cls(job=job, tokens=np.array((job.prompt + job.emitted)[:-1], dtype=np.int64))


class MemoryGate(Protocol):
    """Memory, as far as jobs need it (memory/guard.py)."""

    def may_join(self, job: Job, /) -> bool:
        """Whether there is memory for one more to its end."""
        ...

    def joined(self, job: Job) -> None:
        """Promise it that."""
        ...


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Prompts in the order they came, but a short one need not wait for all of a long one."""

    match: Callable[[Sequence[int]], int]
    """Tokens that the prefix cache would bring."""
    room: MemoryGate
    waiting: list[QueuedPrompt] = field(default_factory=list)
    _version: int = 0
    _turn: int = 0

    def add(self, job: Job) -> None:
        """Take a job that has come."""
        self.waiting.append(QueuedPrompt.of(job))

    def remove(self, job_id: int) -> bool:
        """Forget a job; whether it was here."""
        before = len(self.waiting)
        self.waiting = [one for one in self.waiting if one.job.id != job_id]
        return len(self.waiting) < before

    def stored(self) -> None:
        """Learn that the prefix cache holds something new."""
        self._version += 1

    def has_read(self, job_id: int, position: int) -> None:
        """Learn how far a prompt was read, what the prefix cache had included."""
        for one in self.waiting:
            if one.job.id == job_id:
                one.read, one.is_open = position, True

    def next(self, budget: int) -> tuple[PromptChunk, ...]:
        """Return what to read now, of at most `budget` tokens with their padding; nothing if nobody may.

        A prompt that is read to its end is no longer waiting; of others `has_read` is heard.
        """
        candidates = self._candidates()
        if not candidates:
            return ()
        self._turn += 1
        first = self._first(candidates)
        self._open(first)
        left = self._left(first)
        if left > budget:
            return (PromptChunk(job_id=first.job.id, count=budget, is_last=False),)
        chosen = [first]
        for one in candidates:
            if one is not first and self._fits(one, chosen, budget):
                self._open(one)
                chosen.append(one)
        chunks = tuple(
            PromptChunk(job_id=one.job.id, count=self._left(one), is_last=True) for one in chosen
        )
        done = {one.job.id for one in chosen}
        self.waiting = [one for one in self.waiting if one.job.id not in done]
        return chunks

    def _open(self, one: QueuedPrompt) -> None:
        if not one.is_open:
            self.room.joined(one.job)

    def _first(self, candidates: Sequence[QueuedPrompt]) -> QueuedPrompt:
        """Return the oldest, and every other time the one which is nearest to its end."""
        if self._turn % 2:
            return candidates[0]
        return min(candidates, key=self._left)

    def _fits(self, one: QueuedPrompt, chosen: Sequence[QueuedPrompt], budget: int) -> bool:
        """Whether it can be read to its end beside the others without wasting much on padding."""
        if not (one.is_open or self.room.may_join(one.job)):
            return False
        lengths = [self._left(each) for each in (*chosen, one)]
        padded = max(lengths) * len(lengths)
        if padded > budget or padded - sum(lengths) > _WASTE * padded:
            return False
        return not any(self._shares(one, each) for each in chosen)

    def _candidates(self) -> list[QueuedPrompt]:
        """Return those who may be read now, the oldest first; not all of a long queue, for one step is not that long."""
        found = [one for one in self.waiting if one.is_open]
        for one in self.waiting:
            if one.is_open:
                continue
            if len(found) >= _CANDIDATES or not self.room.may_join(one.job):
                break  # those behind it must not take the memory it waits for
            if not any(self._shares(one, other) for other in found):
                found.append(one)
        order = {id(one): at for at, one in enumerate(self.waiting)}
        return sorted(found, key=lambda one: order[id(one)])

    def _shares(self, one: QueuedPrompt, other: QueuedPrompt) -> bool:
        """Whether `other` will soon have read a beginning of `one` that is in no cache yet."""
        known = max(self._matched(one), one.read)
        if len(one.tokens) - known < _WORTH_WAITING:
            return False
        return common_prefix(one.tokens, other.tokens) >= known + _WORTH_WAITING

    def _left(self, one: QueuedPrompt) -> int:
        known = one.read if one.is_open else self._matched(one)
        return len(one.tokens) - min(known, len(one.tokens))

    def _matched(self, one: QueuedPrompt) -> int:
        if one.matched[0] != self._version:
            one.matched = (self._version, self.match((*one.job.prompt, *one.job.emitted)))
        return one.matched[1]


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
