"""Speculative decoding: with any draft model the answer is the same as without one."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.jobs import SamplingParams
from tests.support.engine_batches import PROMPTS, job, load_once, new_batch, run
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
    one = job(0, PROMPTS[3], sampling=sampling, max_tokens=40, top_logprobs=1)
    assert run(batch, one) == wanted
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
