"""Reads values as Python or Gemma writes them, and gives them on as JSON while they come. Pure.

It accepts more than both languages: JSON's words, missing quotes, commas and brackets, and quotes inside strings that
are not followed by what may follow a string.
"""

import re
from functools import lru_cache
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
# Parts of strings that JSON writes in the same way, but for the escaped quotation mark.
_SAME: Final = re.compile(
    r"(?:[^\"'\\\x00-\x1f\ud800-\udfff]++|\\[nrtbf\"\\/']|\\u[0-9a-fA-F]{4})++"
)
_APOSTROPHE: Final = re.compile(r"(\\[^'])|\\(?=')")
_OPENERS, _CLOSERS = str.maketrans("()", "[]"), str.maketrans("{[", "}]")
_CONTROL: Final = r"\x00-\x1f\x7f\ud800-\udfff"
_NUMBER: Final = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
# The first chunk of text in which tokens are searched, and the largest.
_MIN_CHUNK, _MAX_CHUNK = 16, 1 << 16


class Quote:
    """Quotation mark of strings."""

    def __init__(self, mark: str, *, has_escapes: bool) -> None:
        self.mark = mark
        self.has_escapes = has_escapes
        self.is_triple = mark == 3 * mark[0]
        escape = {"\\": ""} if has_escapes else {}
        self.end = Delimiter(
            {**escape, mark: _AFTER_STRING}, last={**escape, mark: r"(?=\s*\Z)"}, window=65
        )


class Quotes:
    """Quotation marks of one language, and its tokens."""

    def __init__(self, *marks: Quote) -> None:
        self.marks = marks
        blanks, over = r"[ \n]{0,64}", r"(?=[ \n]{0,64}[)\]}])"
        strings = "|".join(
            rf"{mark}[^\"'<\\{_CONTROL}]{{0,4096}}+{mark}(?:{blanks}[,:]{blanks}|{over})"
            for mark in (re.escape(quote.mark) for quote in marks if not quote.is_triple)
        )
        mark_starts = "".join({quote.mark[0] for quote in marks})
        word = rf"[^\s{mark_starts}\\,:=()\[\]{{}}{_CONTROL}][^\"\\,:=)\]}}{_CONTROL}]{{0,255}}+(?:\n?[,:=]{blanks}|{over})"
        # Those that need no care: runs of brackets and punctuation, strings and words with what ends them; empty
        # before any other text.
        numbers = rf"(?:{_NUMBER},[ \n]?){{2,64}}+"
        self.tokens = re.compile(
            rf"{numbers}|(?:\[\]|\{{\}}|\(\)){{1,32}}+|[\[({{]{{1,64}}+|[\])}}]+|[ \n]+|,+{blanks}|:+{blanks}|={blanks}|{strings}|{word}|(?=.)",
            re.DOTALL,
        )
        self.lengths = {quote.mark[0]: len(quote.mark) for quote in marks if not quote.is_triple}


PYTHON: Final = Quotes(*(Quote(mark, has_escapes=True) for mark in ('"""', "'''", '"', "'")))


def token_quotes(mark: str) -> Quotes:
    """Return the quotation marks of Gemma, whose own is a token."""
    return Quotes(Quote(mark, has_escapes=False), Quote('"', has_escapes=True))


def argument_piece(text: str) -> tuple[CallPiece, ...]:
    """Return a part of a call's arguments."""
    return (CallPiece(None, text, is_complete=False),)


def quoted_piece(text: str) -> tuple[CallPiece, ...]:
    """Return a part of a JSON string as a piece of a call."""
    return argument_piece(quote(text)[1:-1])


def skip_blanks(reader: Reader) -> Steps[bool]:
    """Hide blanks; return whether text follows."""
    while True:
        end = reader.blanks_end()
        if end > reader.at:
            yield reader.take(end)
        if reader.at < len(reader.text) or reader.is_final:
            return reader.at < len(reader.text)
        yield None


def read_arguments(reader: Reader, quotes: Quotes, tools: ToolSet, name: str) -> Steps[None]:
    """Read the arguments of a call behind its opening bracket, and the closing one: `a=1)` or `a:1}`."""
    yield reader.take(reader.at, calls=argument_piece("{"))
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
            yield reader.take(end, calls=argument_piece(written))
        if is_over:
            return
        if reader.is_final:
            break
        yield None
    if not reader.is_cut:
        yield reader.take(reader.at, calls=argument_piece(scanner.rest()))


@lru_cache(maxsize=1024)
def _word_as_json(word: str) -> str:
    """Return a value without quotes as JSON."""
    word = _WORDS.get(word, word)
    return quote(word) if json_kind(word) is None else word


@lru_cache(maxsize=1024)
def _brackets(token: str) -> tuple[str, str, str]:
    """Return opening brackets, or empty pairs, as JSON has them, what closes them, and the next comma."""
    opened = token.translate(_OPENERS)
    if opened[-1] in "]}":
        return ", ".join(opened[at : at + 2] for at in range(0, len(opened), 2)), "", ", "
    return opened, opened.translate(_CLOSERS), ""


_KEY_SUFFIXES: Final = {",": ": null", ":": ": ", "=": ": ", "": ""}
# The next comma, and what is missing, by the character behind a key.
_BEHIND_KEY: Final = {
    ",": (", ", ""),
    ":": ("", "null"),
    "=": ("", "null"),
    "": ("", ": null"),
    ",,": (", ", ""),
}


@lru_cache(maxsize=1024)
def _parts(token: str, mark_length: int) -> tuple[str, str, str, str]:
    """Return a string or a word as a key and as a value, its text, and what ends it: two commas for several numbers."""
    end = token.rstrip(" \n")[-1]
    if end not in ",:=":
        end = ""
    elif end == "," and not mark_length and token.count(",") > 1:  # numbers
        items = re.split(r",\s?", token)[:-1]
        return '"' + '": null, "'.join(items) + '": null', ", ".join(items), items[-1], ",,"
    name = token.rstrip(" \n,:=") if end else token
    name = name[mark_length:-mark_length] if mark_length else name.strip()
    value = f'"{name}"' if mark_length else _word_as_json(name)
    return f'"{name}"{_KEY_SUFFIXES[end]}', value, name, end


class _LiteralScanner:
    """Converts a value, or the arguments of a call, that arrive in pieces."""

    def __init__(self, quotes: Quotes, tools: ToolSet | None = None, name: str = "") -> None:
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
        self._kinds_by_key: dict[str, frozenset[str]] = {}
        self._chunk = _MIN_CHUNK

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
                at = self._scan_tokens(text, at, written)
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

    def _scan_tokens(  # noqa: C901, PLR0912 - one loop: a call for each token would double the cost
        self, text: str, at: int, written: list[str]
    ) -> int:
        """Convert tokens that need no care; return the position behind them.

        It does what the methods below do for each character.
        """
        closers, comma, missing = self._closers, self._comma, self._missing
        lengths, write = self._quotes.lengths, written.append
        chunk, size, last_name = self._chunk, 1, None
        while size and closers and at < len(text):
            tokens = self._quotes.tokens.findall(text, at, at + chunk)
            count = -1
            for token in tokens:
                count += 1
                first = token[:1]
                if first in "[({":
                    if not token:
                        break
                    opened, closing, behind = _brackets(token)
                    write(comma + opened)
                    closers += closing
                    comma, missing = behind, ""
                elif first in ")]}":
                    if len(token) >= len(closers):
                        break  # the value may end here
                    written += (missing, *closers[: -len(token) - 1 : -1])
                    del closers[-len(token) :]
                    comma, missing = ", ", ""
                elif first == ",":
                    write(missing)
                    comma, missing = ", " if missing else comma, ""
                elif first in ":=":
                    if missing == ": null":
                        write(": ")
                        comma, missing = "", "null"
                    elif first == "=":
                        break  # begins a word
                elif first not in " \n":
                    key, value, name, end = _parts(token, lengths.get(first, 0))
                    if missing or closers[-1] != "}":
                        if end == ",," and missing:
                            break  # a value, and then keys
                        if end == "=" or (end == ":" and first not in lengths):
                            break  # within a word
                        if first not in lengths and len(closers) == 1 and self._kinds == TEXT:
                            value = quote(name)
                        write(comma + value)
                        comma, missing = ", ", ""
                    else:
                        write(comma + key)
                        comma, missing = _BEHIND_KEY[end]
                        if name != last_name and len(closers) == 1:
                            self._set_kinds(name)
                            last_name = name
            else:
                count += 1
            size = sum(map(len, tokens[:count]))
            at += size
            chunk = min(4 * chunk, _MAX_CHUNK) if 2 * size > chunk else _MIN_CHUNK
        self._chunk = chunk
        self._comma, self._missing = comma, missing
        return at

    def _set_kinds(self, key: str) -> None:
        if self._tools is None or len(self._closers) != 1:
            return
        kinds = self._kinds_by_key.get(key)
        if kinds is None:
            kinds = self._tools.kinds(self._name, key.strip())
            self._kinds_by_key[key] = kinds
        self._kinds = kinds

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
        for mark in self._quotes.marks:
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
            self._set_kinds("".join(self._key))
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
        return _word_as_json(word)

    def _string(self, mark: Quote, text: str, at: int, *, is_final: bool) -> tuple[int, str]:
        same = _SAME.match(text, at) if mark.has_escapes and not self._is_key else None
        if same is not None:
            end, piece = same.end(), same[0]
            return end, _APOSTROPHE.sub(r"\1", piece) if "\\'" in piece else piece
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
