"""OpenAI's own client and a real model, for answers that random weights cannot give."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.engine_process import Engine

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(240)]
QUESTION: Any = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(real: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_question_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0}

    def whole() -> Any:
        return client.chat.completions.create(max_tokens=24, logprobs=True, **options)

    def streamed() -> str:
        with client.chat.completions.create(max_tokens=24, stream=True, **options) as stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def stopped() -> Any:
        return client.chat.completions.create(max_tokens=24, stop=[" Paris"], **options)

    def cut() -> Any:
        return client.chat.completions.create(max_tokens=3, seed=1, **options)

    with ThreadPoolExecutor(4) as pool:
        done, text, short, few = (pool.submit(ask) for ask in (whole, streamed, stopped, cut))
    (choice,) = done.result().choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert text.result() == ANSWER
    assert short.result().choices[0].message.content == "The capital of France is"
    assert few.result().choices[0].finish_reason == "length"
    # The end token counts in the usage, but has no text and no log probability.
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == ANSWER
    assert done.result().usage.completion_tokens == len(tokens) + 1
    assert all(token.logprob > -3 for token in tokens)


def test_an_answer_continues_what_the_client_began(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    done = client.chat.completions.create(
        messages=begun, extra_body={"continue_final_message": True}, **options
    )
    (choice,) = done.choices
    assert (choice.message.content, choice.finish_reason) == (" France is Paris.", "stop")


def test_a_completion_continues_its_prompt(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny",
        prompt=["The capital of France is", "The opposite of hot is"],
        max_tokens=2,
        temperature=0,
        logprobs=1,
    )
    assert [choice.text for choice in done.choices] == [" Paris.", " cold."]
    for choice in done.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset == [0, len((choice.logprobs.tokens or [""])[0])]
