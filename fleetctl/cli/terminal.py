"""What a person's terminal can show: colours, and one line of progress. The only place with escape codes."""

import os
import sys
from types import TracebackType
from typing import Literal, Self, TextIO

from machinery import environment

Role = Literal["good", "bad", "warn", "dim"]

# ECMA-48 (SGR): 32 green, 31 red, 33 yellow, 2 faint, 0 none of it. Terminals' own themes choose the shades.
_CODES: dict[Role, str] = {"good": "32", "bad": "31", "warn": "33", "dim": "2"}
# ECMA-48: back to the first column, and erase from there to the line's end.
_CLEAR_LINE = "\r\x1b[K"
_WIDTH = 80


def is_tty(stream: TextIO) -> bool:
    """Return whether a person reads the stream on a terminal."""
    try:
        return stream.isatty()
    except ValueError:  # it was closed
        return False


def has_colours(stream: TextIO) -> bool:
    """Return whether the stream may have colours: on a terminal, unless NO_COLOR or FORCE_COLOR decide."""
    wanted = environment.color_preference()
    return is_tty(stream) if wanted is None else wanted


def style(text: str, role: Role, stream: TextIO | None = None) -> str:
    """Return the text in its role's colour, where the stream (stdout unless said) may have colours."""
    if not text or not has_colours(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_CODES[role]}m{text}\x1b[0m"


class ProgressLine:
    """One line that says how far something is; shown on a terminal only, and gone at the end.

    `with Progress() as progress: progress.show("12 of 40 objects")`. What has to stay is printed with `say`,
    on a terminal or not.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_tty(self._stream) and environment.has_capable_terminal()
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    @property
    def is_shown(self) -> bool:
        """Whether a person sees what `show` is given."""
        return self._is_shown

    def show(self, text: str) -> None:
        """Put the text in the place of what was shown before."""
        if self._is_shown:
            line = text.partition("\n")[0][: _width(self._stream) - 1]
            self._stream.write(_CLEAR_LINE + line)
            self._stream.flush()
            self._is_drawn = True

    def say(self, line: str) -> None:
        """Print a line that stays, above what is shown."""
        self.clear()
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take away what is shown."""
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
    """Return the columns of the terminal; 80 where nobody says."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH
