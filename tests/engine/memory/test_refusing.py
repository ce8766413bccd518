"""A request that can never fit is refused before it waits; one that named no length gets what there is."""

import dataclasses
import json
from typing import Any

import pytest

from engine.errors import RefusedError
from engine.memory.budget import MemoryBudget
from engine.openai import limits, request_body
from engine.openai.request_body import GenerationRequest
from models.footprint import KvFootprint, ServingLoad

# A token is a byte, and there is room for two steps of 256.
BUDGET = MemoryBudget(
    rule=KvFootprint(token_bytes=1),
    limit_bytes=1000,
    weights_bytes=300,
    activation_bytes=100,
    kv_bytes=600,
    prefix_kept_bytes=0,
    prefix_most_bytes=100,
    load=ServingLoad(context_length=4096, concurrency=4),
)


def chat(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "x"}]
    return request_body.parse_chat(
        json.dumps({"model": "m", "messages": messages} | fields).encode()
    )


def completion(**fields: Any) -> GenerationRequest:
    return request_body.parse_completion(
        json.dumps({"model": "m", "prompt": "x"} | fields).encode()
    )


@pytest.mark.parametrize(
    ("request_", "prompt", "wanted", "found"),
    [
        pytest.param(chat(), 12, 4084, 500, id="all-that-is-left"),
        pytest.param(chat(), 511, 3585, 1, id="one-token-left"),
        pytest.param(chat(max_tokens=500), 12, 500, 500, id="just-fits"),
        pytest.param(completion(), 500, 16, 12, id="less-than-the-default"),
        pytest.param(completion(), 5, 16, 16, id="the-default"),
    ],
)
def test_what_fits_is_taken(
    request_: GenerationRequest, prompt: int, wanted: int, found: int
) -> None:
    assert limits.fit_to_memory(BUDGET, request_, prompt, wanted) == found
    assert limits.fit_to_memory(None, request_, prompt, wanted) == wanted


@pytest.mark.parametrize(
    ("request_", "prompt", "wanted", "param"),
    [
        pytest.param(chat(max_tokens=501), 12, 501, "messages", id="asked-for-too-much"),
        pytest.param(chat(), 512, 3584, "messages", id="no-room-for-an-answer"),
        pytest.param(completion(), 4000, 16, "prompt", id="too-long-a-prompt"),
    ],
)
def test_what_can_never_fit_is_refused(
    request_: GenerationRequest, prompt: int, wanted: int, param: str
) -> None:
    with pytest.raises(RefusedError, match="enough for 512 tokens") as caught:
        limits.fit_to_memory(BUDGET, request_, prompt, wanted)
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code, refusal.param) == (400, "kv_budget_exceeded", param)


def test_windows_let_long_requests_in() -> None:
    rotating = dataclasses.replace(BUDGET, rule=KvFootprint(windows=((500, 1),)))
    assert rotating.longest == 4096
    assert limits.fit_to_memory(rotating, chat(max_tokens=4000), 96, 4000) == 4000
