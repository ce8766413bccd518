"""Reader of one answer's text: gives a parser the text as it comes, in spans. Pure: no mlx, no I/O.

A parser is a generator. It yields spans, which together are the whole text, and None where it needs more text. What it
waits for has a bounded length, so the work is linear in the text, and the spans do not depend on its pieces.
"""

import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias, TypeVar

from engine.text.spans import CallPiece, Span, SpanRole

T = TypeVar("T")
Steps: TypeAlias = Generator[Span | None, None, T]
BLANKS = re.compile(r"\s*")


class Delimiter:
    """Texts that end a part of an answer, each with what must follow, so that a value may contain the text itself."""

    def __init__(
        self, markers: Mapping[str, str], *, last: Mapping[str, str] | None = None, window: int = 0
    ) -> None:
        """`markers` maps a text to a regular expression of at most `window` characters that must follow.

        `last` is used instead where the answer ends.
        """
        self._complete = _alternatives(markers)
        self._last = _alternatives(last) if last else self._complete
        self._pending = re.compile("|".join(_prefixes(marker) for marker in markers))
        self._reach = max(map(len, markers)) + window

    def search(self, text: str, at: int, *, is_final: bool) -> tuple[int, re.Match[str] | None]:
        """Return the end of what is no delimiter for certain, and the delimiter that follows it."""
        match = self._complete.search(text, at)
        if match is None and is_final:
            match = self._last.search(text, at)
        if match is not None:
            return match.start(), match
        if is_final:
            return len(text), None
        pending = self._pending.search(text, max(at, len(text) - self._reach))
        return (len(text) if pending is None else pending.start()), None

    def here(self, text: str, at: int) -> bool | None:
        """Return whether a delimiter begins at a position; False if that needs more text, None if it does not."""
        if self._complete.match(text, at):
            return True
        return False if at == len(text) or self._pending.match(text, at) else None


def _alternatives(markers: Mapping[str, str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{re.escape(text)}{then})" for text, then in markers.items()))


def _prefixes(marker: str) -> str:
    """Return an expression for a marker, and for its beginning at the end of a text."""
    pattern = ""
    for character in reversed(marker):
        pattern = re.escape(character) + (f"(?:\\Z|{pattern})" if pattern else "")
    return pattern


class Reader:
    """The text that a parser has not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """The position of the parser in `text`."""
        self.is_final = False
        """True if no more text follows."""
        self.is_cut = False
        """True if the answer ended by its limit of tokens."""
        self.is_thinking = False
        """True if the text so far ends within reasoning."""
        self._held: list[str] = []

    def add(self, text: str) -> None:
        """Add text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(
        self, end: int, role: SpanRole = SpanRole.HIDDEN, calls: tuple[CallPiece, ...] = ()
    ) -> Span:
        """Return the text up to a position as a span."""
        start, self.at = self.at, end
        return Span(role, self.text[start:end], calls)

    def blanks_end(self) -> int:
        """Return the position of the next character that is no blank."""
        blanks = BLANKS.match(self.text, self.at)
        assert blanks is not None
        return blanks.end()

    def has_more(self) -> Steps[bool]:
        """Wait for text; return False if the answer ends here."""
        while self.at == len(self.text) and not self.is_final:
            yield None
        return self.at < len(self.text)

    def hold(self, end: int) -> None:
        """Take the text up to a position, and decide its role later."""
        self._held.append(self.text[self.at : end])
        self.at = end

    def hold_blanks(self) -> Steps[None]:
        """Hold the blanks here, and wait for what follows them."""
        while True:
            self.hold(self.blanks_end())
            if self.at < len(self.text) or self.is_final:
                return
            yield None

    def held(self) -> str:
        """Return the text that is held."""
        self._held = ["".join(self._held)]
        return self._held[0]

    def release(self, role: SpanRole, calls: tuple[CallPiece, ...] = ()) -> Span:
        """Return the text that was held as a span."""
        text, self._held = "".join(self._held), []
        return Span(role, text, calls)

    def match(self, pattern: re.Pattern[str], window: int) -> Steps[re.Match[str] | None]:
        """Wait until the text here matches a pattern of at most `window` characters, or cannot."""
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None or self.is_final or len(self.text) - self.at >= window:
                return match
            yield None

    def until(
        self, delimiter: Delimiter, role: SpanRole | Callable[[str], tuple[CallPiece, ...]]
    ) -> Steps[re.Match[str] | None]:
        """Yield the text before a delimiter; return the delimiter, which is not taken; None if the text has none.

        `role` is that of the text, or a function that makes pieces of calls of it.
        """
        while True:
            end, match = delimiter.search(self.text, self.at, is_final=self.is_final)
            if end > self.at:
                if isinstance(role, SpanRole):
                    yield self.take(end, role)
                else:
                    yield self.take(end, calls=role(self.text[self.at : end]))
            if match is not None or self.is_final:
                return match
            yield None


def collector(parts: list[str]) -> Callable[[str], tuple[CallPiece, ...]]:
    """Return a function for `Reader.until` that collects the text."""

    def collect(text: str) -> tuple[CallPiece, ...]:
        parts.append(text)
        return ()

    return collect


class AnswerParser:
    """Runs a parser over the text of one answer."""

    def __init__(self, parse: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = parse(self._reader)

    @property
    def is_thinking(self) -> bool:
        """Return whether the text so far ends within reasoning."""
        return self._reader.is_thinking

    def feed(self, text: str) -> list[Span]:
        """Add text; return the spans that are decided."""
        self._reader.add(text)
        return list(iter(self._steps.__next__, None))

    def flush(self, *, is_cut: bool = False) -> list[Span]:
        """Return the text that was held back: no more text follows."""
        reader = self._reader
        reader.is_final, reader.is_cut = True, is_cut
        return [*self.feed(""), reader.take(len(reader.text), SpanRole.CONTENT)]


def read_text(reader: Reader) -> Steps[None]:
    """Read the rest of an answer as content."""
    while True:
        yield reader.take(len(reader.text), SpanRole.CONTENT)
        if reader.is_final:
            return
        yield None


def text_parser() -> AnswerParser:
    """Return the parser of an answer that is text only."""
    return AnswerParser(read_text)
