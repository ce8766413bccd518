"""Click groups of fleetctl: verbs that are imported on use, suggestions for unknown words, and exit codes.

Start-up time is a feature (150 ms): a verb's imports are paid for by that verb alone.
"""

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from fleetctl.cli import terminal
from fleetctl.cli.errors import FleetctlError, InterruptedByUser, with_program_name
from fleetctl.cli.spellings import VERB_SYNONYMS, translate_switches

# A group with at most this many commands lists them all when no name is similar.
_SHORT_LIST = 12
# A summary is a sentence: longer than this, it is click that cuts it off.
_WHOLE = 1000
# Errors of a write to a full or broken device. A reader that closed the pipe (EPIPE) is handled by click.
_WRITE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


_CONNECTION_VERB = "options"


class ConnectionOption(click.Option):
    """A flag that chooses the fleet or authenticates the user: most verbs have them, and `options` alone lists them."""

    @override
    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.info_name == _CONNECTION_VERB else None


class ProgramContext(click.Context):
    """A context whose help has the name that the program was called by, and names the verb with the connection flags."""

    @override
    def get_help(self) -> str:
        text = super().get_help()
        is_connected = any(isinstance(option, ConnectionOption) for option in self.command.params)
        if is_connected and self.info_name != _CONNECTION_VERB:
            text += f"\n\nConnection flags: `fleetctl {_CONNECTION_VERB}`"
        return with_program_name(text, self.find_root().info_name or "fleetctl")


class SuggestingGroup(click.Group):
    """A group that answers an unknown command with similar ones, and whose help cuts no sentence off."""

    context_class = ProgramContext

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=_WHOLE))
            for name, command in found
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        is_unknown = word not in self.list_commands(ctx) and not word.startswith("-")
        if is_unknown and not ctx.resilient_parsing:
            ctx.fail(f"unknown command {word!r}{self._hint(ctx, word)}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            command.context_class = ProgramContext
        return name, command, rest if command is None else translate_switches(command, rest)

    def _hint(self, ctx: click.Context, word: str) -> str:
        """Return the similar commands; in a small group without similar ones, all of them."""
        names = [name for name in self.list_commands(ctx) if not name.startswith("_")]
        synonyms = [name for name in VERB_SYNONYMS.get(word.lower(), "").split() if name in names]
        begun = [name for name in names if word and name.startswith(f"{word.lower()}-")]
        near = synonyms or begun or difflib.get_close_matches(word.lower(), names, n=3)
        if near:
            return f". Did you mean {' or '.join(near)}?"
        return f"; available: {', '.join(names)}" if len(names) <= _SHORT_LIST else ""


class LazyGroup(SuggestingGroup):
    """A group that imports its commands on use.

    `verbs` maps each name to "module:function". `summaries` holds one line for each verb, so that help does not import
    them; a verb without a line is imported. `sections` maps titles in the help to verbs.
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
        """Write the list of verbs without importing them."""
        for title, names in self._titled_sections():
            with formatter.section(title):
                formatter.write_dl([(name, self.summary(ctx, name)) for name in names])

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the verbs and flags with this prefix, without importing the verbs."""
        items = [
            CompletionItem(name, help=self.summary(ctx, name))
            for name in sorted(self._verbs)
            if name.startswith(incomplete) and not name.startswith("_")
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def summary(self, ctx: click.Context, name: str) -> str:
        """Return one line about a verb."""
        if name in self._summaries:
            return self._summaries[name]
        command = self.get_command(ctx, name)
        assert command is not None  # the name is in the table
        return command.get_short_help_str(limit=_WHOLE)

    def _titled_sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the sections with their verbs; verbs with a leading underscore are hidden."""
        visible = [name for name in sorted(self._verbs) if not name.startswith("_")]
        placed = {name for names in self._sections.values() for name in names}
        for title, names in self._sections.items():
            yield title, [name for name in names if name in visible]
        others = [name for name in visible if name not in placed]
        if others:
            yield ("Other commands" if placed else "Commands"), others


class RootGroup(LazyGroup):
    """The group of all verbs: filters what terminals get, and turns Ctrl-C and failed writes into exit codes."""

    @override
    def main(self, *args: Any, **kwargs: Any) -> Any:
        with terminal.filtered_streams():
            return super().main(*args, **kwargs)

    @override
    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        with _translate_failures():
            try:
                return super().make_context(info_name, args, parent, **extra)
            except click.NoSuchOption as error:
                if error.possibilities:
                    raise
                name = error.option_name
                message = f"No such option before the verb: {name}. Options of a verb come after it: fleetctl get md {name} ..."
                raise click.NoSuchOption(name, message, ctx=error.ctx) from None

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with _translate_failures():
            try:
                return super().invoke(ctx)
            except FleetctlError as error:
                error.program = ctx.info_name or error.program
                raise
            finally:
                # Flush here: a failure during interpreter shutdown could not be reported. Unlike sys.stdout.flush(),
                # print accepts a closed standard output (>&-).
                print(end="", flush=True)


@contextmanager
def _translate_failures() -> Iterator[None]:
    """Turn Ctrl-C into exit code 130, and a failed write into an error message."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted") from None
    except (OSError, BaseExceptionGroup) as error:
        first = _first_error(error)
        if not isinstance(first, OSError) or first.errno not in _WRITE_FAILURES:
            raise
        # Otherwise the write fails again during interpreter shutdown, with Python's own message and exit code 120.
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        target = first.filename or "the output"
        raise FleetctlError(f"cannot write {target}: {first.strerror}") from error


def _first_error(error: BaseException) -> BaseException:
    """Return the first error of a task group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
