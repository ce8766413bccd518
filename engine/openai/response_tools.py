"""Tools of `/v1/responses`: functions, freeform tools and namespaces of both, each as a function of a chat. Pure.

Hosted tools run at OpenAI's servers only. They are left out, so that an agent that sends them beside its own still works.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Tag

from engine.openai import parameters
from engine.openai.output_options import MAX_TOOLS
from engine.openai.parameters import StrictModel
from schemas.wire import errors

Json: TypeAlias = dict[str, Any]

# By type, without the date that some have at their end.
HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_preview",
    }
)  # fmt: skip
_DATE = re.compile(r"_\d{4}_\d{2}_\d{2}$")
FREEFORM_PARAMETERS: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a freeform tool as a function."""


def type_discriminator(default: str | None = None) -> Discriminator:
    """Return a discriminator by the field `type`.

    Its tags are not identifiers, so that `_error_path` leaves them out of paths.
    """

    def tag(value: Any) -> str | None:
        kind = (
            value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        )
        return f"a {kind}" if isinstance(kind, str) else None

    return Discriminator(
        tag,
        custom_error_type="kind",
        custom_error_message="It must be an object of a known type",
    )


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Without effect: all tools are in the prompt."""
    output_schema: Json | None = None


class FreeformFormat(StrictModel):
    """The form of a freeform tool's input: any text, or one that a grammar describes."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class FreeformTool(StrictModel):
    """A tool whose input is a text, not JSON."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: FreeformFormat | None = None
    defer_loading: bool | None = None


class NamespaceTool(StrictModel):
    """A group of tools under one name."""

    type: Literal["namespace"]
    name: str
    description: str = ""
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("a function")] | Annotated[FreeformTool, Tag("a custom")],
            type_discriminator(),
        ]
    ]


AnyTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[FreeformTool, Tag("a custom")]
    | Annotated[NamespaceTool, Tag("a namespace")],
    type_discriminator(),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool:
    """One tool of a request, as the client knows it."""

    name: str
    namespace: str | None
    is_freeform: bool
    path: str
    """Its place in the request."""


def drop_hosted(fields: Json) -> list[str]:
    """Remove the hosted tools of a body; return the names by which the client is told.

    Raises:
        RefusedError: a type is unknown, or a choice names a hosted tool.

    """
    tools = fields.get("tools")
    parameters.check_count(tools, MAX_TOOLS, "tools")
    left_out: list[str] = []
    if isinstance(tools, list):
        fields["tools"] = _without_hosted(tools, "tools", left_out)
        for at, tool in enumerate(fields["tools"]):
            members = tool.get("tools") if isinstance(tool, dict) else None
            if isinstance(members, list):
                parameters.check_count(members, MAX_TOOLS, f"tools[{at}].tools")
                tool["tools"] = _without_hosted(members, f"tools[{at}].tools", left_out)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        if isinstance(kind, str) and _DATE.sub("", kind) in HOSTED:
            raise errors.invalid(
                f"This engine has no tool '{kind[:50]}'; choose a function or a custom tool.",
                param="tool_choice",
            )
        members = choice.get("tools")
        if isinstance(members, list):
            parameters.check_count(members, MAX_TOOLS, "tool_choice.tools")
            choice["tools"] = _without_hosted(members, "tool_choice.tools", [])
    return list(dict.fromkeys(left_out))


def _without_hosted(tools: list[Any], where: str, left_out: list[str]) -> list[Any]:
    """Return the tools that are not hosted; add the names of the others to `left_out`."""
    remaining: list[Any] = []
    for at, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        name = _DATE.sub("", kind) if isinstance(kind, str) else ""
        if name in HOSTED:
            left_out.append(f"tools.{name}")
            continue
        if name and name not in ("function", "custom", "namespace"):
            raise errors.invalid(
                f"'{name[:50]}' is no type of tool; use 'function' or 'custom', and run the tool yourself.",
                param=f"{where}[{at}].type",
            )
        remaining.append(tool)
    return remaining


def flatten(tools: list[FunctionTool | FreeformTool | NamespaceTool]) -> Iterator[
    tuple[ResponseTool, FunctionTool | FreeformTool]
]:  # fmt: skip
    """Yield each tool with its place, those of a namespace one after the other."""
    for at, tool in enumerate(tools):
        if not isinstance(tool, NamespaceTool):
            yield _identity(tool, None, f"tools[{at}]"), tool
            continue
        for index, member in enumerate(tool.tools):
            yield _identity(member, tool.name, f"tools[{at}].tools[{index}]"), member


def _identity(tool: FunctionTool | FreeformTool, namespace: str | None, path: str) -> ResponseTool:
    return ResponseTool(
        name=tool.name,
        namespace=namespace,
        is_freeform=isinstance(tool, FreeformTool),
        path=path,
    )


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees: that of a namespace comes first, as in `mail__send`."""
    if not namespace or name.startswith(namespace):
        return name
    is_parted = namespace.endswith("_") or name.startswith("_")
    return f"{namespace}{'' if is_parted else '__'}{name}"


def chat_tool(tool: FunctionTool | FreeformTool, namespace: str | None) -> Json:
    """Return a tool as a function of a chat."""
    function: Json = {"name": chat_name(tool.name, namespace)}
    if isinstance(tool, FunctionTool):
        function |= tool.model_dump(include={"description", "parameters", "strict"})
    else:
        texts = [tool.description] if tool.description else []
        if tool.format is not None and tool.format.definition:
            syntax = tool.format.syntax or "lark"
            texts.append(f"`input` matches this {syntax} grammar:\n{tool.format.definition}")
        function |= {"description": "\n\n".join(texts), "parameters": FREEFORM_PARAMETERS}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def freeform_arguments(text: str) -> str:
    """Return the input of a freeform tool as the arguments of its function."""
    return json.dumps({"input": text}, ensure_ascii=False)


_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_HEAD = 64
# Whole characters of a JSON string. The group is not possessive: before 3.11.4, Python then matches half an escape.
_TEXT = re.compile(
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)
# An escape needs no more to be decided.
_LONGEST_ESCAPE = 12


@dataclass(slots=True)
class FreeformInput:
    """Reads the text in `{"input": "..."}` while the JSON arrives in pieces."""

    _pending: str = ""
    _others: list[str] = field(default_factory=list)
    """Arguments of another form."""
    _state: Literal["head", "text", "other", "over"] = "head"

    def take(self, piece: str) -> str:
        """Return the text that a piece completes; may be empty."""
        if self._state == "other":
            self._others.append(piece)
        if self._state in ("other", "over"):
            return ""
        self._pending += piece
        if self._state == "head":
            head = _HEAD.match(self._pending)
            if head is None:
                if len(self._pending) > _LONGEST_HEAD:
                    self._state, self._pending, self._others = "other", "", [self._pending]
                return ""
            self._state, self._pending = "text", self._pending[head.end() :]
        return self._text()

    def _text(self) -> str:
        pieces: list[str] = []
        at, pending = 0, self._pending
        while at < len(pending):
            match = _TEXT.match(pending, at)
            if match is not None:
                # Models write line breaks as they are, which JSON has not.
                pieces.append(json.loads(f'"{match[0]}"', strict=False))
                at = match.end()
            elif pending[at] == '"':
                self._state, at = "over", len(pending)
            elif len(pending) - at < _LONGEST_ESCAPE:
                break
            else:
                is_code = pending[at + 1] == "u"
                pieces.append("\ufffd" if is_code else "\\")  # half a character, or no escape
                at += 6 if is_code else 1
        self._pending = pending[at:]
        return "".join(pieces)

    def end(self) -> str:
        """Return the rest of the text: all of it if the arguments have another form."""
        if self._state not in ("head", "other"):
            return ""
        arguments = "".join(self._others) or self._pending
        self._state, self._pending, self._others = "over", "", []
        try:
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return arguments
        texts = list(value.values()) if isinstance(value, dict) else [value]
        if isinstance(value, dict) and isinstance(value.get("input"), str):
            texts = [value["input"]]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments


Tools: TypeAlias = Mapping[str, ResponseTool]
"""The tools of a request by the names that the model sees."""
