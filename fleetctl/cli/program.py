"""Groups of verbs that say what may have been meant; and one that imports verbs on use: each pays for itself alone.

The command as a whole: how it ends when the user presses Ctrl-C, and when what it says cannot be written.
"""

import difflib
import errno
import importlib
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from machinery.typing_compat import override

# What people type who know other tools; everything else is found by its letters.
_SYNONYMS = {
    "cat": "get", "list": "get", "ls": "get", "ps": "get", "status": "get",
    "remove": "delete", "rm": "delete", "show": "describe", "inspect": "describe",
    "start": "up", "run": "up", "stop": "down", "deploy": "apply", "prompt": "chat", "ask": "chat",
    "tail": "logs", "journal": "logs", "stats": "top", "check": "doctor", "context": "config",
}  # fmt: skip
# A group of so few says what there is, where nothing comes near.
_SHORT_LIST = 12


class SuggestingGroup(click.Group):
    """A group that answers a word it does not know with those that it does."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        is_unknown = word not in self.list_commands(ctx) and not word.startswith("-")
        if is_unknown and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {word!r}{self._hint(ctx, word)}")
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: click.Context, word: str) -> str:
        """Return what may have been meant; of a few, all if nothing comes near."""
        shown = [name for name in self.list_commands(ctx) if not name.startswith("_")]
        meant = _SYNONYMS.get(word.lower(), "")
        begun = [name for name in shown if word and name.startswith(f"{word.lower()}-")]
        near = begun or difflib.get_close_matches(word.lower(), shown, n=3)
        near = [meant] if meant in shown else near
        if near:
            return f". Did you mean {' or '.join(near)}?"
        return f"; there are {', '.join(shown)}" if len(shown) <= _SHORT_LIST else ""


class LazyGroup(SuggestingGroup):
    """A group that knows where its commands are; `verbs` maps each to "module:function".

    `summaries` and `sections` are for its help: a line for each verb (where one is missing, its module is imported for
    it), and titles with the verbs that belong under them.
    """

    def __init__(
        self,
        *args: Any,
        verbs: Mapping[str, str],
        summaries: Mapping[str, str] | None = None,
        sections: Mapping[str, tuple[str, ...]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = verbs
        self._summaries = summaries or {}
        self._sections = sections or {}

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._verbs)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module, _, function = self._verbs[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs, without importing them."""
        width = formatter.width - 6 - max(map(len, self._verbs))
        for title, names in self._titled():
            rows = [
                (name, textwrap.shorten(self.summary(ctx, name), width, placeholder="..."))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the verbs and flags that begin so, without importing the verbs."""
        found = [
            CompletionItem(name, help=self.summary(ctx, name))
            for name in sorted(self._verbs)
            if name.startswith(incomplete) and not name.startswith("_")
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def summary(self, ctx: click.Context, name: str) -> str:
        """Return one line about a verb."""
        if name in self._summaries:
            return self._summaries[name]
        command = self.get_command(ctx, name)
        assert command is not None  # it is one of ours
        return command.get_short_help_str(limit=120)

    def _titled(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the sections with their verbs; those with a leading underscore are for programs."""
        shown = [name for name in sorted(self._verbs) if not name.startswith("_")]
        placed = {name for names in self._sections.values() for name in names}
        for title, names in self._sections.items():
            yield title, [name for name in names if name in shown]
        others = [name for name in shown if name not in placed]
        if others:
            yield ("Other commands" if placed else "Commands"), others


# What writing brings where there is no room or no device; a reader that went away (EPIPE) is click's.
_WRITE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class RootGroup(LazyGroup):
    """The group of all verbs."""

    @override
    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        with _translate_failures():
            return super().make_context(info_name, args, parent, **extra)

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with _translate_failures():
            try:
                return super().invoke(ctx)
            finally:
                # At the interpreter's end nobody could say any more that it failed. Unlike sys.stdout.flush(), print
                # does not mind that there is no output at all (>&-).
                print(end="", flush=True)


@contextmanager
def _translate_failures() -> Iterator[None]:
    """Have Ctrl-C become exit code 130 at any time, and a full disk a sentence."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted") from None
    except (OSError, BaseExceptionGroup) as error:
        first = _first_error(error)
        if not isinstance(first, OSError) or first.errno not in _WRITE_FAILURES:
            raise
        _discard_output()
        what = first.filename or "the output"
        raise FleetctlError(f"cannot write {what}: {first.strerror}") from error


def _first_error(error: BaseException) -> BaseException:
    """Return what went wrong first, in a task group's tasks or by itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _discard_output() -> None:
    """Lead what is still to be written nowhere.

    It would fail again at the interpreter's end, with words of Python's and exit code 120.
    """
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
