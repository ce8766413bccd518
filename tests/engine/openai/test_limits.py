"""Limits of vocabulary and context."""

import dataclasses
from typing import Any

import pytest

from engine.openai import limits
from engine.openai.request_body import GenerationRequest
from tests.support.engine_requests import chat, complete, refused


@pytest.mark.parametrize("tokens", [[], [512], [-1], [10**30]], ids=str)
def test_tokens_must_be_in_the_vocabulary(tokens: list[int]) -> None:
    assert refused(limits.check_tokens, tokens, 512).param == "prompt"


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "max_tokens"),
    [
        pytest.param(chat(), 90, 10, id="chat-takes-the-rest"),
        pytest.param(complete(), 50, 16, id="completion-takes-sixteen"),
        pytest.param(complete(), 95, 5, id="completion-takes-the-rest"),
        pytest.param(chat(max_completion_tokens=10), 90, 10, id="exact-fit"),
    ],
)
def test_max_tokens_is_resolved(
    request_: GenerationRequest, prompt_tokens: int, max_tokens: int
) -> None:
    assert limits.resolve_max_tokens(request_, prompt_tokens, 100) == max_tokens


def test_the_deployments_limit_replaces_a_missing_one() -> None:
    def resolved(**fields: Any) -> int:
        request = dataclasses.replace(chat(**fields), default_max_tokens=7)
        return limits.resolve_max_tokens(request, 90, 100)

    assert resolved() == resolved(fit_max_tokens=True) == 7
    assert resolved(max_tokens=-1) == 10  # no limit, as it says
    assert resolved(max_tokens=9, fit_max_tokens=True) == 9
    assert resolved(max_tokens=11, fit_max_tokens=True) == 10


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "numbers"),
    [
        (chat(), 100, ("100 tokens", "resulted in 100")),
        (chat(max_tokens=11), 90, ("100 tokens", "101 tokens (90 in the messages, 11 in")),
        (complete(max_tokens=1), 100, ("100 tokens", "your prompt resulted in 100")),
    ],
)
def test_a_request_without_room_is_refused(
    request_: GenerationRequest, prompt_tokens: int, numbers: tuple[str, str]
) -> None:
    refusal = refused(limits.resolve_max_tokens, request_, prompt_tokens, 100)
    assert refusal.code == "context_length_exceeded"
    assert all(number in refusal.message for number in numbers)


def test_prompts_with_log_probabilities_are_shorter() -> None:
    request = complete(echo=True, logprobs=1, max_tokens=0, n=4)
    limits.check_prompt_logprobs(request, 8_192)
    refusal = refused(limits.check_prompt_logprobs, request, 8_193)
    assert "at most 8192 of each of 4 choices" in refusal.message
    limits.check_prompt_logprobs(complete(echo=True), 100_000)
    limits.check_prompt_logprobs(complete(logprobs=1), 100_000)
