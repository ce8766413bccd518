"""Constraints on a real model: the answer is correct and has the requested form."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.support.engine_process import Engine

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(180)]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
        "strict": True,
    },
}


class Answer(pydantic.BaseModel):
    country: str
    capital: str


@pytest.fixture
def asked(real: Engine) -> Any:
    with openai.OpenAI(base_url=real.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_schema_is_filled_in(asked: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    parsed = asked.chat.completions.parse(
        model="tiny", messages=messages, response_format=Answer, temperature=0, max_tokens=40
    )
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].message.parsed.capital == "Paris"


def test_a_model_without_tools_in_its_template_calls_a_tool(asked: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Berlin?"}]
    choice = asked.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=40,
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].type == "function"
    assert "Berlin" in json.loads(choice.message.tool_calls[0].function.arguments)["city"]
