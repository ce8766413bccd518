"""Lines that a person types, with readline's history and completion where Python has it. Knows no commands."""

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Self

import click

# A file that everybody's shell would call long.
_KEPT = 1000
_PRIVATE = 0o600


class Prompt:
    """Asks for lines; keeps what was typed in a file that only its owner reads. Use it as a context."""

    def __init__(self, history: Path | None) -> None:
        self._history = history.expanduser() if history is not None else None
        self._readline: ModuleType | None = None

    def __enter__(self) -> Self:
        # Imported here, where a terminal is read: it makes `input` another one. Some Pythons come without it.
        with contextlib.suppress(ImportError):
            self._readline = importlib.import_module("readline")
        if self._readline is not None and self._history is not None:
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._history)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None or self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=_PRIVATE)
            self._readline.set_history_length(_KEPT)
            self._readline.write_history_file(self._history)
        except OSError as error:
            click.echo(
                f"warning: {self._history} cannot be written ({error.strerror}); "
                "--history names another file, --no-history none",
                err=True,
            )

    def complete(self, ways: Callable[[str], list[str]]) -> None:
        """Have Tab ask for what the whole line may become."""
        if self._readline is None:
            return
        line = self._readline

        def completer(text: str, number: int) -> str | None:
            found = ways(text)
            return found[number] if number < len(found) else None

        line.set_completer_delims("\n")
        line.set_completer(completer)
        # Apple's Python has libedit, which spells it in its own way.
        is_libedit = "libedit" in (line.__doc__ or "")
        line.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def line(self, asks: str) -> str:
        """Return what was typed.

        Raises:
            EOFError: Ctrl-D; KeyboardInterrupt: Ctrl-C.

        """
        return input(asks)
