"""Log probabilities of a prompt's tokens, held against one pass of the model over the whole prompt."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.jobs import Job, TokenOutput
from tests.engine.batch.conftest import NewBatch
from tests.support.engine_batches import PROMPTS, drain, job, run, tokens
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
# Longer than the pieces whose logits are in memory at once.
LONG = tuple(at * 7 % 400 + 20 for at in range(150))


def scored_job(number: int, prompt: Sequence[int], **changes: Any) -> Job:
    made: Job = job(number, list(prompt), top_logprobs=3, has_prompt_logprobs=True, **changes)
    return made


def measured(loaded: Any, prompt: Sequence[int]) -> list[list[float]]:
    """Return the log probabilities of all tokens at each place of a prompt."""
    mx = module("mlx.core")
    logits = loaded.model(mx.array([list(prompt)]))[0].astype(mx.float32)
    scores: list[list[float]] = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    return scores


def check(loaded: Any, prompt: Sequence[int], first: TokenOutput) -> None:
    wanted, found = measured(loaded, prompt), first.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt) - 1
    for place, (token, logprobs) in enumerate(zip(prompt[1:], found, strict=True)):
        assert logprobs.logprob == pytest.approx(wanted[place][token], abs=2e-3)
        best = sorted(wanted[place], reverse=True)[:3]
        assert [value for _, value in logprobs.top] == pytest.approx(best, abs=2e-3)
    assert first.cached_tokens == 0


@pytest.mark.parametrize("prompt", [LONG, LONG[:33], LONG[:2], LONG[:1]])
def test_scores_are_those_of_one_pass(loaded: Any, new: NewBatch, prompt: Sequence[int]) -> None:
    batch = new()
    plain = run(batch, job(0, list(prompt)))[0]  # the prefix cache now holds it
    batch.add(scored_job(1, prompt))
    made = drain(batch)[1]
    check(loaded, prompt, made[0])
    assert tokens(made) == plain
    assert all(output.prompt_logprobs is None for output in made[1:])


def test_scored_prompts_are_read_beside_others(loaded: Any, new: NewBatch) -> None:
    alone = {at: run(new(), job(at, prompt))[at] for at, prompt in enumerate(PROMPTS)}
    batch = new()
    for at, prompt in enumerate(PROMPTS):
        batch.add(scored_job(at, prompt) if at % 2 else job(at, prompt))
    batch.add(scored_job(90, LONG))
    batch.add(scored_job(91, LONG))
    found = drain(batch)
    for at, prompt in enumerate(PROMPTS):
        assert tokens(found[at]) == alone[at]
        if at % 2:
            check(loaded, prompt, found[at][0])
        else:
            assert found[at][0].prompt_logprobs is None
    check(loaded, LONG, found[90][0])
    check(loaded, LONG, found[91][0])
    assert batch.memory.promised_bytes == 0
