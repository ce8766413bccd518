"""The table of parameters agrees with docs/reference/openai.md and with OpenAI's client."""

import typing

import openai.types
import openai.types.chat
import pytest

from engine.openai import parameters
from engine.openai.parameters import EndpointParameters
from tests.support.engine_reference import rows
from tests.support.engine_requests import chat, refused

CHAT = openai.types.chat.completion_create_params
COMPLETION = openai.types.completion_create_params
ENDPOINTS = [
    pytest.param("## Chat", parameters.chat_parameters(), CHAT, id="chat"),
    pytest.param(
        "## Completions", parameters.completion_parameters(), COMPLETION, id="completions"
    ),
]


def verdict(name: str, accepted: EndpointParameters) -> str:
    """Return the word of the page for a parameter."""
    if name in accepted.honoured:
        return "honoured"
    if name in accepted.labels:
        return "label"
    return "only" if accepted.limited[name].values else "refused"


@pytest.mark.parametrize(("heading", "accepted", "_params"), ENDPOINTS)
def test_the_page_agrees_with_the_code(
    heading: str, accepted: EndpointParameters, _params: object
) -> None:
    assert {name: text.split()[0] for name, text in rows(heading).items()} == {
        name: verdict(name, accepted) for name in accepted.names
    }


@pytest.mark.parametrize(("heading", "_accepted", "params"), ENDPOINTS)
def test_every_parameter_of_openais_client_is_on_the_page(
    heading: str, _accepted: EndpointParameters, params: typing.Any
) -> None:
    known = {
        name
        for kind in ("NonStreaming", "Streaming")
        for name in typing.get_type_hints(getattr(params, f"CompletionCreateParams{kind}"))
    }
    assert "temperature" in known
    assert known <= rows(heading).keys()
    ours = rows(heading).keys() - known
    assert ours == parameters.EXTENSIONS | (
        parameters.CHAT_EXTENSIONS if "Chat" in heading else set()
    )


def test_an_unknown_name_gets_a_suggestion() -> None:
    refusal = refused(chat, temprature=1)
    assert (refusal.param, refusal.code) == ("temprature", "unknown_parameter")
    assert "'temperature'" in refusal.message
