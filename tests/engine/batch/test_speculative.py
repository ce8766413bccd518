"""Speculative decoding: with any draft model, and with n-grams, the answer is the same as without."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.jobs import JobFailure, SamplingParams
from schemas.kv_cache import KvCache
from tests.support.engine_batches import (
    PROMPTS,
    EvenClock,
    job,
    load,
    load_once,
    new_batch,
    run,
    step,
)
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=1, seed=4, top_p=0.8),
    SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.5),  # which waits for its tokens
]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with the same tokens and unrelated weights."""
    folder = tmp_path_factory.mktemp("drafts") / "stranger"
    module("tests.support.tiny_model").make(folder, seed=7, layers=1)
    return load_once(folder).model


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("is_twin", [True, False])
def test_an_answer_is_the_same_with_a_draft(
    loaded: Any, tiny: Path, stranger: Any, sampling: SamplingParams, *, is_twin: bool
) -> None:
    wanted = run(new_batch(loaded, tiny), job(0, PROMPTS[3], sampling=sampling, max_tokens=40))
    draft = loaded.model if is_twin else stranger
    batch = new_batch(dataclasses.replace(loaded, draft=draft), tiny, draft_tokens=3)
    question = job(0, PROMPTS[3], sampling=sampling, max_tokens=40, top_logprobs=1)
    assert run(batch, question) == wanted
    proposer = batch.executor.proposer
    if sampling.frequency_penalty:
        assert proposer.proposed_tokens == 0
    elif is_twin and sampling.temperature == 0:
        assert proposer.accepted_tokens == proposer.proposed_tokens > 20
    else:
        assert proposer.accepted_tokens < proposer.proposed_tokens


def test_proposals_pause_in_a_batch_and_resume_after_it(loaded: Any, tiny: Path) -> None:
    jobs = [job(0, PROMPTS[3], max_tokens=60), job(1, PROMPTS[5], max_tokens=10)]
    wanted = run(new_batch(loaded, tiny), *jobs)
    batch = new_batch(dataclasses.replace(loaded, draft=loaded.model), tiny, draft_tokens=4)
    assert run(batch, *jobs) == wanted
    assert 0 < batch.executor.proposer.proposed_tokens < 60


def test_the_caches_of_both_models_stay_within_the_memory_of_the_job(
    loaded: Any, tiny: Path
) -> None:
    batch = new_batch(dataclasses.replace(loaded, draft=loaded.model), tiny, draft_tokens=3)
    # Less than half of the memory is left ahead, so rows grow in small steps.
    room = 400 * batch.memory.budget.footprint.token_bytes
    batch.memory.budget = dataclasses.replace(batch.memory.budget, kv_bytes=room)
    batch.add(job(0, PROMPTS[5], max_tokens=150))
    proposer, compared = batch.executor.proposer, 0
    while not batch.is_idle:
        step(batch)
        if batch.executor.decode_stage.rows:
            drafts = sum(cache.nbytes for cache in proposer._caches)
            assert batch.executor.kv_bytes + drafts <= batch.memory.promised_bytes <= room
            compared += bool(drafts)
    assert compared > 10


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
@pytest.mark.parametrize("is_twin", [True, False])
def test_conversations_in_turns_share_a_draft(
    loaded: Any, tiny: Path, stranger: Any, sampling: SamplingParams, *, is_twin: bool
) -> None:
    """Their prompts begin alike; between the turns there are a cancelled job and a prompt of one token."""
    draft = loaded.model if is_twin else stranger
    batch = new_batch(dataclasses.replace(loaded, draft=draft), tiny, draft_tokens=3)
    numbers = itertools.count()

    def ask(prompt: list[int]) -> list[int]:
        question = job(next(numbers), prompt, sampling=sampling, max_tokens=20)
        answer = run(batch, question)
        assert answer == run(new_batch(loaded, tiny), question)
        return answer[question.id]

    conversations = [[*PROMPTS[2], 5, 6], [*PROMPTS[2], 5, 7]]
    for turn in range(3):
        for conversation in conversations:
            conversation.extend([*ask(conversation), 8 + turn, 9])
            cancelled = job(next(numbers), [*conversation, 4], sampling=sampling, max_tokens=90)
            batch.add(cancelled)
            for _ in range(5 + turn):
                step(batch)
            batch.remove(cancelled.id)
        ask(conversations[0][:1])
    assert batch.executor.proposer.proposed_tokens > 100


class FailingLayer:
    """A layer of a model that fails once, after so many calls."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.calls_left = layer, -1

    def __call__(self, *arguments: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise MemoryError("no memory for this layer")
        return self.layer(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@pytest.mark.parametrize("calls", [1, 3, 8])
def test_a_draft_that_failed_guesses_right_again(loaded: Any, tiny: Path, calls: int) -> None:
    """Its layers have read different numbers of tokens then."""
    draft = load(tiny).model
    draft.layers[-1] = layer = FailingLayer(draft.layers[-1])
    batch = new_batch(dataclasses.replace(loaded, draft=draft), tiny, draft_tokens=3)
    run(batch, job(0, PROMPTS[3], max_tokens=10))
    layer.calls_left = calls
    batch.add(job(1, PROMPTS[3], max_tokens=40))
    events = []
    while not batch.is_idle:
        events += step(batch)
    assert isinstance(events[-1], JobFailure)
    proposer = batch.executor.proposer
    proposed, accepted = proposer.proposed_tokens, proposer.accepted_tokens
    # Another turn of the same conversation.
    question = job(2, [*PROMPTS[3], 4, 5], max_tokens=40)
    assert run(batch, question) == run(new_batch(loaded, tiny), question)
    assert proposer.proposed_tokens - proposed > 20
    assert proposer.accepted_tokens - accepted == proposer.proposed_tokens - proposed


def with_ngrams(loaded: Any, folder: Path, **changes: Any) -> Any:
    """Make a batch that guesses wherever the last tokens were seen before."""
    batch = new_batch(loaded, folder, ngram_tokens=4, **changes)
    batch.clock = EvenClock()
    batch.executor.proposer._right = [1.0] * 5
    return batch


# Of a model with random weights only a cold one repeats itself.
COLD = [SAMPLINGS[0], SamplingParams(temperature=0.01, seed=4, top_p=0.8), SAMPLINGS[3]]


@pytest.mark.parametrize("sampling", COLD, ids=str)
def test_an_answer_is_the_same_with_ngrams(
    loaded: Any, tiny: Path, sampling: SamplingParams
) -> None:
    question = job(0, PROMPTS[5], sampling=sampling, max_tokens=100)
    wanted = run(new_batch(loaded, tiny), question)
    batch = with_ngrams(loaded, tiny)
    assert run(batch, dataclasses.replace(question, top_logprobs=1)) == wanted
    proposer = batch.executor.proposer
    if sampling.frequency_penalty:
        assert proposer.proposed_tokens == 0
    else:
        assert proposer.proposed_tokens > proposer.accepted_tokens
        assert batch.gauges.draft_tokens == proposer.proposed_tokens
        assert batch.gauges.draft_accepted_tokens == proposer.accepted_tokens


@pytest.mark.ci
def test_ngrams_pause_in_a_batch_and_resume_after_it(loaded: Any, tiny: Path) -> None:
    jobs = [job(0, PROMPTS[5], max_tokens=300), job(1, PROMPTS[3], max_tokens=10)]
    wanted = run(new_batch(loaded, tiny), *jobs)
    batch = with_ngrams(loaded, tiny)
    assert run(batch, *jobs) == wanted
    assert 10 < batch.executor.proposer.accepted_tokens < 290
    # What it left in the prefix cache is right.
    longer = [*PROMPTS[5], *wanted[0][:250]]
    assert run(batch, job(2, longer, max_tokens=50)) == {2: wanted[0][250:]}


@pytest.mark.ci
@pytest.mark.parametrize("bits", [4, 8])
def test_ngrams_take_guesses_back_from_quantized_caches(
    tmp_path: Path, bits: Literal[4, 8]
) -> None:
    folder = module("tests.support.tiny_model").make(tmp_path / "wide", hidden=128)
    loaded = load_once(folder)
    question = job(0, PROMPTS[5], max_tokens=200)
    wanted = run(new_batch(loaded, folder, kv_cache=KvCache(bits=bits)), question)
    batch = with_ngrams(loaded, folder, kv_cache=KvCache(bits=bits))
    assert run(batch, question) == wanted
    assert batch.executor.proposer.proposed_tokens > 0
