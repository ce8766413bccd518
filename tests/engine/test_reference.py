"""`docs/reference/openai.md` says of every parameter what the code does with it, and OpenAI's client knows no other."""

import re
import typing
from pathlib import Path

import openai.types
import openai.types.chat
import pytest

from engine.openai import parameters
from engine.openai.parameters import EndpointParameters

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "openai.md"
CHAT = openai.types.chat.completion_create_params
COMPLETION = openai.types.completion_create_params
ENDPOINTS = [
    pytest.param("## Chat", parameters.chat_parameters(), CHAT, id="chat"),
    pytest.param(
        "## Completions", parameters.completion_parameters(), COMPLETION, id="completions"
    ),
]


def rows(heading: str) -> dict[str, str]:
    """Return the verdict of each parameter in the first table below a heading."""
    table = PAGE.read_text().split(f"\n{heading}")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    found = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE)
    assert len(found) == len(table.splitlines()), "a row does not name one parameter"
    assert [name for name, _ in found] == sorted(name for name, _ in found)
    return dict(found)


def verdict(name: str, dialect: EndpointParameters) -> str:
    """Return what the code does with a parameter, in the page's words."""
    if name in dialect.honoured:
        return "honoured"
    if name in dialect.labels:
        return "label"
    return "only" if dialect.limited[name].values else "refused"


@pytest.mark.parametrize(("heading", "dialect", "_params"), ENDPOINTS)
def test_the_page_says_what_the_code_does(
    heading: str, dialect: EndpointParameters, _params: object
) -> None:
    assert {name: said.split()[0] for name, said in rows(heading).items()} == {
        name: verdict(name, dialect) for name in dialect.names
    }


@pytest.mark.parametrize(("heading", "_dialect", "params"), ENDPOINTS)
def test_every_parameter_of_openais_client_is_on_the_page(
    heading: str, _dialect: EndpointParameters, params: typing.Any
) -> None:
    known = {
        name
        for kind in ("NonStreaming", "Streaming")
        for name in typing.get_type_hints(getattr(params, f"CompletionCreateParams{kind}"))
    }
    assert "temperature" in known
    assert known <= rows(heading).keys()
    ours = rows(heading).keys() - known
    assert ours == parameters.EXTENSIONS
