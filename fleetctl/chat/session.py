"""Lines that a person types, with readline's history and completion where Python has it. Knows no commands.

Asks one question and shows the answer as it comes: the part that conversations and pipes share.

A conversation at a terminal: lines in, answers out, until somebody has enough.
"""

import asyncio
import contextlib
import importlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Self, assert_never

import click

from fleetctl.chat import answer_stream, conversation
from fleetctl.chat import conversation as talks
from fleetctl.chat.answer_stream import AnswerPiece, AnswerStream, GatewayAccess
from fleetctl.chat.conversation import ChatAnswer, Conversation, SlashCommand, UnknownCommand
from fleetctl.cli import terminal
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from machinery.clock import SystemClock

# A file that everybody's shell would call long.
_KEPT = 1000
_PRIVATE = 0o600


class LinePrompt:
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


class AnswerPrinter:
    """Prints pieces; a pipe gets the model's words as they are, a terminal gets them harmless, and its thoughts, dim."""

    def __init__(self) -> None:
        self._is_terminal = terminal.is_tty(sys.stdout)
        self._last = ""
        self._was_thought = False

    def show(self, piece: AnswerPiece) -> None:
        """Print a piece."""
        if not self._is_terminal:
            if not piece.is_thought:
                self._print(piece.text)
            return
        if self._was_thought and not piece.is_thought:
            self.end_line()
        self._was_thought = piece.is_thought
        text = talks.make_printable(piece.text)
        self._print(terminal.style(text, "dim") if piece.is_thought else text)

    def end_line(self) -> None:
        """Begin a new line, unless there is one."""
        if self._last and self._last != "\n":
            self._print("\n")

    def _print(self, text: str) -> None:
        self._last = text[-1]
        click.echo(text, nl=False)


def ask_question(
    runner: asyncio.Runner, door: GatewayAccess, talk: Conversation, question: str
) -> ChatAnswer:
    """Ask, show the answer, remember both; Ctrl-C stops the answer.

    Raises:
        FleetctlError: there is no answer, or not all of it.
        InterruptedByUser: the answer was stopped; what there is of it is remembered.

    """
    shown = AnswerPrinter()
    answer = AnswerStream(SystemClock())
    with terminal.ProgressLine() as progress:

        def show(piece: AnswerPiece) -> None:
            progress.clear()
            shown.show(piece)

        # A model that was scaled to zero takes its time.
        progress.show(f"waiting for {talk.wishes.model}")
        try:
            # The connection is closed on the way out, by which the engine hears that nobody listens.
            runner.run(answer.read(door, talk.request(question), show))
        except KeyboardInterrupt:
            raise InterruptedByUser("stopped") from None
        finally:
            shown.end_line()
            talk.note(question, answer.told)
    return answer.told


def ask_once(door: GatewayAccess, talk: Conversation, question: str, *, with_stats: bool) -> None:
    """Ask one question; the answer is all that is printed."""
    with asyncio.Runner() as runner:
        told = ask_question(runner, door, talk, question)
    print_notes(told, with_stats=with_stats)
    if not told.text:
        raise FleetctlError("the model answered nothing")


def print_notes(told: ChatAnswer, *, with_stats: bool) -> None:
    """Say what a reader of the answer should know about it."""
    if told.finish == "length":
        click.echo("the answer is cut off: it reached --max-tokens, or the context's end", err=True)
    if with_stats:
        click.echo(talks.answer_figures(told), err=True)


class ChatSession:
    """One conversation."""

    def __init__(
        self, door: GatewayAccess, talk: Conversation, prompt: LinePrompt, *, with_stats: bool
    ) -> None:
        self._door = door
        self._talk = talk
        self._prompt = prompt
        self._with_stats = with_stats
        self._models: tuple[str, ...] = ()

    def run(self) -> None:
        """Talk until Ctrl-D or /quit.

        Raises:
            FleetctlError: there is no such model, or no gateway, before anything was said.

        """
        with asyncio.Runner() as runner:
            self._models = runner.run(answer_stream.list_models(self._door))
            self._check(self._talk.wishes.model)
            self._prompt.complete(lambda line: conversation.complete_line(line, self._models))
            click.echo(f"{self._talk.wishes.model} at {self._door.url}; /help says more")
            while True:
                try:
                    said = conversation.parse_line(self._message())
                    if said and not self._answered(runner, said):
                        return
                except EOFError:
                    click.echo()
                    return
                except KeyboardInterrupt:
                    click.echo("\nCtrl-D or /quit ends the conversation")
                except InterruptedByUser:
                    click.echo("stopped", err=True)
                except FleetctlError as error:
                    error.show()

    def _message(self) -> str:
        """Return the next message: a line, or all between two fences."""
        line = self._prompt.line(f"{self._talk.wishes.model}> ")
        if not line.startswith(conversation.FENCE):
            return line.strip()
        lines = [line.removeprefix(conversation.FENCE)]
        while not lines[-1].endswith(conversation.FENCE):
            lines.append(self._prompt.line("... "))
        lines[-1] = lines[-1].removesuffix(conversation.FENCE)
        # A slash in front of what stands between fences is no command's.
        text = "\n".join(lines).strip()
        return f"/{text}" if text.startswith("/") else text

    def _answered(self, runner: asyncio.Runner, said: SlashCommand | UnknownCommand | str) -> bool:
        """Do what was said; return whether the conversation goes on."""
        match said:
            case str():
                told = ask_question(runner, self._door, self._talk, said)
                print_notes(told, with_stats=self._with_stats)
                if not told.text:
                    click.echo("the model answered nothing", err=True)
            case UnknownCommand(why=why):
                click.echo(why, err=True)
            case SlashCommand():
                return self._obeyed(runner, said)
            case _:
                assert_never(said)
        return True

    def _obeyed(self, runner: asyncio.Runner, command: SlashCommand) -> bool:
        """Do what the command says; return whether the conversation goes on."""
        match command.verb:
            case "quit":
                return False
            case "help":
                click.echo("\n".join(conversation.help_lines()))
            case "stats":
                click.echo("\n".join(conversation.conversation_summary(self._talk)))
            case "reset":
                self._talk.reset(secrets.token_hex(16))
                click.echo("forgotten")
            case "system":
                self._set_system(command.rest)
            case "model":
                self._models = runner.run(answer_stream.list_models(self._door))
                self._set_model(command.rest)
            case _:
                assert_never(command.verb)
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            click.echo(self._talk.wishes.system or "there is no system prompt")
            return
        self._talk.wishes = replace(self._talk.wishes, system="" if text == "-" else text)
        click.echo("there is no system prompt now" if text == "-" else "the system prompt is set")

    def _set_model(self, name: str) -> None:
        if not name:
            for known in self._models:
                click.echo(f"{'*' if known == self._talk.wishes.model else ' '} {known}")
            return
        self._check(name)
        self._talk.wishes = replace(self._talk.wishes, model=name)

    def _check(self, name: str) -> None:
        if name in self._models:
            return
        raise FleetctlError(answer_stream.unknown_model_text(name, self._models))
