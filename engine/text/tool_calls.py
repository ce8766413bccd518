"""Calls told from text by the markers around them, in whatever dialect a model was taught. Pure: no mlx, no I/O.

The dialect of a model is data: its markers, how its calls are parsed, and, where arguments are JSON, the form in
which they can be enforced. The parsers of other dialects are mlx-lm's, given as functions.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.grammar.lark import CallSyntax
from engine.text.spans import CallPiece, Span, SpanRole, partial_marker_length

Json: TypeAlias = Any
Tools: TypeAlias = Sequence[Mapping[str, Json]]  # as templates take them
CallParser: TypeAlias = Callable[[str, Tools], Json]

# The head of a call in JSON, up to its arguments: from here on they can be told as they come.
_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII
)

# What parsers of other people's raise for what a model made up.
_PARSER_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, SyntaxError)


def parse_json(text: str, _: Tools) -> Json:
    """Read `{"name": ..., "arguments": {...}}`, as Hermes and Qwen write it."""
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
    """How one model writes calls."""

    start: str
    end: str
    """Empty: a call ends with the text."""
    parse: CallParser
    form: CallSyntax | None
    """How it is enforced; None: only read."""
    is_native: bool
    """The model's chat template shows tools, calls and results; otherwise they are described in words of ours."""
    is_json: bool = False
    """A call's text is one JSON object, so that an end marker within a string of it ends nothing."""


# For models whose template knows no tools, and for calls that must be enforced where the own dialect cannot be.
PLAIN = ToolCallFormat(
    start=HERMES.start,
    end=HERMES.end,
    parse=parse_json,
    form=HERMES,
    is_native=False,
    is_json=True,
)


def tool_instructions(tools: Tools) -> str:
    """Return what a model is told of its tools, in the words that Hermes and Qwen were taught with."""
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
    """Finds the end of a JSON object."""

    _depth: int = 0
    _is_text: bool = False
    _is_escaped: bool = False

    def length(self, text: str) -> tuple[int, bool]:
        """Return how much of the next text belongs to the object, and whether it ends there."""
        for at, one in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = one == "\\", one != '"'
            elif one == '"':
                self._is_text = True
            elif one in "{[":
                self._depth += 1
            elif one in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1, True
        return len(text), False


@dataclass(slots=True, kw_only=True)
class ToolCallParser:
    """Cuts content into text and calls. A call that cannot be read, or of no tool offered, is shown as text.

    Blanks between calls, and behind the last, are hidden.
    """

    dialect: ToolCallFormat | None
    tools: Tools = ()
    must_call: bool = False
    """Whether there can be nothing but calls: what is left at a cut is then the beginning of one, and no text."""
    _held: str = ""
    _is_inside: bool = False
    _object: _ObjectScanner | None = None
    """The arguments that are being read."""
    _is_told: bool = False
    """Whether the open call's arguments were told in full."""
    _has_called: bool = False
    _names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Remember what may be called."""
        self._names = frozenset(tool["function"]["name"] for tool in self.tools)

    def feed(self, text: str) -> Iterator[Span]:
        """Take the next text; yield what is decided."""
        if self.dialect is None:
            yield Span(SpanRole.CONTENT, text)
            return
        self._held += text
        while self._held:
            before = (self._is_inside, self._held)
            if self._object is not None:
                yield self._arguments(self._object)
            else:
                yield from (self._inside if self._is_inside else self._outside)(self.dialect)
            if (self._is_inside, self._held) == before:
                return

    def flush(self) -> Iterator[Span]:
        """Yield what was held back: the text is over."""
        held, self._held = self._held, ""
        if self.must_call and not (
            self.dialect is not None and self._is_inside and not self.dialect.end
        ):
            yield Span(SpanRole.HIDDEN, held)
            return
        if not self._is_inside or self.dialect is None:
            yield Span(
                SpanRole.HIDDEN if self._has_called and held.isspace() else SpanRole.CONTENT, held
            )
            return
        calls = () if self.dialect.end else self._calls(self.dialect, held)
        yield Span(SpanRole.HIDDEN if calls or self._is_told else SpanRole.CONTENT, held, calls)

    def _outside(self, dialect: ToolCallFormat) -> Iterator[Span]:
        at = self._held.find(dialect.start)
        if at >= 0:
            is_gap = self._has_called and self._held[:at].isspace()  # blanks between two calls
            yield self._cut(at, SpanRole.HIDDEN if is_gap else SpanRole.CONTENT)
            self._is_inside = True
            return
        sure = len(self._held) - partial_marker_length(self._held, dialect.start)
        if self._has_called and self._held[:sure].isspace():
            return
        yield self._cut(sure, SpanRole.CONTENT)

    def _inside(self, dialect: ToolCallFormat) -> Iterator[Span]:
        """Find the arguments of a call, or its end; `_held` begins with its start marker, or behind its arguments."""
        if self._is_told:
            yield from self._end(dialect)
            return
        head = _CALL_HEAD.match(self._held, len(dialect.start)) if dialect.is_json else None
        if head is not None and head[1] in self._names:
            self._object = _ObjectScanner()
            yield self._cut(
                head.end(), SpanRole.HIDDEN, (CallPiece(head[1], "", is_complete=False),)
            )
            return
        if not dialect.end:
            return
        at = len(dialect.start)
        while (at := self._held.find(dialect.end, at)) >= 0:
            edge = at + len(dialect.end)
            calls = self._calls(dialect, self._held[:at])
            if calls:
                self._is_inside, self._has_called = False, True
                yield self._cut(edge, SpanRole.HIDDEN, calls)
                return
            if not dialect.is_json:
                self._is_inside = False
                yield self._cut(edge, SpanRole.CONTENT)
                return
            at = edge

    def _arguments(self, reading: _ObjectScanner) -> Span:
        length, is_over = reading.length(self._held)
        if is_over:
            self._object, self._is_told = None, True
        piece = CallPiece(None, self._held[:length], is_complete=False)
        return self._cut(length, SpanRole.HIDDEN, (piece,))

    def _end(self, dialect: ToolCallFormat) -> Iterator[Span]:
        """Pass over what is between the arguments and the end of a call."""
        at = self._held.find(dialect.end)
        if at >= 0:
            self._is_inside, self._is_told, self._has_called = False, False, True
            done = CallPiece(None, "", is_complete=True)
            yield self._cut(at + len(dialect.end), SpanRole.HIDDEN, (done,))

    def _calls(self, dialect: ToolCallFormat, text: str) -> tuple[CallPiece, ...]:
        """Return the calls in a text that begins with a start marker; none if it cannot be read."""
        try:
            parsed = dialect.parse(text[len(dialect.start) :], self.tools)
            calls = tuple(
                _call_piece(one) for one in (parsed if isinstance(parsed, list) else [parsed])
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
        raise TypeError("a call needs a name, and an object of arguments")
    written = json.dumps(arguments, ensure_ascii=False)
    # Half a surrogate pair, which JSON can spell and UTF-8 cannot.
    if not written.isascii() and any("\ud800" <= one <= "\udfff" for one in written):
        written = json.dumps(arguments)
    return CallPiece(parsed["name"], written, is_complete=True)
