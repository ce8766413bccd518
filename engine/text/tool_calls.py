"""Parser that cuts tool calls from text by the markers around them. Pure: no mlx, no I/O.

The format of a model's calls is data: its markers, a function that parses one call, and, where arguments are JSON,
the syntax in which a grammar can enforce them. Functions for formats other than JSON come from mlx-lm.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.grammar.lark import CallSyntax
from engine.text.spans import CallPiece, Span, SpanRole, partial_marker_length

Json: TypeAlias = Any
Tools: TypeAlias = Sequence[Mapping[str, Json]]  # as chat templates take them
CallParser: TypeAlias = Callable[[str, Tools], Json]

# The head of a JSON call up to its arguments. After it, the arguments can be streamed as they come.
_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII
)

# Raised by the parsers of mlx-lm for malformed calls.
_PARSER_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    SyntaxError,
    RecursionError,
    MemoryError,
)


def parse_json(text: str, _: Tools) -> Json:
    """Parse `{"name": ..., "arguments": {...}}`, the format of Hermes and Qwen."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


HERMES = CallSyntax(
    start="<tool_call>",
    before='\n{"name": "',
    middle='", "arguments": ',
    after="}\n",
    end="</tool_call>",
    between="\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """The way in which one model writes tool calls."""

    start: str
    end: str
    """Empty if a call ends with the text."""
    parse: CallParser
    syntax: CallSyntax | None
    """The syntax that a grammar enforces; None if calls can only be parsed."""
    is_native: bool
    """True if the model's chat template renders tools, calls and results; otherwise the prompt describes them."""
    is_json: bool = False
    """True if a call is one JSON object, so that an end marker inside a JSON string does not end it."""


# For models whose template knows no tools, and for enforced calls of models whose own format cannot be enforced.
PLAIN = ToolCallFormat(
    start=HERMES.start,
    end=HERMES.end,
    parse=parse_json,
    syntax=HERMES,
    is_native=False,
    is_json=True,
)


def tool_instructions(tools: Tools) -> str:
    """Return the description of tools for the prompt, in the wording of Hermes' and Qwen's training data."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


@dataclass(slots=True)
class _ObjectScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    _depth: int = 0
    _is_string: bool = False
    _is_escaped: bool = False

    def length(self, text: str) -> tuple[int, bool]:
        """Return the length of the object's part in `text`, and whether the object ends there."""
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = character == "\\", character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1, True
        return len(text), False


@dataclass(slots=True, kw_only=True)
class ToolCallParser:
    """Cuts content into text and tool calls.

    A call that cannot be parsed, or whose tool does not exist, is shown as text. Blanks between calls and after the
    last one are hidden.
    """

    call_format: ToolCallFormat | None
    tools: Tools = ()
    must_call: bool = False
    """True if the answer can only be calls: text that is left over is then a cut call and hidden."""
    _held: str = ""
    _is_inside: bool = False
    _object: _ObjectScanner | None = None
    """Set while arguments are read."""
    _has_arguments: bool = False
    """True if all arguments of the open call were yielded."""
    _has_called: bool = False
    _names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the names of the tools."""
        self._names = frozenset(tool["function"]["name"] for tool in self.tools)

    def feed(self, text: str) -> Iterator[Span]:
        """Add text; yield the spans that are decided."""
        if self.call_format is None:
            yield Span(SpanRole.CONTENT, text)
            return
        self._held += text
        while self._held:
            before = (self._is_inside, self._held)
            if self._object is not None:
                yield self._arguments(self._object)
            else:
                yield from (self._inside if self._is_inside else self._outside)(self.call_format)
            if (self._is_inside, self._held) == before:
                return

    def flush(self) -> Iterator[Span]:
        """Yield the text that was held back: no more text follows."""
        held, self._held = self._held, ""
        if self.must_call and not (
            self.call_format is not None and self._is_inside and not self.call_format.end
        ):
            yield Span(SpanRole.HIDDEN, held)
            return
        if not self._is_inside or self.call_format is None:
            yield Span(
                SpanRole.HIDDEN if self._has_called and held.isspace() else SpanRole.CONTENT, held
            )
            return
        calls = () if self.call_format.end else self._calls(self.call_format, held)
        yield Span(
            SpanRole.HIDDEN if calls or self._has_arguments else SpanRole.CONTENT, held, calls
        )

    def _outside(self, call_format: ToolCallFormat) -> Iterator[Span]:
        at = self._held.find(call_format.start)
        if at >= 0:
            is_gap = self._has_called and self._held[:at].isspace()  # blanks between two calls
            yield self._cut(at, SpanRole.HIDDEN if is_gap else SpanRole.CONTENT)
            self._is_inside = True
            return
        decided = len(self._held) - partial_marker_length(self._held, call_format.start)
        if self._has_called and self._held[:decided].isspace():
            return
        yield self._cut(decided, SpanRole.CONTENT)

    def _inside(self, call_format: ToolCallFormat) -> Iterator[Span]:
        """Find the arguments of a call, or its end; `_held` begins with the start marker or after the arguments."""
        if self._has_arguments:
            yield from self._end(call_format)
            return
        head = _CALL_HEAD.match(self._held, len(call_format.start)) if call_format.is_json else None
        if head is not None and head[1] in self._names:
            self._object = _ObjectScanner()
            yield self._cut(
                head.end(), SpanRole.HIDDEN, (CallPiece(head[1], "", is_complete=False),)
            )
            return
        if not call_format.end:
            return
        at = len(call_format.start)
        while (at := self._held.find(call_format.end, at)) >= 0:
            edge = at + len(call_format.end)
            calls = self._calls(call_format, self._held[:at])
            if calls:
                self._is_inside, self._has_called = False, True
                yield self._cut(edge, SpanRole.HIDDEN, calls)
                return
            if not call_format.is_json:
                self._is_inside = False
                yield self._cut(edge, SpanRole.CONTENT)
                return
            at = edge

    def _arguments(self, scanner: _ObjectScanner) -> Span:
        length, is_over = scanner.length(self._held)
        if is_over:
            self._object, self._has_arguments = None, True
        piece = CallPiece(None, self._held[:length], is_complete=False)
        return self._cut(length, SpanRole.HIDDEN, (piece,))

    def _end(self, call_format: ToolCallFormat) -> Iterator[Span]:
        """Hide the text between the arguments and the end of a call."""
        at = self._held.find(call_format.end)
        if at >= 0:
            self._is_inside, self._has_arguments, self._has_called = False, False, True
            done = CallPiece(None, "", is_complete=True)
            yield self._cut(at + len(call_format.end), SpanRole.HIDDEN, (done,))

    def _calls(self, call_format: ToolCallFormat, text: str) -> tuple[CallPiece, ...]:
        """Return the calls in a text that begins with a start marker; () if it cannot be parsed."""
        try:
            parsed = call_format.parse(text[len(call_format.start) :], self.tools)
            calls = tuple(
                _call_piece(call) for call in (parsed if isinstance(parsed, list) else [parsed])
            )
        except _PARSER_ERRORS:
            return ()
        return calls if all(call.name in self._names for call in calls) else ()

    def _cut(self, length: int, role: SpanRole, calls: tuple[CallPiece, ...] = ()) -> Span:
        piece, self._held = self._held[:length], self._held[length:]
        return Span(role, piece, calls)


def _call_piece(parsed: Json) -> CallPiece:
    arguments = parsed["arguments"] if "arguments" in parsed else parsed.get("parameters", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(parsed["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a call needs a name and an object of arguments")
    written = json.dumps(arguments, ensure_ascii=False)
    # JSON can spell half a surrogate pair, UTF-8 cannot.
    if not written.isascii() and any("\ud800" <= character <= "\udfff" for character in written):
        written = json.dumps(arguments)
    return CallPiece(parsed["name"], written, is_complete=True)
