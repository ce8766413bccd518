"""Embeddings and scores: turns sequences into vectors, a limited number of tokens at a time. No I/O, no clock.

Sequences of all requests are read together, padded on the right. The hidden states of a causal model do not depend on
later tokens, so each vector is the same as if its sequence were read alone. A sequence that is too long for one step is
read in pieces, through a cache. A failure costs the embedding requests in this queue, and no generation.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engine.errors import summarize
from engine.jobs import EmbeddingOutput, EmbedJob, JobFailure, WorkerEvent
from engine.model import pooler
from engine.model.pooler import PoolerConfig
from models.model_files import ModelUnusableError

Array: TypeAlias = Any  # mlx ships no types

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _QueuedText:
    job_id: int
    at: int
    """Index of the text in its job."""
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _TextBatch:
    """Texts that are read side by side, and the progress."""

    texts: list[_QueuedText]
    caches: list[Any]
    sums: Array
    """Shape (texts, width): the vectors of the tokens read so far."""
    column: int = 0
    """Number of columns read so far."""

    @property
    def columns(self) -> int:
        """The length of the longest text."""
        return max(len(text.tokens) for text in self.texts)


class Embedder:
    """The embedding jobs that run now, first come first served."""

    def __init__(self, model: Any, pooling: PoolerConfig) -> None:
        self._model = model
        inner_model = getattr(getattr(model, "language_model", model), "model", None)
        if inner_model is None:
            kind = type(model).__module__.rpartition(".")[2]
            raise ModelUnusableError(
                f"mlx-lm does not show the hidden states of its model type {kind}"
            )
        self._inner = inner_model
        self._pooling = pooling
        self._score = None if pooling.score is None else model.score
        self._vectors: dict[int, dict[int, bytes]] = {}  # by job and text: the finished vectors
        self._counts: dict[int, int] = {}  # by job: the number of its texts
        self._waiting: deque[_QueuedText] = deque()
        self._reading: _TextBatch | None = None

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return not self._counts

    def add(self, job: EmbedJob) -> None:
        """Add a job to the queue."""
        self._vectors[job.id], self._counts[job.id] = {}, len(job.prompts)
        texts = [_QueuedText(job.id, at, tokens) for at, tokens in enumerate(job.prompts)]
        # Neighbours of equal length need no padding.
        self._waiting += sorted(texts, key=lambda text: len(text.tokens))

    def remove(self, job_id: int) -> None:
        """Remove a job, if it is in the queue."""
        if self._counts.pop(job_id, None) is None:
            return
        del self._vectors[job_id]
        self._waiting = deque(text for text in self._waiting if text.job_id != job_id)
        if self._reading and all(text.job_id not in self._counts for text in self._reading.texts):
            self._reading = None

    def step(self, tokens: int) -> list[WorkerEvent]:
        """Read about `tokens` tokens, padding included; return the jobs that this finishes."""
        if self.is_idle:
            return []
        try:
            reading = self._reading or self._begin(tokens)
            most = max(1, tokens // len(reading.texts))
            columns = min(most, reading.columns - reading.column)
            hidden = self._inner(
                mx.array(_pad_texts(reading.texts, reading.column, columns)), cache=reading.caches
            )
            lengths = [len(text.tokens) for text in reading.texts]
            weights = pooler.weights(
                self._pooling.mode, lengths, start=reading.column, columns=columns
            )
            part = mx.array(weights)[:, None, :] @ hidden.astype(mx.float32)
            reading.sums = reading.sums + part[:, 0]
            reading.column += columns
            # Evaluate the caches as well: otherwise their part of this piece is computed with the next one.
            mx.eval(reading.sums, [cache.state for cache in reading.caches])
        except Exception as error:
            # Whatever the error was, it did not touch the caches of generating jobs.
            log.exception("embedding step failed", extra={"jobs": len(self._counts)})
            why = summarize(error)
            lost = list(self._counts)
            for job_id in lost:
                self.remove(job_id)
            self._reading = None
            return [JobFailure(job_id=job_id, reason=why) for job_id in lost]
        if reading.column < reading.columns:
            self._reading = reading
            return []
        self._reading = None
        return self._finished(reading)

    def _begin(self, tokens: int) -> _TextBatch:
        texts: list[_QueuedText] = []
        longest = 0
        while self._waiting:
            longest = max(longest, len(self._waiting[0].tokens))
            if texts and (len(texts) + 1) * longest > tokens:
                break
            texts.append(self._waiting.popleft())
        sums = mx.zeros((len(texts), self._pooling.width))
        return _TextBatch(texts, make_prompt_cache(self._model), sums)

    def _finished(self, reading: _TextBatch) -> list[WorkerEvent]:
        if self._score is not None and self._pooling.score is not None:
            logits = self._score(reading.sums).astype(mx.float32)
            vectors = pooler.activate(np.array(logits), self._pooling.score)
        else:
            vectors = np.array(reading.sums)
        if self._pooling.is_normalized:
            vectors = pooler.normalize(vectors)
        events: list[WorkerEvent] = []
        for text, vector in zip(reading.texts, vectors, strict=True):
            if text.job_id not in self._counts:
                continue
            vectors_of_job = self._vectors[text.job_id]
            vectors_of_job[text.at] = vector.astype("<f4").tobytes()
            if len(vectors_of_job) == self._counts[text.job_id]:
                self.remove(text.job_id)
                ordered = tuple(vectors_of_job[at] for at in range(len(vectors_of_job)))
                events.append(EmbeddingOutput(job_id=text.job_id, vectors=ordered))
        return events


def _pad_texts(texts: Sequence[_QueuedText], start: int, columns: int) -> list[list[int]]:
    # Any padding token will do: earlier tokens do not attend to it.
    pieces = [text.tokens[start : start + columns] for text in texts]
    return [[*piece, *[0] * (columns - len(piece))] for piece in pieces]
