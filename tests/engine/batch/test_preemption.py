"""Jobs that give up their memory and continue: with grammars, penalties, adapters and quantized caches."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.jobs import Job, SamplingParams, TokenOutput
from schemas.kv_cache import KvCache
from tests.engine.batch.conftest import NewBatch
from tests.support.engine_adapters import load_adapted, make_adapter
from tests.support.engine_batches import job, load_once, new_batch, run, step, tokens
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

STEP = 256
LONG = 520
"""New tokens of a job: with its prompt it grows from one step of memory to three."""
NESTED = 'start: item*\nitem: "(" item* ")" | /[a-z]/'
SEEDED = SamplingParams(temperature=0.9, seed=7)
PENALIZED = SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5)


def prompt(number: int) -> list[int]:
    return [(5 * at * (number + 1) + number) % 480 + 10 for at in range(250)]


def run_short_of_memory(batch: Any, jobs: list[Job], *, steps: int) -> dict[int, list[int]]:
    """Run jobs together in memory for this many steps of tokens; some of them must give theirs up."""
    room = steps * STEP * batch.memory.budget.footprint.token_bytes
    batch.memory.budget = dataclasses.replace(batch.memory.budget, kv_bytes=room)
    for one in jobs:
        batch.add(one)
    found: dict[int, list[TokenOutput]] = {}
    together = 0
    while not batch.is_idle:
        for event in step(batch):
            assert isinstance(event, TokenOutput), event
            found.setdefault(event.job_id, []).append(event)
        together = max(together, batch.gauges.running)
        assert batch.executor.kv_bytes <= batch.memory.promised_bytes <= room
    assert together > 1
    assert batch.gauges.preemptions
    assert batch.memory.promised_bytes == 0
    return {number: tokens(made) for number, made in found.items()}


@pytest.mark.ci
def test_grammars_and_penalties_go_on_where_they_were(new: NewBatch) -> None:
    grammar = {"grammar": NESTED, "min_tokens": LONG}
    jobs = [
        job(0, prompt(0), max_tokens=LONG),
        job(1, prompt(1), max_tokens=LONG, sampling=PENALIZED),
        job(2, prompt(2), max_tokens=LONG, sampling=SEEDED, **grammar),
        job(3, prompt(3), max_tokens=LONG, sampling=PENALIZED, **grammar),
        job(4, prompt(4), max_tokens=LONG, **grammar),
    ]
    wanted = run(new(), *jobs)
    assert [len(made) for made in wanted.values()] == [LONG] * 5
    batch = new()
    assert run_short_of_memory(batch, jobs, steps=12) == wanted
    assert batch.gauges.preemptions >= 2


def test_a_grammar_that_ends_after_a_pause_ends_its_job(new: NewBatch) -> None:
    ends = job(1, prompt(1), max_tokens=LONG, grammar="start: /([a-z]|[0-9]){900}/")
    (wanted,) = run(new(), ends).values()
    assert 300 < len(wanted) < LONG
    found = run_short_of_memory(new(), [job(0, prompt(0), max_tokens=LONG), ends], steps=4)
    assert found[1] == wanted


@pytest.mark.ci
def test_each_job_continues_with_its_adapter(tiny: Path, tmp_path: Path) -> None:
    folders = {
        "law": make_adapter(tmp_path / "law", tiny),
        "poems": make_adapter(tmp_path / "poems", tiny, rank=16, seed=8),
    }
    loaded = load_adapted(tiny, folders)
    jobs = [
        job(at, prompt(0), max_tokens=LONG, adapter=name, cache_salt=name, min_tokens=LONG)
        for at, name in enumerate(["", "law", "poems"])
    ]
    wanted = run(new_batch(loaded, tiny), *jobs)
    assert len({tuple(made) for made in wanted.values()}) == 3
    assert run_short_of_memory(new_batch(loaded, tiny), jobs, steps=8) == wanted


@pytest.mark.ci
def test_quantized_rows_continue(tmp_path: Path) -> None:
    wide = module("tests.support.tiny_model").make(tmp_path / "wide", hidden=128)
    loaded = load_once(wide)
    jobs = [job(at, prompt(at), max_tokens=LONG, sampling=SEEDED) for at in range(3)]
    wanted = run(new_batch(loaded, wide, kv_cache=KvCache(bits=4)), *jobs)
    assert (
        run_short_of_memory(new_batch(loaded, wide, kv_cache=KvCache(bits=4)), jobs, steps=8)
        == wanted
    )


@pytest.mark.ci
def test_windows_with_first_tokens_are_alike_together_and_from_the_prefix_cache(
    new: NewBatch,
) -> None:
    options = {"kv_window": 700, "kv_keep": 8}
    jobs = [job(at, prompt(at), max_tokens=LONG, sampling=SEEDED) for at in range(3)]
    wanted = {n: found for one in jobs for n, found in run(new(**options), one).items()}
    batch = new(**options)
    assert run(batch, *jobs) == wanted
    assert run(batch, *jobs) == wanted
    assert batch.gauges.prefix_hit_tokens >= 3 * 249
