"""Batches on models in this process, and what they make. mlx_lm is imported late: it takes seconds."""

import contextlib
import dataclasses
import functools
import importlib
import resource
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.gauges import Gauges
from engine.jobs import Job, SamplingParams, TokenOutput, WorkerEvent
from machinery.clock import SystemClock
from models import model_files

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[(7 * row + 3 * at) % 480 + 10 for at in range(3 + 40 * row)] for row in range(8)]
CONFIG = EngineConfig(
    model_dir=Path(),
    replica="r",
    replica_uid="u",
    node="n",
    served_names=("m",),
    host="127.0.0.1",
    port=1,
    context_length=2048,
    concurrency=16,
    queue_limit=16,
    drain_timeout_s=1,
    max_body_bytes=1,
    blas_cache=Path(),
)


def module(name: str) -> Any:
    """Import a module by name, so that it has no types and no side effects here."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = importlib.import_module(name)
    # mlx_lm lowers it at import, for this process and for all that other tests start from it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return found


def load(folder: Path, gauges: Gauges | None = None) -> Any:
    facts = model_files.inspect_model(folder)
    loading = module("engine.model.loader")
    return loading.load(folder, facts, gauges or Gauges(), is_stopping=lambda: False)


load_once = functools.lru_cache(maxsize=4)(load)


def new_batch(
    loaded: Any, folder: Path, *, model: Any = None, gauges: Gauges | None = None, **changes: Any
) -> Any:
    """Make an idle batch; `model` takes the place of the loaded one, `changes` are fields of its config."""
    config = dataclasses.replace(CONFIG, model_dir=folder, **changes)
    facts = model_files.inspect_model(folder)
    models = [(loaded.model, facts)]
    if loaded.draft is not None:
        models.append((loaded.draft, facts))
    memory = module("engine.memory.allocation").begin(models, config)
    making = module("engine.model_rank")
    if model is not None:
        loaded = dataclasses.replace(loaded, model=model)
    executor = making.make_executor(loaded, config, prefix_bytes=memory.budget.prefix_most_bytes)
    return making.make(loaded, executor, memory, gauges or Gauges(), SystemClock())


def job(number: int, prompt: list[int], **changes: Any) -> Job:
    fields: dict[str, Any] = {"max_tokens": 20, "sampling": GREEDY}
    return Job(id=number, prompt=tuple(prompt), **fields | changes)


def step(batch: Any) -> list[WorkerEvent]:
    return [event for events in batch.step() for event in events]


def drain(batch: Any, events: list[WorkerEvent] | None = None) -> dict[int, list[TokenOutput]]:
    """Run until idle; return what was made, by job."""
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
    return [one.token for one in made]
