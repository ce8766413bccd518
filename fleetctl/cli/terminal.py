"""Terminals: the filter for everything that is written to one, colours, and a progress line.

The only module with escape codes. Whatever else reaches a terminal with one, such as a model's name in a request, or a
line of a log, has it made visible.
"""

import codecs
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TextIO, cast

import click

from machinery import environment
from machinery.control_characters import make_printable

Role = Literal["good", "bad", "warn", "dim"]

# ECMA-48 (SGR): 32 green, 31 red, 33 yellow, 2 faint, 0 reset. The terminal's theme chooses the shades.
_CODES: dict[Role, str] = {"good": "32", "bad": "31", "warn": "33", "dim": "2"}
# A parameter of our colours that text from elsewhere cannot know. `TerminalStream` removes it.
_OWN = int.from_bytes(os.urandom(4), "big")
_OWN_CODE = rf"(\x1b\[){_OWN};([0-9]+m)"
# ECMA-48: move to the first column, and erase to the end of the line.
_CLEAR_LINE = "\r\x1b[K"
_WIDTH = 80


def is_tty(stream: TextIO) -> bool:
    """Return whether the stream is a terminal."""
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed
        return False


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Ask the person at the terminal, unless --yes is given. Raises UsageError without a terminal, Abort on "no"."""
    if is_confirmed:
        return
    if not is_tty(sys.stdin):
        raise click.UsageError("there is no terminal to confirm this: give --yes")
    click.confirm(question, abort=True, err=True)


def has_colours(stream: TextIO) -> bool:
    """Return whether to write colours: on a terminal, unless NO_COLOR or FORCE_COLOR is set."""
    wanted = environment.color_preference()
    return is_tty(stream) if wanted is None else wanted


def style(text: str, role: Role, stream: TextIO | None = None) -> str:
    """Return the text in the colour of its role if the stream (default: stdout) has colours."""
    return paint(text, role) if has_colours(sys.stdout if stream is None else stream) else text


def paint(text: str, role: Role) -> str:
    """Return the text in the colour of its role; click.echo removes the colour where the output has none."""
    return f"\x1b[{_OWN};{_CODES[role]}m{text}\x1b[{_OWN};0m" if text else text


class TerminalStream:
    """A standard stream of a terminal that makes control characters visible, except those of our colours."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream
        self.buffer = _TerminalBuffer(self)

    def write(self, text: str) -> int:
        self.unfiltered.write(_without_foreign_codes(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


class _TerminalBuffer:
    """The binary side of a `TerminalStream`, which takes UTF-8."""

    def __init__(self, stream: TerminalStream) -> None:
        self._stream = stream
        # A piece may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> int:
        self._stream.write(self._decoder.decode(data))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream.unfiltered, name)


def _without_foreign_codes(text: str) -> str:
    if "\x1b" not in text:
        return make_printable(text)
    # The matches of a pattern with two groups: text, escape, end of the code, text, ...
    parts = re.split(_OWN_CODE, text)
    parts[::3] = map(make_printable, parts[::3])
    return "".join(parts)


@contextmanager
def filtered_streams() -> Iterator[None]:
    """Filter stdout and stderr, where they are terminals or are given colours, for the duration of a command."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _filtered(sys.stdout), _filtered(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _filtered(stream: TextIO) -> TextIO:
    # Python has no stream for a closed descriptor (>&-).
    if cast("TextIO | None", stream) is None or not (is_tty(stream) or has_colours(stream)):
        return stream
    if isinstance(stream, io.TextIOWrapper):
        # The pictures of control characters are not in every encoding.
        stream.reconfigure(errors="backslashreplace")
    return cast("TextIO", TerminalStream(stream))


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream for a library that writes escape codes; give it text from `make_printable` only."""
    found: object = stream
    return found.unfiltered if isinstance(found, TerminalStream) else stream


class ProgressLine:
    """One line of progress, shown on a terminal only and erased at the end.

    Example: `with ProgressLine() as progress: progress.show("12 of 40 objects")`. `say` prints a line that stays, on a
    terminal or not.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = unfiltered(sys.stderr if stream is None else stream)
        self._is_terminal = is_tty(self._stream)
        self._is_shown = self._is_terminal and environment.has_capable_terminal()
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    @property
    def is_shown(self) -> bool:
        """True if `show` writes anything."""
        return self._is_shown

    def show(self, text: str) -> None:
        """Replace the progress line."""
        if self._is_shown:
            line = text.partition("\n")[0][: _width(self._stream) - 1]
            self._stream.write(_CLEAR_LINE + make_printable(line))
            self._stream.flush()
            self._is_drawn = True

    def say(self, line: str) -> None:
        """Print a permanent line above the progress line."""
        self.clear()
        self._stream.write(f"{make_printable(line) if self._is_terminal else line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Erase the progress line."""
        if self._is_drawn:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._is_drawn = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()


def _width(stream: TextIO) -> int:
    """Return the width of the terminal in columns; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH
