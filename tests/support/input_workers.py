"""Input workers with a tokenizer, without an engine."""

import contextlib
from asyncio import TaskGroup
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from engine.input_workers.fork_server import WorkerModel
from engine.input_workers.pool import InputWorkers
from engine.input_workers.wire import WorkerLimits
from engine.openai.input_processor import lane_of, work_length
from engine.openai.input_tasks import Lane, PromptsTask
from engine.openai.request_body import GenerationRequest
from engine.text.codec import TextCodec
from machinery.clock import SystemClock


@contextlib.asynccontextmanager
async def running(
    codec: TextCodec, cache: Path, *, limit_s: float = 20.0, memory_bytes: int = 256 << 20
) -> AsyncIterator[InputWorkers]:
    """Yield running workers with this codec and the import cache of a folder."""
    workers = InputWorkers(limit_s=limit_s, cache=cache, clock=SystemClock())
    workers.load(
        lambda: WorkerModel(
            tokenizer=codec.portable(),
            is_constrainable=True,
            limits=WorkerLimits(memory_bytes=memory_bytes),
        )
    )
    async with TaskGroup() as group:
        running = group.create_task(workers.run())
        try:
            yield workers
        finally:
            running.cancel()


async def tokens(
    workers: InputWorkers, request: GenerationRequest, lane: Lane | None = None
) -> tuple[int, ...]:
    """Return the tokens of a request's one prompt."""
    length = work_length(request)
    (prompt,) = await workers.prepare(
        lane or lane_of(length), PromptsTask(request=request), size=length
    )
    return prompt.tokens


def pid_of(workers: InputWorkers, lane: Lane) -> int:
    """Return the process of a lane."""
    worker: Any = workers._lanes[lane].worker
    return int(worker.pid)


def is_lost(workers: InputWorkers, lane: Lane, pid: int) -> bool:
    """Return whether it was noticed that a worker of a lane has ended."""
    worker: Any = workers._lanes[lane].worker
    return worker is None or worker.pid != pid or worker.connection.is_lost
