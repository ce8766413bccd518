"""Choices, log probabilities and figures of an answer, as OpenAI's own client reads them from an engine."""

import json
import math
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.support.engine_process import Engine

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    fields = {"max_tokens": 16, "temperature": 0} | fields
    chat_completion: ChatCompletion = client.chat.completions.create(
        model="tiny", messages=MESSAGES, **fields
    )
    return chat_completion


def texts(done: ChatCompletion) -> list[str]:
    assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
    return [choice.message.content or "" for choice in done.choices]


def chunks(client: openai.OpenAI, **fields: Any) -> list[Any]:
    fields = {"max_tokens": 16, "temperature": 0} | fields
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, **fields
    ) as stream:
        return list(stream)


# Choices


def test_choices_have_consecutive_seeds(client: openai.OpenAI) -> None:
    done = ask(client, n=4, seed=10, temperature=1)
    assert len(set(texts(done))) == 4
    assert texts(done) == [texts(ask(client, seed=10 + at, temperature=1))[0] for at in range(4)]
    assert done.usage is not None
    assert done.usage.completion_tokens == 64
    assert done.usage.prompt_tokens == (ask(client).usage or done.usage).prompt_tokens


def test_streamed_choices_have_their_index(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1}
    found = ["", "", ""]
    finished: list[int] = []
    for chunk in chunks(client, **options):
        (choice,) = chunk.choices
        found[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason == "length" else []
    assert found == texts(ask(client, **options))
    assert sorted(finished) == [0, 1, 2]


def test_choices_end_independently(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 5, "temperature": 1, "max_tokens": 30}
    first, second = texts(ask(client, **options))
    stop = next(first[at : at + 6] for at in range(6, 60) if first[at : at + 6] not in second)
    done = ask(client, **options, stop=stop)
    assert texts(done) == [first[: first.find(stop)], second]
    assert [choice.finish_reason for choice in done.choices] == ["stop", "length"]


@pytest.mark.parametrize(("name", "fields"), [("n", {"n": 17}), ("prompt", {"prompt": ["x"] * 17})])
def test_more_choices_than_slots_are_refused(engine: Engine, name: str, fields: Any) -> None:
    reply = engine.post("/v1/completions", **{"prompt": "x"} | fields)
    assert (reply.status, reply.error["param"]) == (400, name)
    assert "16 at once" in reply.error["message"]


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["We hold", "these truths", "self"]
    options: dict[str, Any] = {"model": "tiny", "n": 2, "seed": 3, "max_tokens": 6}
    done = client.completions.create(prompt=prompts, **options)
    alone = [client.completions.create(prompt=prompt, **options) for prompt in prompts]
    assert [c.text for c in done.choices] == [c.text for single in alone for c in single.choices]
    assert [c.index for c in done.choices] == list(range(6))
    assert done.usage is not None
    assert done.usage.completion_tokens == 36
    assert done.usage.prompt_tokens == sum(
        single.usage.prompt_tokens for single in alone if single.usage
    )
    tokens = client.completions.create(prompt=[[10, 20], [30]], **options)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


def test_an_echo_precedes_the_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0}
    prompt = "We hold  thése"
    plain = client.completions.create(prompt=prompt, **options).choices[0].text
    assert (
        client.completions.create(prompt=prompt, echo=True, **options).choices[0].text
        == prompt + plain
    )
    with client.completions.create(prompt=prompt, echo=True, stream=True, **options) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == prompt + plain


# Log probabilities


@pytest.mark.parametrize("prompt", ["We hold  thése", [10, 20, 30], [[10, 20], [7]]])
def test_an_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, prompt: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "prompt": prompt, "logprobs": 2}
    answers = client.completions.create(**options, max_tokens=6).choices
    whole = client.completions.create(**options, max_tokens=6, echo=True)
    only = client.completions.create(**options, max_tokens=0, echo=True)
    assert only.usage is not None
    assert only.usage.completion_tokens == 0
    for answer, both, echo in zip(answers, whole.choices, only.choices, strict=True):
        assert answer.logprobs is not None
        assert both.logprobs is not None
        assert echo.logprobs is not None
        count = len(echo.logprobs.tokens or ())
        assert (both.text, echo.finish_reason) == (echo.text + answer.text, "length")
        assert echo.logprobs.token_logprobs is not None
        assert echo.logprobs.token_logprobs[0] is None
        assert all(score <= 0 for score in echo.logprobs.token_logprobs[1:])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            expected = list(getattr(echo.logprobs, name))
            if name == "text_offset":
                expected += [at + len(echo.text) for at in answer.logprobs.text_offset or []]
            else:
                expected += getattr(answer.logprobs, name)
            # Tokens that are read together are summed in another order.
            assert getattr(both.logprobs, name) == [
                pytest.approx(one, abs=1e-4) if isinstance(one, float | dict) else one
                for one in expected
            ]
        offsets = both.logprobs.text_offset or []
        assert offsets == sorted(offsets)
        assert offsets[count] == len(echo.text)


def test_a_streamed_echo_with_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 1, "echo": True}
    whole = client.completions.create(prompt="We hold", **options).choices[0]
    text = ""
    tokens: list[str] = []
    with client.completions.create(prompt="We hold", stream=True, **options) as stream:
        for chunk in stream:
            text += chunk.choices[0].text
            logprobs = chunk.choices[0].logprobs
            tokens += (logprobs.tokens or []) if logprobs is not None else []
    assert whole.logprobs is not None
    assert (text, tokens) == (whole.text, whole.logprobs.tokens)


def tokens_of(done: Any) -> list[Any]:
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    return list(logprobs.content or ())


def spell(tokens: Iterable[Any]) -> str:
    return b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    done = ask(client, logprobs=True, top_logprobs=5)
    tokens = tokens_of(done)
    assert len(tokens) == 16
    assert spell(tokens).strip() == texts(done)[0].strip()
    for token in tokens:
        top = [other.logprob for other in token.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert (len(top), top[0]) == (5, token.logprob)  # greedy: the most probable is chosen
        assert sum(map(math.exp, top)) <= 1.001
        assert token.token == bytes(token.bytes).decode(errors="replace")
    assert tokens_of(ask(client, logprobs=True))[0].top_logprobs == []
    assert ask(client).choices[0].logprobs is None


def test_streamed_logprobs_equal_the_whole(client: openai.OpenAI) -> None:
    # At this temperature many tokens are parts of characters, whose text comes later.
    options: dict[str, Any] = {"logprobs": True, "temperature": 2, "seed": 1, "max_tokens": 60}
    whole = tokens_of(ask(client, **options))
    streamed = [
        token
        for chunk in chunks(client, **options)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert [(token.token, token.bytes) for token in streamed] == [
        (token.token, token.bytes) for token in whole
    ]
    assert any(token.token == "\ufffd" and token.bytes for token in whole)


def test_stop_words_have_no_logprobs(client: openai.OpenAI) -> None:
    text = texts(ask(client))[0]
    done = ask(client, logprobs=True, stop=text[10:14])
    shown = spell(tokens_of(done)).lstrip()
    assert shown.startswith(texts(done)[0].strip())  # the last token may reach into the stop word
    assert len(tokens_of(done)) < 16


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt="We hold", logprobs=3, temperature=0)
    logprobs, text = done.choices[0].logprobs, done.choices[0].text
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 16
    for token, at, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True
    ):
        if "\ufffd" not in token:
            assert text[at : at + len(token)] == token
            assert 1 <= len(top) <= 3


# Sampling


def test_a_bias_forces_and_bans_tokens(client: openai.OpenAI) -> None:
    forced = client.completions.create(
        model="tiny", prompt="x", max_tokens=3, logit_bias={"70": 100}, logprobs=0, temperature=1
    )
    logprobs = forced.choices[0].logprobs
    assert logprobs is not None
    assert len(set(logprobs.tokens or ())) == 1
    with pytest.raises(openai.BadRequestError, match="not in the model's vocabulary") as caught:
        ask(client, logit_bias={"512": 1})
    assert caught.value.param == "logit_bias"


def test_logprobs_ignore_penalties_and_cuts(client: openai.OpenAI) -> None:
    plain = tokens_of(ask(client, logprobs=True, max_tokens=1))[0]
    other = tokens_of(
        ask(client, logprobs=True, max_tokens=1, frequency_penalty=2, extra_body={"top_k": 1})
    )[0]
    assert (plain.token, plain.logprob) == (other.token, pytest.approx(other.logprob, abs=1e-4))


def test_cuts_to_one_token_are_greedy(client: openai.OpenAI) -> None:
    expected = texts(ask(client))
    for cut in ({"top_k": 1}, {"min_p": 1}, {"top_k": 1, "xtc_probability": 0}):
        assert texts(ask(client, temperature=1, extra_body=cut)) == expected
    assert texts(ask(client, temperature=1, top_p=0)) == expected


def test_penalties_reduce_repetition(client: openai.OpenAI) -> None:
    # The bias makes the model repeat one token.
    prompt: Any = {"model": "tiny", "prompt": [70] * 8, "max_tokens": 40, "temperature": 0}
    prompt["logit_bias"] = {"70": 6}
    plain = client.completions.create(**prompt).choices[0].text
    penalties: list[Any] = [
        {"extra_body": {"repetition_penalty": 2}},
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
    ]
    for penalty in penalties:
        other = client.completions.create(**prompt, **penalty).choices[0].text
        assert other.count(plain[-1]) < plain.count(plain[-1])


# Figures


def test_usage_comes_in_the_last_chunk(engine: Engine) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    raw = engine.chat(**options).raw.decode().split("\n\n")
    assert raw[-2:] == ["data: [DONE]", ""]
    bodies = [json.loads(one.removeprefix("data: ")) for one in raw[:-2]]
    assert all(body["usage"] is None and len(body["choices"]) == 1 for body in bodies[:-1])
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"]["completion_tokens"] == 8
    assert bodies[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    plain = engine.chat(stream=True).raw.decode().split("\n\n")[:-2]
    assert not any("usage" in json.loads(one.removeprefix("data: ")) for one in plain)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_performance_is_sent_on_request(engine: Engine, *, is_streamed: bool) -> None:
    reply = engine.chat(stream=is_streamed, include_performance=True)
    found = reply.raw.decode()
    last = found.split("\n\n")[-3].removeprefix("data: ") if is_streamed else found
    performance = json.loads(last)["performance"]
    assert performance["ttft_s"] >= performance["queue_s"] >= 0
    assert performance["ttft_s"] == pytest.approx(
        performance["queue_s"] + performance["prefill_s"], abs=1e-3
    )
    assert performance["decode_tokens_per_s"] > 0
    assert set(performance) >= {"prompt_tokens_per_s", "cached_tokens"}
    assert b"performance" not in engine.chat(stream=is_streamed).raw


def test_the_fingerprint_is_constant(client: openai.OpenAI) -> None:
    found = {ask(client).system_fingerprint, chunks(client)[0].system_fingerprint}
    assert len(found) == 1
    assert (found.pop() or "").startswith("fp_")


# Deadlines


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "inf", "1e9", ""])
def test_a_timeout_must_be_seconds(engine: Engine, text: str) -> None:
    reply = engine.chat(headers={"x-request-timeout": text})
    assert (reply.status, reply.error["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize("seconds", ["0.000001", "0.3"])
def test_a_request_over_its_deadline_is_a_504(engine: Engine, seconds: str) -> None:
    reply = engine.chat(headers={"x-request-timeout": seconds}, max_tokens=4000)
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")
    assert engine.chat(headers={"x-request-timeout": "60"}).status == 200


def test_a_stream_over_its_deadline_ends_with_an_error(engine: Engine) -> None:
    for seconds in ("0.5", "1", "2"):
        reply = engine.chat(headers={"x-request-timeout": seconds}, max_tokens=4000, stream=True)
        if reply.status == 200:
            last = json.loads(reply.raw.decode().split("\n\n")[-2].removeprefix("data: "))
            assert last["error"]["code"] == "request_timeout"
            assert b"[DONE]" not in reply.raw
            return
        assert (
            reply.error["code"] == "request_timeout"
        )  # on a busy machine there is not even one token
    pytest.fail("no stream began within two seconds")


def test_a_name_that_the_template_does_not_write_is_spoken(engine: Engine) -> None:
    named, plain = (
        engine.post("/v1/chat/completions", messages=[message], max_tokens=1)
        for message in (
            {"role": "user", "content": "x", "name": "bob"},
            {"role": "user", "content": "bob: x"},
        )
    )
    assert named.status == 200
    assert named.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]
