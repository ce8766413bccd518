"""Reads values as Python or Gemma writes them, and gives them on as JSON while they come. Pure.

It accepts more than both languages: JSON's words, missing quotes, commas and brackets, and quotes inside strings that
are not followed by what may follow a string.
"""

import re
from typing import Final

from engine.text.formats.reader import BLANKS, Delimiter, Reader, Steps
from engine.text.formats.tools import ANY, TEXT, ToolSet, json_kind, quote
from engine.text.spans import CallPiece

_AFTER_STRING: Final = r"(?=\s{0,64}[,:)\]}])"
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_BARE_END: Final = Delimiter(dict.fromkeys(",)]}", ""))
_KEY_END: Final = Delimiter(dict.fromkeys(",)]}:=", ""))
_ESCAPE: Final = re.compile(
    r"\\(?:(u[0-9a-fA-F]{4}|[nrtbf\"\\/])|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_ESCAPE_LENGTH: Final = 10


class Quote:
    """Quotation mark of strings."""

    def __init__(self, mark: str, *, has_escapes: bool) -> None:
        self.mark = mark
        escape = {"\\": ""} if has_escapes else {}
        self.end = Delimiter(
            {**escape, mark: _AFTER_STRING}, last={**escape, mark: r"(?=\s*\Z)"}, window=65
        )


_QUOTES: Final = tuple(Quote(mark, has_escapes=True) for mark in ('"""', "'''", '"', "'"))
PYTHON: Final = _QUOTES


def token_quotes(mark: str) -> tuple[Quote, ...]:
    """Return the quotation marks of Gemma, whose own is a token."""
    return (Quote(mark, has_escapes=False), *_QUOTES[2:3])


def _piece(text: str) -> tuple[CallPiece, ...]:
    return (CallPiece(None, text, is_complete=False),)


def quoted_piece(text: str) -> tuple[CallPiece, ...]:
    """Return a part of a JSON string as a piece of a call."""
    return _piece(quote(text)[1:-1])


def skip_blanks(reader: Reader) -> Steps[bool]:
    """Hide blanks; return whether text follows."""
    while True:
        end = reader.blanks_end()
        if end > reader.at:
            yield reader.take(end)
        if reader.at < len(reader.text) or reader.is_final:
            return reader.at < len(reader.text)
        yield None


def read_arguments(
    reader: Reader, quotes: tuple[Quote, ...], tools: ToolSet, name: str
) -> Steps[None]:
    """Read the arguments of a call behind its opening bracket, and the closing one: `a=1)` or `a:1}`."""
    yield reader.take(reader.at, calls=_piece("{"))
    yield from _read(reader, _LiteralScanner(quotes, tools, name))
    if not reader.is_cut or reader.at < len(reader.text):
        yield reader.take(reader.at, calls=(CallPiece(None, "", is_complete=True),))


def literal_as_json(text: str) -> str:
    """Return a literal of Python as JSON."""
    scanner = _LiteralScanner(PYTHON)
    _, written, is_over = scanner.scan(text, 0, is_final=True)
    return written if is_over else written + scanner.rest()


def _read(reader: Reader, scanner: "_LiteralScanner") -> Steps[None]:
    while True:
        end, written, is_over = scanner.scan(reader.text, reader.at, is_final=reader.is_final)
        if is_over or end > reader.at:
            yield reader.take(end, calls=_piece(written))
        if is_over:
            return
        if reader.is_final:
            break
        yield None
    if not reader.is_cut:
        yield reader.take(reader.at, calls=_piece(scanner.rest()))


class _LiteralScanner:
    """Converts a value, or the arguments of a call, that arrive in pieces."""

    def __init__(
        self, quotes: tuple[Quote, ...], tools: ToolSet | None = None, name: str = ""
    ) -> None:
        self._quotes = quotes
        self._tools = tools
        """Set if arguments of the call `name` are read."""
        self._name = name
        self._kinds = ANY
        """Of the argument."""
        self._key: list[str] = []
        self._closers = [] if tools is None else ["}"]
        self._comma = ""
        """Before the next item."""
        self._missing = "null" if tools is None else ""
        """Before a bracket that closes too early."""
        self._quote: Quote | None = None
        """Of the string that is open."""
        self._words: list[str] = []
        """A value without quotes."""

    def rest(self) -> str:
        """Return what is missing at the end of a text."""
        written = '"' if self._quote is not None else ""
        if self._words:
            written = self._bare()
        if written:
            self._end_item()
        return written + self._missing + "".join(reversed(self._closers))

    def scan(self, text: str, at: int, *, is_final: bool) -> tuple[int, str, bool]:
        """Return the end of what is converted, its JSON, and whether the value ends there."""
        written: list[str] = []
        while at < len(text):
            if self._quote is not None:
                end, piece = self._string(self._quote, text, at, is_final=is_final)
            elif self._words:
                end, piece = self._word(text, at)
            else:
                blanks = BLANKS.match(text, at)
                at = at if blanks is None else blanks.end()
                if at == len(text):
                    break
                end, piece = self._item(text, at, is_final=is_final)
            written.append(piece)
            is_open = self._closers or self._quote is not None or self._words
            if not is_open and not self._missing:
                return end, "".join(written), True
            if end == at and not piece and not self._words:
                break
            at = end
        return at, "".join(written), False

    def _item(self, text: str, at: int, *, is_final: bool) -> tuple[int, str]:
        if text[at] not in (",:=()[]{}" if self._missing == ": null" else ",:()[]{}"):
            return self._start(text, at, is_final=is_final)
        character, comma, missing = text[at], self._comma, self._missing
        if character in ")]}" and self._closers:
            closer = self._closers.pop()
            self._comma, self._missing = ", ", ""
            return at + 1, missing + closer
        if character in ",:)]}" and not self._closers:  # no value at all
            self._missing = ""
            return at, "null"
        if character == ",":
            self._comma, self._missing = ", " if missing else comma, ""
            return at + 1, missing
        if character in ":=":
            is_value = missing == ": null"
            self._comma, self._missing = ("", "null") if is_value else (comma, missing)
            return at + 1, ": " if is_value else ""
        self._closers.append("}" if character == "{" else "]")
        self._comma, self._missing = "", ""
        return at + 1, comma + ("{" if character == "{" else "[")

    def _start(self, text: str, at: int, *, is_final: bool) -> tuple[int, str]:
        """Begin a string, or a value without quotes."""
        for mark in self._quotes:
            if text.startswith(mark.mark, at):
                self._quote = mark
                return at + len(mark.mark), f'{self._comma}"'
            if not is_final and mark.mark.startswith(text[at : at + len(mark.mark)]):
                return at, ""  # more text is needed
        self._words.append(text[at])
        return at + 1, ""

    @property
    def _is_key(self) -> bool:
        return bool(self._closers) and self._closers[-1] == "}" and not self._missing

    def _end_item(self) -> None:
        if self._is_key:
            if self._tools is not None and len(self._closers) == 1:
                self._kinds = self._tools.kinds(self._name, "".join(self._key).strip())
            self._key = []
            self._comma, self._missing = "", ": null"
        else:
            self._comma, self._missing = ", ", ""
        self._quote, self._words = None, []

    def _word(self, text: str, at: int) -> tuple[int, str]:
        end, match = (_KEY_END if self._is_key else _BARE_END).search(text, at, is_final=False)
        self._words.append(text[at:end])
        if match is None:
            return end, ""
        written = self._comma + self._bare()
        self._end_item()
        return end, written

    def _bare(self) -> str:
        word = "".join(self._words).strip()
        if self._is_key:
            self._key = [word]
        if self._is_key or (self._kinds == TEXT and len(self._closers) == 1):
            return quote(word)
        word = _WORDS.get(word, word)
        return quote(word) if json_kind(word) is None else word

    def _string(self, mark: Quote, text: str, at: int, *, is_final: bool) -> tuple[int, str]:
        end, match = mark.end.search(text, at, is_final=is_final)
        if self._is_key:
            self._key.append(text[at:end])
        if end > at or match is None:
            return end, quote(text[at:end])[1:-1]
        if match[0] == mark.mark:
            self._end_item()
            return match.end(), '"'
        if len(text) - at < _ESCAPE_LENGTH and not is_final:
            return at, ""
        escape = _ESCAPE.match(text, at)
        # None: the backslash is the last character.
        return (at + 1, "") if escape is None else (escape.end(), _unescaped(escape))


def _unescaped(escape: re.Match[str]) -> str:
    """Return an escaped character as it stands in a JSON string."""
    kept, short, long, other = escape.groups()
    if kept:
        return f"\\{kept}"
    if short or long:
        number = int(short or long, 16)
        return quote(chr(number) if number < 0x110000 else escape[0])[1:-1]
    return {"'": "'", "\n": ""}.get(other, quote(f"\\{other}")[1:-1])
