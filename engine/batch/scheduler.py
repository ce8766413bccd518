"""Prompt scheduling: picks the prompts that a step reads, and how many of their tokens. Pure: no mlx, no clock.

Speeds arrive as arguments. A new prompt waits for the piece that is being read, and running streams wait for the pieces
between two of their tokens, so pieces are sized by time and not by a fixed number of tokens. A prompt that begins like
one in progress waits for it and then takes the shared part from the prefix cache. This makes a burst of requests with
one long common prefix cheap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.batch.step_plan import LARGEST_CHUNK, STORE_EVERY, PromptChunk
from engine.jobs import Job

Tokens = npt.NDArray[np.int64]

# Pieces of prompts may stall streams for the time of this many of their own tokens, within these bounds: a stall
# under a quarter of a second goes unnoticed, one above a second is noticed by every client.
_STALL_STEPS, _STALL_MIN_S, _STALL_MAX_S = 3.0, 0.25, 1.0
# The same while more prompts wait than sequences run: then decoding costs at most a seventeenth of the time.
_CROWD_STEPS, _CROWD_MIN_S, _CROWD_MAX_S = 16.0, 0.5, 2.0
# A piece takes as long as this many tokens of a stream; twice that while no other request would wait for its end. Each
# pass reads all weights, so small pieces are slow: a piece has a least time, and the end of a prompt is read with the
# piece before it unless it is longer than half of a piece.
_PIECE_STEPS, _PIECE_MIN_S, _PIECE_MAX_S = 4.0, 0.25, 1.0
_LONGEST_END = 1.5
# Small passes are slow: SmolLM2-135M on a CPU reads 302 tokens a second of 64, 378 of 256, 445 of 512 and 428 of 1,024.
# Several prompts are read in passes of at least so many tokens, and those of a crowd, within the longest times. Prompts
# that are read one by one also end one by one, and the last steps of decoding have few rows.
_SHARED_PIECE, _CROWD_PIECE = 256, 512
_SMALLEST_CHUNK = 32
# Prompts are read together if padding wastes at most this share of the work.
_WASTE = 0.25
# The number of waiting prompts that one step considers.
_CANDIDATES = 16
# The least work of a prompt as a share of a piece: it joins the batch, and its first token needs a step.
_LEAST_SHARE = 1 / _PIECE_STEPS
# The number of shared tokens that is worth waiting for.
_WORTH_WAITING = 32


@dataclass(slots=True, kw_only=True)
class StepSpeed:
    """Recent speeds, as moving averages."""

    decode_s: float = 0.05
    """Seconds that a decode step of all sequences takes."""
    prefill_tokens_per_s: float = 200.0

    def record_decode(self, seconds: float) -> None:
        """Add a decode step to the average."""
        self.decode_s += 0.2 * (seconds - self.decode_s)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Add a piece of a prompt to the average; ignore tiny pieces, whose speed means little."""
        if tokens >= _SMALLEST_CHUNK and seconds > 0:
            self.prefill_tokens_per_s += 0.3 * (tokens / seconds - self.prefill_tokens_per_s)

    def chunk_tokens(self, *, running: int, waiting: int, factor: float = 1.0) -> int:
        """Return how many prompt tokens the next step may read; a `factor` below 1 saves memory."""
        largest = max(_SMALLEST_CHUNK, int(LARGEST_CHUNK * factor))
        seconds, most_s = max(_PIECE_STEPS * self.decode_s, _PIECE_MIN_S), _PIECE_MAX_S
        if running + waiting <= 1:
            seconds *= 2
        elif waiting > running:
            stall_s = self.stall_s(running=running, waiting=waiting)
            efficient_s = _CROWD_PIECE / self.prefill_tokens_per_s
            seconds, most_s = max(seconds, stall_s / 2, efficient_s), _CROWD_MAX_S
        elif waiting > 1:
            seconds = max(seconds, _SHARED_PIECE / self.prefill_tokens_per_s)
        tokens = int(self.prefill_tokens_per_s * min(seconds, most_s))
        return min(max(tokens, _SMALLEST_CHUNK), largest)

    def stall_s(self, *, running: int, waiting: int) -> float:
        """Return the time for which prompts may be read between two tokens of the `running` sequences.

        While more prompts wait than that (a crowd), reading goes first: a decode step of a few rows costs nearly as
        much as one of all rows.
        """
        if waiting > running:
            return min(max(_CROWD_STEPS * self.decode_s, _CROWD_MIN_S), _CROWD_MAX_S)
        return min(max(_STALL_STEPS * self.decode_s, _STALL_MIN_S), _STALL_MAX_S)


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedPrompt:
    """A job whose prompt is not read completely."""

    job: Job
    tokens: Tokens
    """All tokens to read before the first new one, without the last: decoding that one makes the new token."""
    position: int = 0
    """Tokens read so far."""
    is_open: bool = False
    """True if reading has begun."""
    pace: float = 1.0
    """Speed of its last piece as a share of the average: attention over a long beginning takes most of the time."""
    matched: tuple[int, int] = (-1, 0)
    """(version of the prefix cache, number of tokens it holds of this prompt)."""

    @classmethod
    def of(cls, job: Job) -> "QueuedPrompt":
        """Return a new job's prompt."""
        return cls(job=job, tokens=np.array(job.cache_tokens[:-1], dtype=np.int64))


class MemoryGate(Protocol):
    """Memory admission of jobs (memory/guard.py)."""

    def may_join(self, job: Job, /) -> bool:
        """Return whether there is memory for one more job until it ends."""
        ...

    def reserve(self, job: Job) -> None:
        """Reserve that memory for the job."""
        ...


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Prompts in order of arrival; a short prompt need not wait for the whole of a long one."""

    match: Callable[[Sequence[int], str], int]
    """Returns the number of tokens that the prefix cache holds of a prompt with a salt."""
    memory: MemoryGate
    waiting: list[QueuedPrompt] = field(default_factory=list)
    _version: int = 0
    _ahead: float = 0.0
    """Pieces of other prompts that were read before the oldest one, and that it has not made up for."""

    def add(self, job: Job) -> None:
        """Add a new job."""
        self.waiting.append(QueuedPrompt.of(job))

    def add_first(self, job: Job) -> None:
        """Add a job that gave up its memory, before those that never had any."""
        self.waiting.insert(0, QueuedPrompt.of(job))

    def remove(self, job_id: int) -> bool:
        """Remove a job; return whether it was waiting."""
        before = len(self.waiting)
        self.waiting = [prompt for prompt in self.waiting if prompt.job.id != job_id]
        return len(self.waiting) < before

    def note_cache_change(self) -> None:
        """Note that the prefix cache holds new tokens."""
        self._version += 1

    def set_position(self, job_id: int, position: int, pace: float = 1.0) -> None:
        """Set how many tokens of a prompt are read, those from the prefix cache included, and its pace."""
        for prompt in self.waiting:
            if prompt.job.id == job_id:
                prompt.position, prompt.is_open, prompt.pace = position, True, min(pace, 1.0)

    def next_chunks(self, budget: int) -> tuple[PromptChunk, ...]:
        """Return the pieces to read now, of at most `budget` tokens including padding; () if none may be read.

        A prompt that ends soon after is read to its end. A prompt that its piece completes leaves the queue. For the others the caller calls `set_position`.
        """
        candidates = self._candidates()
        if not candidates:
            return ()
        first = self._first(candidates)
        self._open(first)
        remaining = self._remaining(first)
        piece = max(int(budget * first.pace), min(budget, _SMALLEST_CHUNK))
        if remaining > max(piece, min(_LONGEST_END * piece, LARGEST_CHUNK)):
            self._count_ahead(candidates[0], [first], piece)
            return (PromptChunk(job_id=first.job.id, count=piece, is_last=False),)
        chosen = [first]
        for prompt in candidates:
            if prompt is not first and self._fits(prompt, chosen, budget):
                self._open(prompt)
                chosen.append(prompt)
        chunks = tuple(
            PromptChunk(job_id=prompt.job.id, count=self._remaining(prompt), is_last=True)
            for prompt in chosen
        )
        self._count_ahead(candidates[0], chosen, budget)
        done = {prompt.job.id for prompt in chosen}
        self.waiting = [prompt for prompt in self.waiting if prompt.job.id not in done]
        return chunks

    def _open(self, prompt: QueuedPrompt) -> None:
        if not prompt.is_open:
            self.memory.reserve(prompt.job)

    def _first(self, candidates: Sequence[QueuedPrompt]) -> QueuedPrompt:
        """Return the prompt with the fewest remaining tokens, as long as the oldest one gets half of the work."""
        oldest = candidates[0]
        if self._ahead >= 1:
            return oldest
        return min(candidates, key=self._remaining)

    def _count_ahead(
        self, oldest: QueuedPrompt, chosen: Sequence[QueuedPrompt], budget: int
    ) -> None:
        """Count what others than the oldest prompt get, and what it gets itself."""
        if oldest in chosen:
            self._ahead = max(0.0, self._ahead - 1)
            return
        share = sum(self._remaining(prompt) for prompt in chosen) / budget
        self._ahead += min(max(share, _LEAST_SHARE), 1.0)

    def _fits(self, prompt: QueuedPrompt, chosen: Sequence[QueuedPrompt], budget: int) -> bool:
        """Return whether the prompt can be completed beside the chosen ones without much padding."""
        if not (prompt.is_open or self.memory.may_join(prompt.job)):
            return False
        lengths = [self._remaining(each) for each in (*chosen, prompt)]
        padded = max(lengths) * len(lengths)
        if padded > budget or padded - sum(lengths) > _WASTE * padded:
            return False
        return not any(self._shares(prompt, each) for each in chosen)

    def _candidates(self) -> list[QueuedPrompt]:
        """Return the prompts that may be read now, oldest first; at most `_CANDIDATES` of a long queue."""
        queued_prompts = [queued_prompt for queued_prompt in self.waiting if queued_prompt.is_open]
        for one in self.waiting:
            if one.is_open:
                continue
            if len(queued_prompts) >= _CANDIDATES or not self.memory.may_join(one.job):
                break  # prompts behind it must not take the memory that it waits for
            if not any(self._shares(one, other) for other in queued_prompts):
                queued_prompts.append(one)
        order = {id(one): at for at, one in enumerate(self.waiting)}
        return sorted(queued_prompts, key=lambda prompt: order[id(prompt)])

    def _shares(self, prompt: QueuedPrompt, other: QueuedPrompt) -> bool:
        """Return whether `other` will soon have read a beginning of `prompt` that is not in the cache yet."""
        if prompt.job.cache_salt != other.job.cache_salt or prompt.job.has_prompt_logprobs:
            return False
        known = max(self._match_tokens(prompt), prompt.position)
        if len(prompt.tokens) - known < _WORTH_WAITING:
            return False
        shared = common_prefix(prompt.tokens, other.tokens)
        # Of what `other` has stored and that the cache does not find, nothing will be found later.
        return shared >= known + _WORTH_WAITING and other.position < shared + STORE_EVERY

    def _remaining(self, prompt: QueuedPrompt) -> int:
        known = prompt.position if prompt.is_open else self._match_tokens(prompt)
        return len(prompt.tokens) - min(known, len(prompt.tokens))

    def _match_tokens(self, prompt: QueuedPrompt) -> int:
        if prompt.job.has_prompt_logprobs:
            return 0  # it is read whole
        if prompt.matched[0] != self._version:
            tokens, salt = prompt.job.cache_tokens, prompt.job.cache_salt
            prompt.matched = (self._version, self.match(tokens, salt))
        return prompt.matched[1]


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return the length of the longest common prefix of two sequences, in tokens."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
