"""The queue of texts that become vectors or scores: which ones are read together, fair between requests. Pure.

The job that has had the fewest tokens goes first, so a short request waits for one batch and not for the 300,000 tokens
of another.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.jobs import EmbeddingOutput, EmbedJob, JobFailure, WorkerEvent

# Texts are read together if the longest is no more than this many times the shortest, and a few tokens: the rest is padding.
_PADDING_FACTOR, _PADDING_TOKENS = 2, 32


@dataclass(frozen=True, slots=True)
class QueuedText:
    """One text of a job."""

    job_id: int
    index: int
    """Its place in the job."""
    tokens: tuple[int, ...]
    second_start: int
    """Index of the first token of the second text of a pair; 0 if there is none."""


@dataclass(slots=True)
class _WaitingJob:
    texts: deque[QueuedText]
    count: int
    served: int
    """Tokens that were read for it, beside the queue's time at which it came."""
    results: dict[int, bytes] = field(default_factory=dict)


class TextQueue:
    """The embedding jobs that run now, in self-clocked fair queueing (Golestani 1994)."""

    def __init__(self) -> None:
        self._jobs: dict[int, _WaitingJob] = {}
        self._now = 0
        """The `served` of the job that was last; without it, ever new jobs would go before an old one."""

    @property
    def is_idle(self) -> bool:
        """True if there is no job."""
        return not self._jobs

    def __contains__(self, text: QueuedText) -> bool:
        """Return whether the job of a text is still wanted."""
        return text.job_id in self._jobs

    def add(self, job: EmbedJob) -> None:
        """Add a job."""
        starts = job.second_starts or (0,) * len(job.prompts)
        texts = [
            QueuedText(job.id, index, tokens, start)
            for index, (tokens, start) in enumerate(zip(job.prompts, starts, strict=True))
        ]
        # Neighbours of equal length need no padding.
        texts.sort(key=lambda text: len(text.tokens))
        self._jobs[job.id] = _WaitingJob(deque(texts), len(texts), self._now)

    def remove(self, job_id: int) -> None:
        """Remove a job, if it is in the queue."""
        self._jobs.pop(job_id, None)

    def next_batch(
        self, tokens: int, *, beside: QueuedText | None = None
    ) -> tuple[QueuedText, ...]:
        """Take texts that have at most `tokens` tokens together, padding included; the first may be longer.

        With `beside`, a long text that is being read, take only short texts of jobs that had fewer tokens than its job.
        """
        limit = None if beside is None else self._jobs[beside.job_id].served
        order = [
            (job.served, job_id)
            for job_id, job in self._jobs.items()
            if job.texts and (limit is None or job.served < limit)
        ]
        heapq.heapify(order)
        batch: list[QueuedText] = []
        shortest = longest = 0
        while order:
            _, job_id = heapq.heappop(order)
            job = self._jobs[job_id]
            size = len(job.texts[0].tokens)
            low, high = min(shortest or size, size), max(longest, size)
            is_padded = high > _PADDING_FACTOR * low + _PADDING_TOKENS
            if (batch or limit is not None) and ((len(batch) + 1) * high > tokens or is_padded):
                continue  # its other texts are no shorter
            batch.append(job.texts.popleft())
            shortest, longest = low, high
            self._serve(job, min(size, tokens))
            if job.texts:
                heapq.heappush(order, (job.served, job_id))
        return tuple(batch)

    def charge(self, text: QueuedText, tokens: int) -> None:
        """Count further tokens that were read of a long text."""
        self._serve(self._jobs[text.job_id], tokens)

    def _serve(self, job: _WaitingJob, tokens: int) -> None:
        job.served += tokens
        self._now = max(self._now, job.served)

    def finish(self, texts: Iterable[QueuedText], results: Sequence[bytes]) -> list[WorkerEvent]:
        """Store the results of texts; return the jobs that this finishes."""
        events: list[WorkerEvent] = []
        for text, result in zip(texts, results, strict=True):
            job = self._jobs.get(text.job_id)
            if job is None:
                continue
            job.results[text.index] = result
            if len(job.results) == job.count:
                del self._jobs[text.job_id]
                ordered = tuple(job.results[index] for index in range(job.count))
                events.append(EmbeddingOutput(job_id=text.job_id, vectors=ordered))
        return events

    def fail(self, texts: Iterable[QueuedText], reason: str) -> list[WorkerEvent]:
        """Remove the jobs of texts; return their failures."""
        lost = dict.fromkeys(text.job_id for text in texts if text in self)
        for job_id in lost:
            del self._jobs[job_id]
        return [JobFailure(job_id=job_id, reason=reason) for job_id in lost]
