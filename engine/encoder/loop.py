"""The loop of encoders: one batch of whole texts at a time, fair between requests. Worker thread only; imports mlx.

Texts attend in both directions, so each is read whole, and padding is masked. A failure costs the jobs of one batch.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.batch.text_queue import QueuedText, TextQueue
from engine.encoder.transformer import Encoder
from engine.errors import summarize
from engine.gauges import Gauges
from engine.jobs import EmbedJob, Job, SpeechJob, WorkerEvent
from engine.memory import allocation
from engine.model import pooler
from engine.model.pooler import PoolerConfig
from machinery.clock import Clock

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EncoderLoop:
    """The jobs that run now. Implements `JobRunner`."""

    encoder: Encoder
    pooling: PoolerConfig
    batch_tokens: int
    """Tokens of a batch, padding included; no text is longer."""
    gauges: Gauges
    clock: Clock
    _queue: TextQueue = field(default_factory=TextQueue)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return self._queue.is_idle

    def add(self, job: Job | EmbedJob | SpeechJob) -> None:
        """Add a job at the next step."""
        assert isinstance(job, EmbedJob)
        self._queue.add(job)

    def remove(self, job_id: int) -> None:
        """Remove a job, if it still runs."""
        self._queue.remove(job_id)

    def step(self) -> Iterator[list[WorkerEvent]]:
        """Compute one batch; yield the jobs that it finishes."""
        texts = self._queue.next_batch(self.batch_tokens)
        if not texts:
            return
        start_s = self.clock.monotonic()
        try:
            results = pooler.encode_vectors(self.encode(texts), self.pooling)
        except Exception as error:
            log.exception("a batch of texts failed", extra={"texts": len(texts)})
            self.gauges.faults += 1
            yield self._queue.fail(texts, summarize(error))
        else:
            yield self._queue.finish(texts, results)
        gauges = self.gauges
        gauges.steps += 1
        gauges.prefill_tokens += sum(len(text.tokens) for text in texts)
        gauges.prefill_seconds += self.clock.monotonic() - start_s
        allocation.read_memory(gauges)
        if self.is_idle:
            allocation.clear_buffers()

    def encode(self, texts: Sequence[QueuedText]) -> npt.NDArray[np.float32]:
        """Return the pooled vectors of texts, or the logits of pairs, one a row."""
        lengths = [len(text.tokens) for text in texts]
        columns = max(lengths)
        padded = mx.array([[*text.tokens, *[0] * (columns - len(text.tokens))] for text in texts])
        hidden = self.encoder(padded, lengths, [text.second_start for text in texts])
        if self.pooling.mode == "cls":
            pooled = hidden[:, 0]
        else:
            weights = pooler.weights(self.pooling.mode, lengths, start=0, columns=columns)
            pooled = (mx.array(weights)[:, None, :] @ hidden.astype(mx.float32))[:, 0]
        if self.pooling.score is not None:
            pooled = self.encoder.score(pooled.astype(hidden.dtype))
        return np.array(pooled.astype(mx.float32))

    def close(self) -> None:
        """Drop all jobs."""
        self._queue = TextQueue()
