"""`tools`, `tool_choice`, `response_format` and `reasoning_effort`: parsed, or refused by name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.openai import request_body
from schemas.wire.errors import RefusedError
from tests.support.sampling import samples


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


@settings(max_examples=samples(200))
@given(
    tools=_TOOLS | _JSON,
    choice=_JSON,
    response_format=st.builds(lambda body: {"type": "json_schema", "json_schema": body}, _JSON)
    | _JSON,
    effort=_JSON,
)
def test_any_value_is_parsed_or_refused(
    tools: Any, choice: Any, response_format: Any, effort: Any
) -> None:
    for fields in (
        {"tools": tools, "tool_choice": choice},
        {"response_format": response_format},
        {"reasoning_effort": effort, "parallel_tool_calls": choice},
    ):
        with contextlib.suppress(RefusedError):
            parse(**fields)


def test_no_tools_give_no_toolbox() -> None:
    assert parse(tools=[]).toolbox is None
    assert parse(tools=None, tool_choice="auto", parallel_tool_calls=True).toolbox is None


def test_the_choice_limits_the_callable_tools() -> None:
    tools = [tool("f"), tool("g", parameters={"properties": {"a": {}}}), tool("h")]

    def box(choice: Any = None) -> tuple[list[str], bool]:
        found = parse(tools=tools, tool_choice=choice).toolbox
        assert found is not None
        assert len(found.template_tools) == 3
        return [tool.function.name for tool in found.callable_tools], found.must_call

    assert box() == box("auto") == (["f", "g", "h"], False)
    assert box("none") == ([], False)
    assert box("required") == (["f", "g", "h"], True)
    assert box(tool("g")) == (["g"], True)
    for mode, must in (("auto", False), ("required", True)):
        allowed = {"mode": mode, "tools": [tool("h"), tool("f")]}
        assert box({"type": "allowed_tools", "allowed_tools": allowed}) == (["f", "h"], must)


def test_templates_get_all_fields_of_a_tool() -> None:
    box = parse(tools=[tool("f")]).toolbox
    assert box is not None
    (rendered,) = box.template_tools
    parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "", "parameters": parameters}
    assert rendered == {"type": "function", "function": function}


@pytest.mark.parametrize("field", ["tools", "response_format"])
def test_a_schema_nested_too_deeply_is_refused(field: str) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    schema = {"type": "object", "title": deep}
    value: Any = [tool("f", parameters=schema)]
    if field == "response_format":
        value = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(RefusedError, match="nested too deeply"):
        parse(**{field: value})


def test_the_prompt_describes_the_response_format() -> None:
    described = {"name": "weather", "description": "of a day", "schema": {"type": "integer"}}
    required = parse(response_format={"type": "json_schema", "json_schema": described}).format
    assert required is not None
    assert "weather: of a day" in required.instruction
    assert '{"type": "integer"}' in required.instruction
    plain = parse(response_format={"type": "json_object"}).format
    assert plain is not None
    assert not plain.instruction
