"""Continuous batching, held against mlx-lm's own plain generation.

mlx-lm declares none of what we use as its API; a new version has to pass here first.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.jobs import JobFailure, SamplingParams, TokenOutput, WorkerEvent
from engine.text.output_parser import OutputParser
from engine.text.spans import StopMatcher
from tests.engine.batch.conftest import NewBatch
from tests.support.engine_batches import (
    PROMPTS,
    EvenClock,
    drain,
    job,
    load,
    new_batch,
    run,
    step,
    tokens,
)
from tests.support.mlx_models import Late, module
from tests.support.model_geometries import BASE, FAMILIES, build

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
mx: Any = Late("mlx.core")


def text(loaded: Any, made: list[TokenOutput], primer: tuple[int, ...] = ()) -> str:
    reading = OutputParser(detokenizer=loaded.codec.detokenizer(), stops=StopMatcher(()))
    reading.prime(primer)
    return "".join(reading.take(output).content for output in made)


def test_a_batch_equals_mlx_lms_plain_generation(loaded: Any, batch: Any) -> None:
    mlx_lm = module("mlx_lm")
    for number, prompt in enumerate(PROMPTS):
        batch.add(job(number, prompt))
    found = drain(batch)
    tokenizer = loaded.codec._tokenizer
    for number, prompt in enumerate(PROMPTS):
        plain = mlx_lm.stream_generate(loaded.model, tokenizer, prompt, max_tokens=20)
        assert tokens(found[number]) == [response.token for response in plain]
        assert found[number][-1].finish == "length"


@pytest.mark.ci
def test_32_jobs_at_once_give_the_answers_of_single_jobs(new: NewBatch) -> None:
    prompts = [[(5 * at * (n + 1) + n) % 480 + 10 for at in range(2 + 5 * n)] for n in range(32)]
    jobs = [job(n, prompt, max_tokens=12) for n, prompt in enumerate(prompts)]
    batch = new(concurrency=32)
    alone = {n: found for one in jobs for n, found in run(batch, one).items()}
    batch.executor.prefix.trim(0)
    assert run(batch, *jobs) == alone


@pytest.mark.ci
def test_the_layout_of_the_caches_changes_no_answer(new: NewBatch) -> None:
    alike = [[(5 * at * (n + 1) + n) % 480 + 10 for at in range(40 + n)] for n in range(4)]
    jobs = [job(n, prompt, max_tokens=100) for n, prompt in enumerate(alike)]
    late = job(9, PROMPTS[7], max_tokens=60)
    batch = new()
    stage = batch.executor.decode_stage
    alone = {n: found for one in (*jobs, late) for n, found in run(batch, one).items()}
    batch.executor.prefix.trim(0)
    for one in jobs:
        batch.add(one)
    events: list[WorkerEvent] = []
    until_padded = 0
    while not (stage.rows and stage.is_padded):
        events += step(batch)
        until_padded += 1
    assert until_padded < 40
    batch.add(late)  # much longer: rows of their own again
    found = drain(batch, events)
    assert not stage.is_padded
    assert {number: tokens(made) for number, made in found.items()} == alone


def test_jobs_join_and_leave_in_every_stage(new: NewBatch) -> None:
    wanted = run(new(), job(0, PROMPTS[1], max_tokens=40))[0]
    batch = new()
    batch.add(job(0, PROMPTS[1], max_tokens=40))
    events: list[WorkerEvent] = []
    for number in range(1, 12):
        batch.add(job(number, PROMPTS[number % 8] * 3, max_tokens=30))
        for _ in range(number % 4):  # not begun, reading its prompt, generating
            events += step(batch)
        batch.remove(number)
    batch.remove(99)
    found = drain(batch, events)
    assert tokens(found[0]) == wanted
    assert batch.memory.promised_bytes == 0


def test_an_end_token_ends_the_text_and_is_not_part_of_it(
    loaded: Any, tiny: Path, tmp_path: Path, batch: Any
) -> None:
    batch.add(job(0, PROMPTS[2]))
    full = drain(batch)[0]
    at = next(i for i, token in enumerate(tokens(full)) if i and token not in tokens(full)[:i])
    folder = ending(tiny, tmp_path / "ends", full[at].token)
    other = new_batch(load(folder), folder)
    other.add(job(0, PROMPTS[2]))
    made = drain(other)[0]
    assert tokens(made) == tokens(full)[: at + 1]
    assert [output.finish for output in made[-2:]] == [None, "stop"]
    assert text(loaded, made).rstrip("\ufffd") == text(loaded, full[:at]).rstrip("\ufffd")


def ending(loaded_folder: Path, folder: Path, token: int) -> Path:
    """Copy a model, with one more token that ends a text."""
    shutil.copytree(loaded_folder, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"eos_token_id": [2, token]}
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("least", [1, 12, 2**31])
def test_no_end_token_comes_before_the_least_tokens(
    tiny: Path, tmp_path: Path, batch: Any, least: int
) -> None:
    batch.add(job(0, PROMPTS[2], max_tokens=30))
    end = tokens(drain(batch)[0])[0]
    folder = ending(tiny, tmp_path / "ends", end)
    other = new_batch(load(folder), folder)
    # Beside a row that may end at once, and does; a resumed row counts the tokens that it has.
    emitted = (11,) * min(least, 5)
    other.add(job(0, PROMPTS[2], max_tokens=30, min_tokens=least, top_logprobs=1))
    other.add(job(1, PROMPTS[2], max_tokens=30))
    other.add(job(2, PROMPTS[2], max_tokens=30, min_tokens=len(emitted), emitted=emitted))
    made = drain(other)
    assert tokens(made[1]) == [end]
    assert end not in tokens(made[0])[:least]
    assert len(made[0]) == 30 if least > 30 else len(made[0]) > least
    scores = made[0][0].logprobs
    assert scores is not None
    assert scores.top_tokens[0] == end  # the model's own distribution
    assert (made[0][-1].finish == "length") == (end not in tokens(made[0]))
    assert len(made[2]) >= 1


def test_a_draft_changes_nothing_about_the_least_tokens(
    tiny: Path, tmp_path: Path, batch: Any
) -> None:
    batch.add(job(0, PROMPTS[2]))
    folder = ending(tiny, tmp_path / "ends", tokens(drain(batch)[0])[0])
    loaded = load(folder)
    wanted = job(0, PROMPTS[2], max_tokens=30, min_tokens=12)
    plain, drafted = (
        new_batch(dataclasses.replace(loaded, draft=draft), folder, draft_tokens=3)
        for draft in (None, loaded.model)
    )
    plain.add(wanted)
    drafted.add(wanted)
    assert tokens(drain(drafted)[0]) == tokens(drain(plain)[0])


def test_a_completion_continues_exactly_at_the_end_of_its_prompt(loaded: Any, batch: Any) -> None:
    decode = loaded.codec._tokenizer.decode
    number = 0
    for first in range(10, 480, 5):
        prompt = [*loaded.codec.encode_text("hello"), first]
        before = decode(prompt)
        if before.endswith("\ufffd"):
            continue
        number += 1
        batch.add(job(number, prompt, max_tokens=4))
        made = drain(batch)[number]
        whole = decode(prompt + tokens(made))
        shown = before + text(loaded, made, (prompt[-1],))
        # a blank at the very end of the prompt is held back and shown with the next word
        assert shown.replace(" ", "") == whole.replace(" ", "")
        assert before.endswith(" ") or shown == whole
    assert number > 20


class Flaky:
    """A model that fails once, at the given call."""

    def __init__(self, model: Any, fails_at: int) -> None:
        self._model = model
        self._left = fails_at

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("[metal] boom\nsecond line")
        return self._model(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_failed_step_loses_only_its_own_jobs(loaded: Any, new: NewBatch, fails_at: int) -> None:
    flaky = Flaky(loaded.model, 1_000_000)
    batch = new(model=flaky)  # which asks the model whether it can read by rows
    flaky._left = fails_at
    batch.add(job(1, PROMPTS[1]))
    batch.add(job(2, PROMPTS[2]))
    events: list[WorkerEvent] = []
    while not batch.is_idle:
        events += step(batch)
    faults = [event for event in events if isinstance(event, JobFailure)]
    assert sorted(fault.job_id for fault in faults) == [1, 2]
    assert faults[0].reason == "RuntimeError: [metal] boom second line"
    assert run(batch, job(3, PROMPTS[1])) == run(new(), job(3, PROMPTS[1]))


def test_a_prompt_that_cannot_be_read_loses_only_its_own_job(loaded: Any, new: NewBatch) -> None:
    flaky = Flaky(loaded.model, 1_000_000)
    batch = new(model=flaky)
    batch.add(job(1, PROMPTS[1]))
    events = step(batch) + step(batch)
    flaky._left = 1  # the second's prompt, before the next token of the first
    batch.add(job(2, PROMPTS[7]))
    events += step(batch)
    assert [event.job_id for event in events if isinstance(event, JobFailure)] == [2]
    made = drain(batch, [event for event in events if not isinstance(event, JobFailure)])
    assert tokens(made[1]) == run(new(), job(1, PROMPTS[1]))[1]


@pytest.mark.ci
def test_a_job_that_gives_up_its_memory_continues_as_if_nothing_had_happened(new: NewBatch) -> None:
    prompts = [[(5 * at * (n + 1) + n) % 480 + 10 for at in range(250)] for n in range(3)]
    seeded = SamplingParams(temperature=0.9, seed=7)
    jobs = [
        job(0, prompts[0], max_tokens=600),
        job(1, prompts[1], max_tokens=600, sampling=seeded, top_logprobs=1),
        job(2, prompts[2], max_tokens=300),
    ]
    wanted = {n: found for one in jobs for n, found in run(new(), one).items()}
    batch = new()
    # Two rows of 512 tokens: the long ones begin with half of that, and the last one waits.
    room = 4 * 256 * batch.memory.budget.footprint.token_bytes
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
    assert together == 2
    assert batch.gauges.preemptions == 1
    assert {number: tokens(made) for number, made in found.items()} == wanted
    assert [sum(output.finish is not None for output in found[number]) for number in range(3)] == [
        1
    ] * 3
    assert all(output.cached_tokens == 0 for made in found.values() for output in made)
    assert all(output.logprobs is not None for output in found[1])
    assert batch.memory.promised_bytes == 0


def test_a_job_that_gave_up_its_memory_can_be_cancelled(new: NewBatch) -> None:
    prompts = [[(5 * at * (n + 1) + n) % 480 + 10 for at in range(250)] for n in range(2)]
    batch = new()
    room = 4 * 256 * batch.memory.budget.footprint.token_bytes
    batch.memory.budget = dataclasses.replace(batch.memory.budget, kv_bytes=room)
    for number in range(2):
        batch.add(job(number, prompts[number], max_tokens=300))
    while not batch.gauges.preemptions:
        step(batch)
    batch.remove(1)
    made = drain(batch)
    assert made[0][-1].finish == "length"
    assert 1 not in made
    assert batch.memory.promised_bytes == 0


def test_a_shared_prefix_is_computed_once(new: NewBatch) -> None:
    head = [(11 * at) % 480 + 10 for at in range(300)]
    prompts = [[*head, *PROMPTS[1][row : row + 5]] for row in range(6)]
    alone = [run(new(), job(number, prompt))[number] for number, prompt in enumerate(prompts)]
    batch = new()
    for number, prompt in enumerate(prompts):
        batch.add(job(number, prompt))
    found = drain(batch)
    assert [tokens(found[number]) for number in range(6)] == alone
    assert [found[number][0].cached_tokens for number in range(6)] == [0] + [300] * 5
    assert batch.gauges.prefill_tokens == 300 + 4 + 5 * 4


def test_a_model_with_states_continues_where_prompts_part(new: NewBatch) -> None:
    model = build({**BASE, **FAMILIES["lfm2"], "model_type": "lfm2", "vocab_size": 512})
    mx.eval(model.parameters())
    head = [(11 * at) % 480 + 10 for at in range(300)]
    prompts = [[*head, *PROMPTS[1][row : row + 5]] for row in range(5)]
    jobs = [job(number, prompt, max_tokens=4) for number, prompt in enumerate(prompts)]
    alone = [run(new(model=model), each)[each.id] for each in jobs]
    for system_tokens, cached in ((300, [0, 256, 256, 256, 256]), (0, [0, 0, 256, 256, 256])):
        batch = new(model=model)
        for each in jobs:
            batch.add(dataclasses.replace(each, system_tokens=system_tokens))
        found = drain(batch)
        assert [tokens(found[number]) for number in range(5)] == alone
        assert [found[number][0].cached_tokens for number in range(5)] == cached


def test_an_answer_is_cached_as_the_prefix_of_the_next_question(new: NewBatch) -> None:
    batch = new()
    made = run(batch, job(1, PROMPTS[3]))[1]
    batch.add(job(2, [*PROMPTS[3], *made, 17, 18]))
    again = drain(batch)[2]
    assert again[0].cached_tokens == len(PROMPTS[3]) + len(made) - 1  # the last one was never fed
    assert tokens(again) == run(new(), job(2, [*PROMPTS[3], *made, 17, 18]))[2]


def test_prompts_of_another_salt_are_computed_anew(new: NewBatch) -> None:
    head = [(11 * at) % 480 + 10 for at in range(300)]
    batch = new()
    prompts = {number: [*head, *PROMPTS[1][:number]] for number in (1, 2, 3, 4)}
    for number, salt in ((1, "alice"), (2, "bob"), (3, "alice"), (4, "")):
        batch.add(job(number, prompts[number], cache_salt=salt))
    found = drain(batch)
    assert [found[number][0].cached_tokens for number in (1, 2, 3, 4)] == [0, 0, 300, 0]
    for number, prompt in prompts.items():
        assert tokens(found[number]) == run(new(), job(1, prompt))[1]
    # An answer, too, is cached for its own salt only.
    longer = [*prompts[1], *tokens(found[1]), 17]
    for salt, is_cached in (("bob", False), ("alice", True)):
        batch.add(job(9, longer, cache_salt=salt))
        assert (drain(batch)[9][0].cached_tokens > 301) == is_cached


def test_a_crowd_is_read_before_the_first_of_it_decodes(new: NewBatch) -> None:
    prompts = [[(7 * at * (n + 1) + n) % 480 + 10 for at in range(20 + 25 * n)] for n in range(4)]
    batch = new(concurrency=4)
    # A second for each piece of 60 tokens: the stall of a crowd is two of them.
    batch.clock = EvenClock()
    batch.speed.decode_s, batch.speed.prefill_tokens_per_s = 1.0, 60.0
    for number, prompt in enumerate(prompts):
        batch.add(job(number, prompt, max_tokens=3))
    running, events = [], list[WorkerEvent]()
    while not batch.gauges.decode_tokens:
        events += step(batch)
        running.append(len(batch.executor.decode_stage.rows))
    assert running == [1, 2, 3], "two were read, then both decoded and the third was read"
    assert [len(tokens(made)) for made in drain(batch, events).values()] == [3, 3, 3, 3]
