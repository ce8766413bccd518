"""Parts that formats of tool calls share: the text around calls, JSON arguments, and arguments between tags. Pure."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from engine.text.formats.literals import (
    Quotes,
    argument_piece,
    literal_as_json,
    quoted_piece,
    read_arguments,
    skip_blanks,
)
from engine.text.formats.reader import Delimiter, Reader, Steps, collector
from engine.text.formats.tools import TEXT, ToolSet, fits, json_kind, quote
from engine.text.spans import CallPiece, SpanRole

NAME: Final = r"([^\s\"'<>\\{}()\[\],:]{1,256})"
GAP: Final = r"\s{0,64}"
DONE: Final = CallPiece(None, "", is_complete=True)
_OBJECT_HEAD: Final = re.compile(
    rf'\{{{GAP}(?:"type"{GAP}:{GAP}"function"{GAP},{GAP})?"(?:name|function)"{GAP}:{GAP}"{NAME}"{GAP},'
    rf'{GAP}"(?:arguments|parameters|args)"{GAP}:{GAP}(?=\{{)'
)
_OBJECT_KEY: Final = re.compile(rf'\{{{GAP}"(?:type|name|function|arguments|parameters)"')
_OBJECT_WINDOW: Final = 1_100
_PLAIN, _STRING = re.compile(r'[^"{}\[\]]+'), re.compile(r'[^"\\]+')
_BRACE: Final = Delimiter({"}": ""})
_TAG: Final = Delimiter({"<": ""})
# Larger values are given on as text rather than read as Python's literals: a MiB would hold the event loop for 3 s.
_MAX_LITERAL: Final = 1 << 15
# A marked call whose name stands behind its arguments is held up to this length.
_MAX_HELD: Final = 1 << 20
# JSON without a marker in front of it that does not begin with a name is text, unless it ends within this length.
_MAX_UNMARKED: Final = 3_000

CallReader = Callable[[Reader, ToolSet], Steps[bool]]
CallContent = Callable[[Reader, ToolSet], Steps[None]]


def head(name: str, arguments: str = "") -> tuple[CallPiece, ...]:
    """Return the first piece of a call."""
    return (CallPiece(name, arguments, is_complete=False),)


def read_content(
    reader: Reader, tools: ToolSet, start: Delimiter, read_call: CallReader
) -> Steps[None]:
    """Read text with calls; blanks between calls and after the last one are hidden.

    `read_call` is called at the start of a call. It returns whether there was a call; otherwise the text there is content.
    """
    has_called = False
    while True:
        if has_called:
            yield from _read_gap(reader, start)
        match = yield from reader.until(start, SpanRole.CONTENT)
        if match is None:
            return
        marker = len(match[0])
        has_called = yield from read_call(reader, tools)
        if not has_called:
            if reader.held():
                yield reader.release(SpanRole.CONTENT)
            else:
                yield reader.take(reader.at + marker, SpanRole.CONTENT)


def read_unmarked_content(
    reader: Reader, tools: ToolSet, bracket: str, read_first: CallReader, rest: CallContent
) -> Steps[None]:
    """Read an answer that may begin with a call without a marker: with a bracket. `rest` reads what follows."""
    yield from reader.hold_blanks()
    is_call = False
    if reader.text.startswith(bracket, reader.at):
        is_call = yield from read_first(reader, tools)
    yield reader.release(SpanRole.HIDDEN if is_call else SpanRole.CONTENT)
    yield from rest(reader, tools)


def _read_gap(reader: Reader, start: Delimiter) -> Steps[None]:
    """Hide blanks after a call, if another call or the end follows; otherwise they are content."""
    while True:
        reader.hold(reader.blanks_end())
        has_text = reader.at < len(reader.text)
        match = start.here(reader.text, reader.at)
        if match or (not has_text and reader.is_final):
            yield reader.release(SpanRole.HIDDEN)
            return
        if has_text and (match is None or reader.is_final):
            yield reader.release(SpanRole.CONTENT)
            return
        yield None


@dataclass(slots=True)
class JsonScanner:
    """Finds the end of a JSON object or array that arrives in pieces."""

    _depth: int = 0
    _is_string: bool = False
    _is_escaped: bool = False

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """Return the end of the value's part in `text` from `at`, and whether the value ends there."""
        length = len(text)
        while at < length:
            if self._is_escaped:
                self._is_escaped = False
            elif run := (_STRING if self._is_string else _PLAIN).match(text, at):
                at = run.end()
                continue
            elif self._is_string:
                self._is_escaped, self._is_string = text[at] == "\\", text[at] != '"'
            elif text[at] == '"':
                self._is_string = True
            elif text[at] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1, True
            at += 1
        return length, False


def read_json(reader: Reader, scanner: JsonScanner | None = None) -> Steps[bool]:
    """Give a JSON value on as it comes, or hold it where it is; return whether it is complete."""
    scanner = scanner or JsonScanner()
    while True:
        end, is_over = scanner.scan(reader.text, reader.at)
        if end > reader.at:
            yield reader.take(end, calls=argument_piece(reader.text[reader.at : end]))
        if is_over or reader.is_final:
            return is_over
        yield None


def hold_json(reader: Reader, limit: int) -> Steps[bool]:
    """Hold a JSON value of at most `limit` characters; return whether it is complete."""
    scanner = JsonScanner()
    while True:
        end, is_over = scanner.scan(reader.text[: reader.at + limit], reader.at)
        limit -= end - reader.at
        reader.hold(end)
        if is_over or limit <= 0 or reader.is_final:
            return is_over
        yield None


def read_object(
    reader: Reader, tools: ToolSet, *, known_only: bool = False
) -> Steps[tuple[bool, bool]]:
    """Read a call that is a JSON object, `{"name": ..., "arguments": {...}}`; text that is held belongs to it.

    Returns whether it is a call, and whether the bracket of the object is still open. A call of another shape is read
    as a whole, up to a length: its name may stand behind its arguments. If it is no call, its text is held.
    """
    match = yield from reader.match(_OBJECT_HEAD, _OBJECT_WINDOW)
    if match is not None and (match[1] in tools or not known_only):
        reader.hold(match.end())
        yield reader.release(SpanRole.HIDDEN, head(match[1]))
        is_over = yield from read_json(reader)
        return True, is_over
    if known_only:
        match = yield from reader.match(_OBJECT_KEY, 100)
        if match is None:
            return False, False
    is_over = yield from hold_json(reader, _MAX_UNMARKED if known_only else _MAX_HELD)
    if not is_over:
        return False, False
    calls = _whole_calls(reader.held().partition("{")[1:], tools, known_only=known_only)
    if calls:
        yield reader.release(SpanRole.HIDDEN, calls)
    return bool(calls), False


def read_objects(
    reader: Reader, tools: ToolSet, following: re.Pattern[str], *, known_only: bool = False
) -> Steps[bool]:
    """Read several calls that are JSON objects; text that is held belongs to the first.

    `following` matches the text between two objects, or, in its group, the text behind the last one.
    """
    has_called = False
    while True:
        is_call, is_open = yield from read_object(reader, tools, known_only=known_only)
        if not is_call:
            return has_called
        has_called = True
        if is_open:
            closing = yield from reader.until(_BRACE, SpanRole.HIDDEN)
            end = reader.at if closing is None else closing.end()
            yield reader.take(end, calls=() if closing is None and reader.is_cut else (DONE,))
        match = yield from reader.match(following, 150)
        if match is not None:
            yield reader.take(match.end())
        if match is None or match.lastindex is not None:
            return True


def _whole_calls(
    text: tuple[str, str], tools: ToolSet, *, known_only: bool
) -> tuple[CallPiece, ...]:
    try:
        parsed: dict[str, Any] = json.loads("".join(text), strict=False)
    except (ValueError, RecursionError):
        return ()
    name: Any = parsed.get("name", parsed.get("function"))
    keys = [key for key in ("arguments", "parameters", "args") if key in parsed]
    arguments: Any = parsed[keys[0]] if keys else {}
    if isinstance(name, dict):  # OpenAI's own form
        name, arguments = name.get("name"), name.get("arguments", arguments)
    if not isinstance(name, str) or not name or (known_only and name not in tools):
        return ()
    if not isinstance(arguments, str):
        try:
            written = json.dumps(arguments, ensure_ascii=False)
            written.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            written = json.dumps(arguments)
        except RecursionError:
            return ()
        arguments = written
    return (CallPiece(name, arguments or "{}", is_complete=True),)


def value_as_json(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value that is written as text, in one of its declared types; a string if it fits none."""
    if kinds == TEXT:
        return quote(text)
    bare = text.strip()
    kind = json_kind(bare)
    if kind == "string" and "string" in kinds:
        return quote(text)
    if fits(kind, kinds):
        return bare
    if kinds and bare in ("True", "False", "None"):
        word = {"True": "true", "False": "false", "None": "null"}[bare]
        return word if fits(json_kind(word), kinds) else quote(text)
    wanted = {"object": "{", "array": "["}
    if bare[:1] in {wanted[kind] for kind in kinds & wanted.keys()} and len(bare) < _MAX_LITERAL:
        converted = literal_as_json(bare)
        if fits(json_kind(converted), kinds):
            return converted
    return quote(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Calls whose arguments stand between tags.

    A closing tag ends a value only where the next argument, or the end of the call, follows; so a value may contain it.
    """

    section: str
    """Opens one or several calls."""
    section_end: str
    """Closes them; empty if `close` does."""
    call: str
    """Expression for the opening tag of a call, with a group for the name."""
    call_prefix: str
    """The text that begins it."""
    close: str
    """Closes a call."""
    argument: str
    """Expression for the opening tag of an argument, with a group for its key."""
    argument_prefix: str
    argument_end: str
    trims_newlines: bool = False
    """True if a newline after the opening tag and before the closing one is no part of the value."""
    has_types: bool = False
    """True if a second group of `argument` says whether the value is a string."""
    is_bare: bool = False
    """True if models leave the section out at times, or always; then only known tools are called."""
    cdata: tuple[str, str] | None = None
    """Around values with tags or newlines, between the tags of the argument."""
    whole: str = ""
    """Expression for what opens all arguments as one JSON object instead."""
    start: Delimiter = field(init=False, compare=False)
    _value_end: Delimiter = field(init=False, compare=False)
    _cdata_end: Delimiter | None = field(init=False, compare=False)
    _opening: re.Pattern[str] = field(init=False, compare=False)
    _following: re.Pattern[str] = field(init=False, compare=False)
    """Tags that may follow within a call."""

    def __post_init__(self) -> None:
        """Compile the delimiters."""
        over = (
            rf"{GAP}(?:{re.escape(self.section_end)}|{re.escape(self.call_prefix)})"
            if self.section_end
            else ""
        )
        close, argument = re.escape(self.close), re.escape(self.argument_prefix)
        follows = rf"(?={GAP}(?:{argument}|{close}{over}))"
        last = (
            rf"(?={GAP}(?:{argument}|(?:{close}{GAP}(?:{re.escape(self.section_end)})?{GAP})?\Z))"
        )
        closed = rf"(?={over})"
        markers, lasts = {self.argument_end: follows}, {self.argument_end: last}
        cdata_end = None
        if self.cdata is not None:
            end = rf"{GAP}{re.escape(self.argument_end)}"
            cdata_end = Delimiter(
                {self.cdata[1]: end + follows},
                last={self.cdata[1]: f"(?:{end}{last}|{GAP}\\Z)"},
                window=300,
            )
        object.__setattr__(self, "_cdata_end", cdata_end)
        if self.section_end:
            markers[self.close] = closed
            lasts[self.close] = rf"(?={GAP}(?:{re.escape(self.section_end)})?\s*\Z)"
        if self.trims_newlines:
            markers = {f"\n{text}": then for text, then in markers.items()} | markers
            lasts = {f"\n{text}": then for text, then in lasts.items()} | lasts
        object.__setattr__(self, "_value_end", Delimiter(markers, last=lasts, window=200))
        starts = [self.section, *([self.call_prefix] if self.is_bare else [])]
        object.__setattr__(self, "start", Delimiter(dict.fromkeys(filter(None, starts), "")))
        opening = re.compile(f"(?:{re.escape(self.section)}{GAP})?{self.call}")
        object.__setattr__(self, "_opening", opening)
        whole = f"|({self.whole})" if self.whole else ""
        following = re.compile(rf"{GAP}(?:{self.argument}|{close}{whole})")
        object.__setattr__(self, "_following", following)

    def content(self, reader: Reader, tools: ToolSet) -> Steps[None]:
        """Read text with such calls."""
        yield from read_content(reader, tools, self.start, self.read)

    def read(self, reader: Reader, tools: ToolSet) -> Steps[bool]:
        """Read the calls of a section."""
        match = yield from reader.match(self._opening, 500)
        if match is None:
            return False
        is_marked = self.section and match[0].startswith(self.section)
        if not is_marked and match[1] not in tools:
            return False
        while match is not None:
            yield reader.take(match.end(), calls=head(match[1], "{"))
            yield from self._read_arguments(reader, match[1], tools)
            if not self.section_end:
                return True
            match = yield from reader.match(
                re.compile(rf"{GAP}(?:{re.escape(self.section_end)}|{self.call})"), 500
            )
            if match is not None and match[1] is None:
                yield reader.take(match.end())
                return True
        return True

    def _read_arguments(self, reader: Reader, name: str, tools: ToolSet) -> Steps[None]:
        comma = ""
        while True:
            match = yield from reader.match(self._following, 500)
            if match is None:
                if not (yield from skip_blanks(reader)):
                    break
                yield reader.take(reader.at + 1)  # no part of a call
                yield from reader.until(_TAG, SpanRole.HIDDEN)
                continue
            if match[1] is None:
                yield reader.take(match.end())
                if not self.whole or match[match.re.groups] is None:
                    break
                yield from self._read_whole(reader)
                return
            key = argument_piece(f"{comma}{quote(match[1])}: ")
            yield reader.take(match.end(), calls=key)
            comma = ", "
            kinds = tools.kinds(name, match[1])
            if self.has_types:
                kinds = TEXT if match[2] in ("true", "string", None) else kinds - TEXT
            yield from self._read_value(reader, kinds)
        if reader.at < len(reader.text) or not reader.is_cut:
            yield reader.take(reader.at, calls=(CallPiece(None, "}", is_complete=True),))

    def _read_whole(self, reader: Reader) -> Steps[None]:
        """Read the rest of a JSON object, and the end of the call."""
        is_over = yield from read_json(reader, JsonScanner(_depth=1))
        end = yield from reader.until(Delimiter({self.close: ""}), SpanRole.HIDDEN)
        if end is not None:
            yield reader.take(end.end())
        if is_over or not reader.is_cut:
            yield reader.take(reader.at, calls=(DONE,))

    def _read_value(self, reader: Reader, kinds: frozenset[str]) -> Steps[None]:
        value_end = self._value_end
        if self.cdata is not None and self._cdata_end is not None:
            opening = re.compile(rf"{GAP}{re.escape(self.cdata[0])}")
            match = yield from reader.match(opening, 80)
            if match is not None:
                yield reader.take(match.end())
                value_end = self._cdata_end
        if self.trims_newlines:
            yield from reader.has_more()
            if reader.text.startswith("\n", reader.at):
                yield reader.take(reader.at + 1)
        if kinds == TEXT:
            yield reader.take(reader.at, calls=argument_piece('"'))
            end = yield from reader.until(value_end, quoted_piece)
            written = '"'
        else:
            parts: list[str] = []
            end = yield from reader.until(value_end, collector(parts))
            written = value_as_json("".join(parts), kinds)
        if end is not None or not reader.is_cut:
            is_argument = end is not None and self.argument_end in end[0]
            stop = end.end() if end is not None and is_argument else reader.at
            yield reader.take(stop, calls=argument_piece(written))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """Calls with JSON arguments, each behind a head with its name, in a section."""

    section: str
    head: str
    """Expression for the head of a call, with a group for the name."""
    tail: str
    """Closes a call; empty if the arguments do."""
    section_end: str
    start: Delimiter = field(init=False, compare=False)
    _opening: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Compile what opens a section."""
        object.__setattr__(self, "start", Delimiter({self.section: ""}))
        opening = re.compile(rf"{re.escape(self.section)}{GAP}{self.head}{GAP}(?=[{{])")
        object.__setattr__(self, "_opening", opening)

    def content(self, reader: Reader, tools: ToolSet) -> Steps[None]:
        """Read text with such calls."""
        yield from read_content(reader, tools, self.start, self.read)

    def read(self, reader: Reader, _: ToolSet) -> Steps[bool]:
        """Read the calls of a section."""
        match = yield from reader.match(self._opening, 900)
        if match is None:
            return False
        head_pattern = f"{self.head}{GAP}(?=[{{])"
        end = re.escape(self.section_end) if self.section_end else r"(?!)"
        following = re.compile(rf"{GAP}(?:{head_pattern}|{end})")
        tail = (
            Delimiter(dict.fromkeys(filter(None, (self.tail, self.section_end)), ""))
            if self.tail
            else None
        )
        while match is not None:
            yield reader.take(match.end(), calls=head(match[1]))
            is_over = yield from read_json(reader)
            if not is_over:
                if not reader.is_cut:
                    yield reader.take(reader.at, calls=(DONE,))
                return True
            if tail is not None:
                closing = yield from reader.until(tail, SpanRole.HIDDEN)
                if closing is not None and closing[0] == self.tail:
                    yield reader.take(closing.end())
            yield reader.take(reader.at, calls=(DONE,))
            if not self.section_end:
                return True
            match = yield from reader.match(following, 900)
            if match is not None and match[1] is None:
                yield reader.take(match.end())
                return True
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralCalls:
    """Calls with a name and a list of literals, such as `name(a=1)`, in a section."""

    section: str
    """Opens the calls; empty for calls of known tools without a marker."""
    call: str
    """Expression for what opens a call, with a group for the name."""
    following: str
    """Expression for what follows a call: another one, with its name in a group, or the end of the section."""
    quotes: Quotes

    def content(self, reader: Reader, tools: ToolSet) -> Steps[None]:
        """Read text with such calls."""
        yield from read_content(reader, tools, Delimiter({self.section: ""}), self.read)

    def read(self, reader: Reader, tools: ToolSet) -> Steps[bool]:
        """Read the calls of a section."""
        opening = re.escape(self.section) + GAP if self.section else ""
        match = yield from reader.match(re.compile(opening + self.call), 500)
        if match is None or (not self.section and match[1] not in tools):
            return False
        following = re.compile(f"{GAP}(?:{self.following})")
        while match is not None:
            yield reader.take(match.end(), calls=head(match[1]))
            yield from read_arguments(reader, self.quotes, tools, match[1])
            match = yield from reader.match(following, 500)
            if match is not None and match[1] is None:
                yield reader.take(match.end())
                return True
        return True
