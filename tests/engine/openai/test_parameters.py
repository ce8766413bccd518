"""The table of parameters agrees with docs/reference/openai.md and with OpenAI's client."""

import re
import typing

import openai.types
import openai.types.chat
import pytest

from engine.openai import parameters
from engine.openai.parameters import EndpointParameters
from engine.openai.request_body import CHAT_PARAMETERS, COMPLETION_PARAMETERS
from tests.support.engine_reference import PAGE, rows
from tests.support.engine_requests import chat, refused

CHAT = openai.types.chat.completion_create_params
COMPLETION = openai.types.completion_create_params
ENDPOINTS = [
    pytest.param("## Chat", CHAT_PARAMETERS, CHAT, id="chat"),
    pytest.param("## Completions", COMPLETION_PARAMETERS, COMPLETION, id="completions"),
]

# Their types are checked; they identify the client and change no answer.
LABELS = {"cache_prompt", "metadata", "prompt_cache_key", "safety_identifier", "session_id", "user"}


def verdict(name: str, accepted: EndpointParameters) -> str:
    """Return the word of the page for a parameter."""
    if name in accepted.model.model_fields:
        return "label" if name in LABELS else "honoured"
    limited = accepted.limited[name]
    if limited.values:
        return "only"
    return "left" if limited.is_hint else "refused"


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


def test_an_unknown_name_gets_a_suggestion() -> None:
    refusal = refused(chat, temprature=1)
    assert (refusal.param, refusal.code) == ("temprature", "unknown_parameter")
    assert "'temperature'" in refusal.message


def test_the_page_names_the_parameters_of_others() -> None:
    page = PAGE.read_text().split("\n## Parameters of other servers\n")[1].split("\n## ")[0]
    table, _, refused_always = page.split("|---|---|")[1].partition("\n\n")
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(parameters.OTHERS)
    assert set(re.findall(r"`(\w+)`", refused_always)) == parameters.REPLACEMENTS.keys()
