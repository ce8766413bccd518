"""The loop of speech: jobs take turns, a window or a sentence each. Worker thread only.

A failure costs one job. There is no batch: a window fills the device already.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.errors import summarize
from engine.gauges import Gauges
from engine.jobs import EmbedJob, Job, JobFailure, SpeechJob, WorkerEvent
from engine.memory import allocation

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RunningJob:
    id: int
    work: Iterator[Any]
    """Yields outputs, and None where another job may take its turn."""


@dataclass(slots=True, kw_only=True)
class SpeechLoop:
    """The jobs that run now, the first of which has its turn. Implements `JobRunner`."""

    start: Callable[[Any], Iterator[Any]]
    """Returns the work of a job."""
    gauges: Gauges
    _jobs: deque[_RunningJob] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return not self._jobs

    def add(self, job: Job | EmbedJob | SpeechJob) -> None:
        """Add a job at the next step."""
        self._jobs.append(_RunningJob(job.id, self.start(job)))

    def remove(self, job_id: int) -> None:
        """Remove a job, if it still runs."""
        self._jobs = deque(job for job in self._jobs if job.id != job_id)

    def step(self) -> Iterator[list[WorkerEvent]]:
        """Do one piece of work of the job that has its turn; yield what it made."""
        job = self._jobs[0]
        try:
            output = next(job.work)
        except Exception as error:
            log.exception("a job of speech failed", extra={"job": job.id})
            self._jobs.popleft()
            self.gauges.faults += 1
            yield [JobFailure(job_id=job.id, reason=summarize(error))]
        else:
            if output is None:
                self._jobs.rotate(-1)
            else:
                if output.finish is not None:
                    self._jobs.popleft()
                yield [output]
        self.gauges.steps += 1
        self.gauges.running = len(self._jobs)
        allocation.read_memory(self.gauges)
        if self.is_idle:
            allocation.clear_buffers()

    def close(self) -> None:
        """Drop all jobs."""
        self._jobs.clear()
