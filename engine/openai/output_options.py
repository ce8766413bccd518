"""Parsing of `response_format`, `tools`, `tool_choice` and `parallel_tool_calls`. Pure.

A schema is enforced whether it is `strict` or not: a looser mode would have no advantage.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Field

from engine.errors import GrammarError
from engine.grammar import json_schema, lark
from engine.grammar.lark import FunctionSchema, ValueRules
from engine.openai.parameters import StrictModel
from schemas.wire import errors

Json: TypeAlias = Any
# OpenAI's pattern for schemas. Functions of MCP servers are longer, and Anthropic takes twice as much.
OpenAIName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
FunctionNameText: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]

_SCHEMA_PARAM = "response_format.json_schema.schema"
_CHOICE_ERROR = "A 'tool_choice' is 'none', 'auto', 'required', or an object of the type 'function' or 'allowed_tools'."
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class PlainResponseFormat(StrictModel):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaSpec(StrictModel):
    """A JSON schema with a name and a description."""

    name: OpenAIName
    description: str | None = None
    body: dict[str, Json] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class SchemaResponseFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


def format_model(value: dict[str, Json]) -> type[PlainResponseFormat] | type[SchemaResponseFormat]:
    """Return the model that a `response_format` must match.

    Raises:
        RefusedError: its type is unknown.

    """
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = "A 'response_format' is of the type 'text', 'json_object' or 'json_schema'."
        raise errors.invalid(message, param="response_format.type")
    return SchemaResponseFormat if kind == "json_schema" else PlainResponseFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredText:
    """The text that an answer must match."""

    value: ValueRules
    """As the grammar compiler takes it."""
    param: str
    """The path of the form in the request."""
    schema: Json = None
    """The JSON Schema that `value` stands for; None for any other form."""
    instruction: str = ""
    """Text about the form for the prompt: a model answers better if it knows the form."""

    @classmethod
    def from_schema(cls, schema: Json, *, param: str, instruction: str = "") -> "RequiredText":
        """Return the form of JSON that matches a normalized schema."""
        return cls(
            value=lark.json_value(schema), schema=schema, param=param, instruction=instruction
        )

    @property
    def length(self) -> int:
        """The approximate number of characters that are compiled."""
        return sum(len(rule) for rule in self.value.rules) + len(self.value.client_grammar)


def read_format(
    response_format: PlainResponseFormat | SchemaResponseFormat | None,
) -> RequiredText | None:
    """Return the text that an answer must match; None if any text is allowed.

    Raises:
        RefusedError: the schema cannot be enforced; names the place.

    """
    if response_format is None or response_format.type == "text":
        return None
    if isinstance(response_format, PlainResponseFormat):
        return RequiredText.from_schema({"type": "object"}, param="response_format")
    spec = response_format.json_schema
    body = {} if spec.body is None else spec.body
    try:
        json_schema.check_nesting(body)
        schema = json_schema.normalize_schema(body)
    except GrammarError as error:
        raise errors.invalid(f"Invalid schema: {error}", param=_SCHEMA_PARAM) from error
    return RequiredText.from_schema(
        schema, param=_SCHEMA_PARAM, instruction=_format_instruction(spec, body)
    )


def _format_instruction(spec: JsonSchemaSpec, body: Json) -> str:
    about = f": {spec.description}" if spec.description else ""
    return (
        f"# Response format\n\nAnswer with JSON only, the {spec.name}{about}.\n"
        f"It matches this JSON Schema:\n{json.dumps(body, ensure_ascii=False)}"
    )


class FunctionSignature(StrictModel):
    """The name and the parameters of a function."""

    name: FunctionNameText
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may call; functions are the only supported type."""

    type: Literal["function"]
    function: FunctionSignature


class FunctionName(StrictModel):
    """The name of a function."""

    name: str


class FunctionChoice(StrictModel):
    """One function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolSet(StrictModel):
    """The functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class AllowedToolsChoice(StrictModel):
    """A subset of the functions. All of them stay in the prompt, so that its cached prefix stays valid."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


MAX_TOOLS = 128  # OpenAI's limit
Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
Mode: TypeAlias = Literal["none", "auto", "required"]
Choice: TypeAlias = Mode | FunctionChoice | AllowedToolsChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """One function that the answer may call."""

    function: FunctionSchema
    index: int
    """Index in `tools`."""
    is_strict: bool

    @property
    def param(self) -> str:
        """The path of its schema in the request."""
        return f"tools[{self.index}].function.parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a request."""

    template_tools: tuple[dict[str, Json], ...]
    """All tools, as chat templates take them."""
    callable_tools: tuple[CallableTool, ...]
    """The tools that may be called; empty with `tool_choice: none`."""
    must_call: bool
    is_parallel: bool


def parse_choice_mode(text: str | None) -> Mode | None:
    """Return a `tool_choice` that is a string.

    Raises:
        RefusedError: it is not one of OpenAI's values.

    """
    if text not in (None, "none", "auto", "required"):
        raise errors.invalid(_CHOICE_ERROR, param="tool_choice")
    return cast("Mode | None", text)


def choice_model(value: dict[str, Json]) -> type[FunctionChoice] | type[AllowedToolsChoice]:
    """Return the model that a `tool_choice` object must match.

    Raises:
        RefusedError: its type is unknown.

    """
    kind = value.get("type")
    if kind not in ("function", "allowed_tools"):
        raise errors.invalid(_CHOICE_ERROR, param="tool_choice.type")
    return FunctionChoice if kind == "function" else AllowedToolsChoice


def read_tools(
    tools: Sequence[Tool] | None, choice: Choice | None, *, is_parallel: bool | None
) -> Toolbox | None:
    """Return the tools of a request; None if there are none.

    Raises:
        RefusedError: the tools or the choice contradict each other, or a schema cannot be enforced.

    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise errors.invalid("'tool_choice' needs 'tools'.", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            message = f"There are two functions with the name '{name}'."
            raise errors.invalid(message, param=f"tools[{at}].function.name")
    allowed = _allowed_names(choice, names)
    callable_tools = [_callable_tool(at, tool.function) for at, tool in enumerate(tools)]
    return Toolbox(
        template_tools=tuple(_template_tool(tool) for tool in tools),
        callable_tools=tuple(tool for tool in callable_tools if tool.function.name in allowed),
        must_call=_must_call(choice),
        # A choice of one function asks for one call, not for repeated calls.
        is_parallel=is_parallel is not False and not isinstance(choice, FunctionChoice),
    )


def _allowed_names(choice: Choice | None, names: Sequence[str]) -> Sequence[str]:
    if choice == "none":
        return ()
    if isinstance(choice, FunctionChoice):
        allowed = {choice.function.name: "tool_choice.function.name"}
    elif isinstance(choice, AllowedToolsChoice):
        allowed = {
            tool.function.name: f"tool_choice.allowed_tools.tools[{at}].function.name"
            for at, tool in enumerate(choice.allowed_tools.tools)
        }
    else:
        return names
    for name, param in allowed.items():
        if name not in names:
            raise errors.invalid(f"There is no function '{name[:100]}' in 'tools'.", param=param)
    return list(allowed)


def _must_call(choice: Choice | None) -> bool:
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, FunctionChoice)


def _template_tool(tool: Tool) -> dict[str, Json]:
    body = tool.model_dump(exclude_none=True)
    # Templates read these fields without a check.
    body["function"].setdefault("description", "")
    body["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return body


def _callable_tool(index: int, signature: FunctionSignature) -> CallableTool:
    is_strict = bool(signature.strict)
    schema = dict(signature.parameters or _NO_PARAMETERS)
    param = f"tools[{index}].function.parameters"
    if "$ref" not in schema:
        schema.setdefault("type", "object")
        if schema["type"] != "object":
            message = "The parameters of a function are an object: use 'type': 'object'."
            raise errors.invalid(message, param=f"{param}.type")
    try:
        json_schema.check_nesting(schema)
        parameters = json_schema.normalize_schema(schema, is_strict=is_strict)
    except GrammarError as error:
        raise errors.invalid(f"Invalid schema: {error}", param=param) from error
    function = FunctionSchema(name=signature.name, parameters=parameters)
    return CallableTool(function=function, index=index, is_strict=is_strict)
