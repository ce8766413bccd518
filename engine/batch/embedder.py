"""Embeddings and scores: turns sequences into vectors, a limited number of tokens at a time. No I/O, no clock.

Sequences of all requests are read together, padded on the right. The hidden states of a causal model do not depend on
later tokens, so each vector is the same as if its sequence were read alone. A sequence that is too long for one step is
read in pieces, through a cache; shorter ones take turns with it. A failure costs the jobs of the sequences that were
read together, and no generation.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engine.batch.text_queue import QueuedText, TextQueue
from engine.errors import summarize
from engine.jobs import EmbedJob, WorkerEvent
from engine.model import pooler
from engine.model.pooler import PoolerConfig
from models.model_files import ModelUnusableError

Array: TypeAlias = Any  # mlx ships no types

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TextBatch:
    """Texts that are read side by side, and the progress."""

    texts: tuple[QueuedText, ...]
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
    """The embedding jobs that run now."""

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
        self._queue = TextQueue()
        self._long: _TextBatch | None = None
        """One text that takes several steps."""

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return self._queue.is_idle

    def add(self, job: EmbedJob) -> None:
        """Add a job to the queue."""
        self._queue.add(job)

    def remove(self, job_id: int) -> None:
        """Remove a job, if it is in the queue."""
        self._queue.remove(job_id)
        if self._long is not None and self._long.texts[0].job_id == job_id:
            self._long = None

    def step(self, tokens: int) -> list[WorkerEvent]:
        """Read about `tokens` tokens, padding included; return the jobs that this finishes."""
        if self.is_idle:
            return []
        long = self._long
        # Only one text at a time is longer than a step: each has a cache.
        texts = self._queue.next_batch(tokens, beside=None if long is None else long.texts[0])
        if texts:
            sums = mx.zeros((len(texts), self._pooling.width))
            batch = _TextBatch(texts, make_prompt_cache(self._model), sums)
        else:
            assert long is not None
            batch = long
            self._queue.charge(batch.texts[0], tokens)
        try:
            self._read(batch, tokens)
            if batch.column < batch.columns:
                self._long = batch
                return []
            results = self._results(batch)
        except Exception as error:
            # Whatever the error was, it did not touch the caches of generating jobs.
            log.exception("embedding step failed", extra={"texts": len(batch.texts)})
            failures = self._queue.fail(batch.texts, summarize(error))
            if long is not None and long.texts[0] not in self._queue:
                self._long = None
            return failures
        if batch is long:
            self._long = None
        return self._queue.finish(batch.texts, results)

    def _read(self, batch: _TextBatch, tokens: int) -> None:
        columns = min(max(1, tokens // len(batch.texts)), batch.columns - batch.column)
        hidden = self._inner(
            mx.array(_pad_texts(batch.texts, batch.column, columns)), cache=batch.caches
        )
        lengths = [len(text.tokens) for text in batch.texts]
        weights = pooler.weights(self._pooling.mode, lengths, start=batch.column, columns=columns)
        part = mx.array(weights)[:, None, :] @ hidden.astype(mx.float32)
        batch.sums = batch.sums + part[:, 0]
        batch.column += columns
        # Evaluate the caches as well: otherwise their part of this piece is computed with the next one.
        mx.eval(batch.sums, [cache.state for cache in batch.caches])

    def _results(self, batch: _TextBatch) -> list[bytes]:
        if self._score is None:
            return pooler.encode_vectors(np.array(batch.sums), self._pooling)
        return pooler.encode_vectors(
            np.array(self._score(batch.sums).astype(mx.float32)), self._pooling
        )


def _pad_texts(texts: Sequence[QueuedText], start: int, columns: int) -> list[list[int]]:
    # Any padding token will do: earlier tokens do not attend to it.
    pieces = [text.tokens[start : start + columns] for text in texts]
    return [[*piece, *[0] * (columns - len(piece))] for piece in pieces]
