"""Batch loops on models in this process, and helpers to run them. mlx_lm is imported late: it takes seconds."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

from engine.gauges import Gauges
from engine.jobs import Job, SamplingParams, TokenOutput, WorkerEvent
from machinery.clock import SystemClock
from models import model_files
from schemas.wire.engine_config import EngineConfig
from tests.support.mlx_models import module

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[(7 * row + 3 * at) % 480 + 10 for at in range(3 + 40 * row)] for row in range(8)]
CONFIG = EngineConfig(
    model_dir=Path(),
    replica="r",
    replica_uid="u",
    node="n",
    served_names=("m",),
    context_length=2048,
    concurrency=16,
    queue_depth=16,
    drain_timeout_s=1,
    max_body_bytes=1,
    blas_cache=Path(),
)


class EvenClock:
    """A clock by which each step takes a second, so that a guess pays whatever this machine does."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._seconds))


def load(folder: Path, gauges: Gauges | None = None) -> Any:
    facts = model_files.inspect_model(folder)
    loader = module("engine.model.loader")
    return loader.load(folder, facts, gauges or Gauges(), is_stopping=lambda: False)


load_once = functools.lru_cache(maxsize=4)(load)


def new_batch(
    loaded: Any, folder: Path, *, model: Any = None, gauges: Gauges | None = None, **changes: Any
) -> Any:
    """Make an idle batch loop; `model` replaces the loaded one, `changes` are fields of the config."""
    config = CONFIG.model_copy(update={"model_dir": folder, **changes})
    facts = model_files.inspect_model(folder)
    models = [(loaded.model, facts)]
    if loaded.draft is not None:
        models.append((loaded.draft, facts))
    memory = module("engine.memory.allocation").allocate(models, config)
    model_rank = module("engine.model_rank")
    if model is not None:
        loaded = dataclasses.replace(loaded, model=model)
    executor = model_rank.make_executor(
        loaded,
        config,
        prefix_bytes=memory.budget.prefix_most_bytes,
        by_rows=memory.budget.footprint.by_rows,
    )
    batch = model_rank.make_batch_loop(loaded, executor, memory, gauges or Gauges(), SystemClock())
    batch.speed.prefill_tokens_per_s = 50_000.0  # not the guess of a new engine, for a large model
    return batch


def job(number: int, prompt: list[int], **changes: Any) -> Job:
    fields: dict[str, Any] = {"max_tokens": 20, "sampling": GREEDY}
    return Job(id=number, prompt=tuple(prompt), **fields | changes)


def step(batch: Any) -> list[WorkerEvent]:
    return [event for events in batch.step() for event in events]


def drain(batch: Any, events: list[WorkerEvent] | None = None) -> dict[int, list[TokenOutput]]:
    """Run until idle; return the outputs by job."""
    found: dict[int, list[TokenOutput]] = {}
    pending = list(events or [])
    while True:
        for event in pending:
            assert isinstance(event, TokenOutput), event
            found.setdefault(event.job_id, []).append(event)
        if batch.is_idle:
            return found
        pending = step(batch)


def run(batch: Any, *jobs: Job) -> dict[int, list[int]]:
    """Run these jobs together; return their tokens."""
    for one in jobs:
        batch.add(one)
    return {number: tokens(made) for number, made in drain(batch).items()}


def tokens(made: list[TokenOutput]) -> list[int]:
    return [output.token for output in made]
