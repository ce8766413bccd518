"""`response_format`: text, any JSON object, or JSON that matches a schema. Pure.

A schema is enforced whether `strict` or not: there is nothing that a looser reading would make better.

`tools`, `tool_choice` and `parallel_tool_calls`: what may be called, and whether it must be. Pure.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field

from engine import errors
from engine.errors import GrammarError
from engine.grammar import json_schema
from engine.grammar.lark import FunctionSchema

Json: TypeAlias = Any
# OpenAI's rule for the names of functions, too.
FunctionNameText: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_STRICT = ConfigDict(strict=True, extra="forbid")
_SCHEMA_PARAM = "response_format.json_schema.schema"


class PlainResponseFormat(BaseModel):
    """Text, or any JSON object."""

    model_config = _STRICT

    type: Literal["text", "json_object"]


class JsonSchemaSpec(BaseModel):
    """A schema, and what it is for."""

    model_config = _STRICT

    name: FunctionNameText
    description: str | None = None
    body: dict[str, Json] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class SchemaResponseFormat(BaseModel):
    """JSON that matches a schema."""

    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


def format_model(given: dict[str, Json]) -> type[PlainResponseFormat] | type[SchemaResponseFormat]:
    """Return what a `response_format` has to be.

    Raises:
        RefusedError: it is of a kind that this engine does not know.

    """
    wanted = given.get("type")
    if wanted not in ("text", "json_object", "json_schema"):
        message = "A 'response_format' is of the type 'text', 'json_object' or 'json_schema'."
        raise errors.invalid(message, param="response_format.type")
    return SchemaResponseFormat if wanted == "json_schema" else PlainResponseFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredSchema:
    """What the answer has to match."""

    schema: Json
    """As the grammar library takes it."""
    param: str
    """Where in the request it came from."""
    instruction: str = ""
    """What the model is told of it: it writes better what it knows it has to."""


def read_format(wanted: PlainResponseFormat | SchemaResponseFormat | None) -> RequiredSchema | None:
    """Return what an answer has to match; None if anything will do.

    Raises:
        RefusedError: the schema asks for what cannot be enforced; names the place.

    """
    if wanted is None or wanted.type == "text":
        return None
    if isinstance(wanted, PlainResponseFormat):
        return RequiredSchema(schema={"type": "object"}, param="response_format")
    described = wanted.json_schema
    body = {} if described.body is None else described.body
    try:
        json_schema.check_nesting(body)
        enforceable = json_schema.normalize_schema(body)
    except GrammarError as error:
        raise errors.invalid(f"Invalid schema: {error}", param=_SCHEMA_PARAM) from error
    return RequiredSchema(
        schema=enforceable, param=_SCHEMA_PARAM, instruction=_format_instruction(described, body)
    )


def _format_instruction(described: JsonSchemaSpec, body: Json) -> str:
    about = f": {described.description}" if described.description else ""
    return (
        f"# Response format\n\nAnswer with JSON only, the {described.name}{about}.\n"
        f"It matches this JSON Schema:\n{json.dumps(body, ensure_ascii=False)}"
    )


_CHOICE_ERROR = "A 'tool_choice' is 'none', 'auto', 'required', or an object of the type 'function' or 'allowed_tools'."
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSignature(BaseModel):
    """A function's name and what it takes."""

    model_config = _STRICT

    name: FunctionNameText
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Something the model may call; of OpenAI's kinds only functions."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionSignature


class FunctionName(BaseModel):
    """A function's name."""

    model_config = _STRICT

    name: str


class FunctionChoice(BaseModel):
    """The one function that must be called."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionName


class AllowedToolSet(BaseModel):
    """Which of the functions may be called, and whether one must be."""

    model_config = _STRICT

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class AllowedToolsChoice(BaseModel):
    """Some of the functions: the prompt stays the same, so that its cache does."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=128)]
Mode: TypeAlias = Literal["none", "auto", "required"]
Choice: TypeAlias = Mode | FunctionChoice | AllowedToolsChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """One function that may be called."""

    function: FunctionSchema
    index: int
    """Where in `tools`."""
    is_strict: bool

    @property
    def param(self) -> str:
        """Where its schema stands in the request."""
        return f"tools[{self.index}].function.parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """What an answer may call."""

    shown: tuple[dict[str, Json], ...]
    """All tools, as templates take them."""
    offers: tuple[CallableTool, ...]
    """Those that may be called; none with `tool_choice: none`."""
    must_call: bool
    is_parallel: bool


def parse_choice_mode(given: str | None) -> Mode | None:
    """Return a `tool_choice` that is a word.

    Raises:
        RefusedError: it is none of OpenAI's words.

    """
    if given not in (None, "none", "auto", "required"):
        raise errors.invalid(_CHOICE_ERROR, param="tool_choice")
    return cast("Mode | None", given)


def choice_model(given: dict[str, Json]) -> type[FunctionChoice] | type[AllowedToolsChoice]:
    """Return what a `tool_choice` that is an object has to be.

    Raises:
        RefusedError: it is of a kind that this engine does not know.

    """
    kind = given.get("type")
    if kind not in ("function", "allowed_tools"):
        raise errors.invalid(_CHOICE_ERROR, param="tool_choice.type")
    return FunctionChoice if kind == "function" else AllowedToolsChoice


def read_tools(
    tools: Sequence[Tool] | None, choice: Choice | None, *, is_parallel: bool | None
) -> Toolbox | None:
    """Return what may be called; None if there are no tools.

    Raises:
        RefusedError: the tools or the choice make no sense, or a schema cannot be enforced.

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
    offers = [_callable_tool(at, tool.function) for at, tool in enumerate(tools)]
    return Toolbox(
        shown=tuple(_template_tool(tool) for tool in tools),
        offers=tuple(offer for offer in offers if offer.function.name in allowed),
        must_call=_must_call(choice),
        # Who names one function wants it called, not called again and again.
        is_parallel=is_parallel is not False and not isinstance(choice, FunctionChoice),
    )


def _allowed_names(choice: Choice | None, names: Sequence[str]) -> Sequence[str]:
    if choice == "none":
        return ()
    if isinstance(choice, FunctionChoice):
        wanted = {choice.function.name: "tool_choice.function.name"}
    elif isinstance(choice, AllowedToolsChoice):
        wanted = {
            one.function.name: f"tool_choice.allowed_tools.tools[{at}].function.name"
            for at, one in enumerate(choice.allowed_tools.tools)
        }
    else:
        return names
    for name, param in wanted.items():
        if name not in names:
            raise errors.invalid(f"There is no function '{name[:100]}' in 'tools'.", param=param)
    return list(wanted)


def _must_call(choice: Choice | None) -> bool:
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, FunctionChoice)


def _template_tool(tool: Tool) -> dict[str, Json]:
    # Templates read these without asking whether they are there.
    shown = tool.model_dump(exclude_none=True)
    shown["function"].setdefault("description", "")
    shown["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return shown


def _callable_tool(index: int, signature: FunctionSignature) -> CallableTool:
    is_strict = bool(signature.strict)
    given = dict(signature.parameters or _NO_PARAMETERS)
    param = f"tools[{index}].function.parameters"
    if "$ref" not in given:
        given.setdefault("type", "object")
        if given["type"] != "object":
            message = "The parameters of a function are an object: use 'type': 'object'."
            raise errors.invalid(message, param=f"{param}.type")
    try:
        json_schema.check_nesting(given)
        parameters = json_schema.normalize_schema(given, is_strict=is_strict)
    except GrammarError as error:
        raise errors.invalid(f"Invalid schema: {error}", param=param) from error
    function = FunctionSchema(name=signature.name, parameters=parameters)
    return CallableTool(function=function, index=index, is_strict=is_strict)
