"""The fields `tools`, `tool_choice`, `response_format` and `reasoning_effort`: read, or refused by name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RefusedError
from engine.openai import request_body


def parse(**fields: Any) -> request_body.GenerationRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]} | fields
    return request_body.parse_chat(json.dumps(body).encode())


def tool(name: str, **function: Any) -> Any:
    return {"type": "function", "function": {"name": name} | function}


_NAMES = ["type", "function", "name", "parameters", "strict", "json_schema", "schema", "mode"]
_VALUES = ["object", "json_object", "allowed_tools", "tools", "required", "auto", "$ref", "#"]
_WORDS = st.sampled_from([*_NAMES, *_VALUES, "properties"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=15,
)
_TOOLS = st.lists(
    st.builds(
        lambda name, more: tool(**{"name": name, **more}), _WORDS, st.dictionaries(_WORDS, _JSON)
    ),
    max_size=3,
)


@settings(max_examples=200)
@given(
    tools=_TOOLS | _JSON,
    choice=_JSON,
    wanted=st.builds(lambda body: {"type": "json_schema", "json_schema": body}, _JSON) | _JSON,
    effort=_JSON,
)
def test_whatever_is_asked_is_read_or_refused_by_name(
    tools: Any, choice: Any, wanted: Any, effort: Any
) -> None:
    for fields in (
        {"tools": tools, "tool_choice": choice},
        {"response_format": wanted},
        {"reasoning_effort": effort, "parallel_tool_calls": choice},
    ):
        with contextlib.suppress(RefusedError):
            parse(**fields)


def test_no_tools_are_no_toolbox() -> None:
    assert parse(tools=[]).toolbox is None
    assert parse(tools=None, tool_choice="auto", parallel_tool_calls=True).toolbox is None


def test_who_may_be_called_and_who_must() -> None:
    tools = [tool("f"), tool("g", parameters={"properties": {"a": {}}}), tool("h")]

    def box(choice: Any = None) -> tuple[list[str], bool]:
        found = parse(tools=tools, tool_choice=choice).toolbox
        assert found is not None
        assert len(found.shown) == 3
        return [offer.function.name for offer in found.offers], found.must_call

    assert box() == box("auto") == (["f", "g", "h"], False)
    assert box("none") == ([], False)
    assert box("required") == (["f", "g", "h"], True)
    assert box(tool("g")) == (["g"], True)
    for mode, must in (("auto", False), ("required", True)):
        allowed = {"mode": mode, "tools": [tool("h"), tool("f")]}
        assert box({"type": "allowed_tools", "allowed_tools": allowed}) == (["f", "h"], must)


def test_templates_find_what_they_read_without_asking() -> None:
    box = parse(tools=[tool("f")]).toolbox
    assert box is not None
    (shown,) = box.shown
    parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "", "parameters": parameters}
    assert shown == {"type": "function", "function": function}


@pytest.mark.parametrize("field", ["tools", "response_format"])
def test_what_is_nested_too_deeply_is_refused(field: str) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    schema = {"type": "object", "title": deep}
    wanted: Any = [tool("f", parameters=schema)]
    if field == "response_format":
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(RefusedError, match="nested too deeply"):
        parse(**{field: wanted})


def test_a_format_tells_the_model_what_it_has_to_match() -> None:
    described = {"name": "weather", "description": "of a day", "schema": {"type": "integer"}}
    wanted = parse(response_format={"type": "json_schema", "json_schema": described}).format
    assert wanted is not None
    assert "weather: of a day" in wanted.instruction
    assert '{"type": "integer"}' in wanted.instruction
    plain = parse(response_format={"type": "json_object"}).format
    assert plain is not None
    assert not plain.instruction
