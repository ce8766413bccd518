"""Chat at a terminal or in a pipe: prompt with history, printing of answers, and the conversation loop."""

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

from fleetctl.chat import answer_stream
from fleetctl.chat.answer_stream import AnswerPiece, AnswerStream, GatewayLostError
from fleetctl.chat.conversation import (
    FENCE,
    ChatAnswer,
    Conversation,
    SlashCommand,
    UnknownCommand,
    answer_figures,
    complete_line,
    conversation_summary,
    help_lines,
    parse_line,
)
from fleetctl.chat.gateway_pool import GatewayPool
from fleetctl.cli import terminal
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from machinery.clock import SystemClock
from machinery.control_characters import make_printable

_HISTORY_LINES = 1000
_PRIVATE = 0o600


class LinePrompt:
    """Prompt with readline history and completion; the history file is readable by its owner only."""

    def __init__(self, history: Path | None) -> None:
        self._history = history.expanduser() if history is not None else None
        self._readline: ModuleType | None = None

    def __enter__(self) -> Self:
        # Imported here because it changes `input`. Some Python builds come without it.
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
            self._readline.set_history_length(_HISTORY_LINES)
            self._readline.write_history_file(self._history)
        except OSError as error:
            click.echo(
                f"warning: cannot write {self._history} ({error.strerror}); "
                "choose another file with --history, or none with --no-history",
                err=True,
            )

    def complete(self, candidates: Callable[[str], list[str]]) -> None:
        """Let Tab complete the whole line; `candidates` returns the possible lines."""
        if self._readline is None:
            return
        readline = self._readline

        def completer(text: str, number: int) -> str | None:
            found = candidates(text)
            return found[number] if number < len(found) else None

        readline.set_completer_delims("\n")
        readline.set_completer(completer)
        # Apple's Python has libedit, which needs another syntax.
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read_line(self, label: str) -> str:
        """Return the next line.

        Raises:
            EOFError: Ctrl-D; KeyboardInterrupt: Ctrl-C.

        """
        # readline writes past sys.stdout.
        return input(make_printable(label))


class AnswerPrinter:
    """Printer of answers: into a pipe without reasoning; at a terminal with it, dimmed."""

    def __init__(self) -> None:
        self._is_terminal = terminal.is_tty(sys.stdout)
        self._last = ""
        self._was_reasoning = False

    def show(self, piece: AnswerPiece) -> None:
        """Print a piece."""
        if not self._is_terminal:
            if not piece.is_reasoning:
                self._print(piece.text)
            return
        if self._was_reasoning and not piece.is_reasoning:
            self.end_line()
        self._was_reasoning = piece.is_reasoning
        self._print(terminal.style(piece.text, "dim") if piece.is_reasoning else piece.text)

    def end_line(self) -> None:
        """Start a new line unless the output is at the start of one."""
        if self._last and self._last != "\n":
            self._print("\n")

    def _print(self, text: str) -> None:
        self._last = text[-1]
        click.echo(text, nl=False)


def ask_question(
    runner: asyncio.Runner, pool: GatewayPool, conversation: Conversation, question: str
) -> ChatAnswer:
    """Send a question, print the answer, and add both to the conversation; Ctrl-C stops the answer.

    If the gateway dies before anything was printed, the question is sent again.

    Raises:
        FleetctlError: there is no answer, or it is incomplete.
        InterruptedByUser: the user stopped the answer; the part that arrived is kept.

    """
    printer = AnswerPrinter()
    stream = AnswerStream(SystemClock())
    shown = 0
    with terminal.ProgressLine() as progress:

        def show(piece: AnswerPiece) -> None:
            nonlocal shown
            shown += 1
            progress.clear()
            printer.show(piece)

        # A deployment that is scaled to zero needs time to start.
        progress.show(f"waiting for {conversation.settings.model}")
        try:
            body = conversation.request(question)
            # Leaving this block closes the connection, which cancels the request in the engine.
            runner.run(
                pool.send(
                    lambda access: stream.read(access, body, show),
                    can_resend=lambda: not shown,
                    say=progress.say,
                )
            )
        except KeyboardInterrupt:
            raise InterruptedByUser("stopped") from None
        except GatewayLostError as error:
            raise FleetctlError(_lost_text(error, pool)) from error
        finally:
            printer.end_line()
            conversation.record(question, stream.answer)
    return stream.answer


def _lost_text(error: GatewayLostError, pool: GatewayPool) -> str:
    """Return the message for an answer that ended early, and where the next request goes."""
    where = f", which goes to {pool.url}" if pool.url != error.url else ""
    return f"{error.format_message()}. The answer is incomplete; send the message again{where}"


def ask_once(
    pool: GatewayPool, conversation: Conversation, question: str, *, with_stats: bool
) -> None:
    """Ask one question, and print nothing but the answer."""
    with asyncio.Runner() as runner:
        answer = ask_question(runner, pool, conversation, question)
    print_notes(answer, with_stats=with_stats)
    if not answer.text:
        raise FleetctlError("the model returned an empty answer")


def print_notes(answer: ChatAnswer, *, with_stats: bool) -> None:
    """Print notes about the answer on stderr: truncation, and statistics if requested."""
    if answer.finish == "length":
        click.echo(
            "the answer is truncated: it reached --max-tokens or the context length", err=True
        )
    if with_stats:
        click.echo(answer_figures(answer), err=True)


class ChatSession:
    """An interactive conversation."""

    def __init__(
        self,
        pool: GatewayPool,
        conversation: Conversation,
        prompt: LinePrompt,
        *,
        with_stats: bool,
    ) -> None:
        self._pool = pool
        self._conversation = conversation
        self._prompt = prompt
        self._with_stats = with_stats
        self._models: tuple[str, ...] = ()

    def run(self) -> None:
        """Run the conversation until Ctrl-D or /quit.

        Raises:
            FleetctlError: the model does not exist, or no gateway answers.

        """
        with asyncio.Runner() as runner:
            self._models = runner.run(self._pool.send(answer_stream.list_models))
            self._check_model(self._conversation.settings.model)
            self._prompt.complete(lambda line: complete_line(line, self._models))
            click.echo(
                f"{self._conversation.settings.model} at {self._pool.url}; /help lists commands"
            )
            while True:
                try:
                    line = parse_line(self._read_message())
                    if line and not self._handle(runner, line):
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

    def _read_message(self) -> str:
        """Return the next message: one line, or all lines between two fences."""
        line = self._prompt.read_line(f"{self._conversation.settings.model}> ")
        if not line.startswith(FENCE):
            return line.strip()
        lines = [line.removeprefix(FENCE)]
        while not lines[-1].endswith(FENCE):
            lines.append(self._prompt.read_line("... "))
        lines[-1] = lines[-1].removesuffix(FENCE)
        # Double a leading slash, so that fenced text is never taken for a command.
        text = "\n".join(lines).strip()
        return f"/{text}" if text.startswith("/") else text

    def _handle(self, runner: asyncio.Runner, line: SlashCommand | UnknownCommand | str) -> bool:
        """Send a message or carry out a command; return whether the conversation continues."""
        match line:
            case str():
                answer = ask_question(runner, self._pool, self._conversation, line)
                print_notes(answer, with_stats=self._with_stats)
                if not answer.text:
                    click.echo("the model returned an empty answer", err=True)
            case UnknownCommand(why=why):
                click.echo(why, err=True)
            case SlashCommand():
                # Carry out a command; return whether the conversation continues.
                match line.verb:
                    case "quit":
                        return False
                    case "help":
                        click.echo("\n".join(help_lines()))
                    case "stats":
                        click.echo("\n".join(conversation_summary(self._conversation)))
                    case "reset":
                        self._conversation.reset(secrets.token_hex(16))
                        click.echo("all messages are forgotten")
                    case "system":
                        self._set_system(line.rest)
                    case "model":
                        self._models = runner.run(self._pool.send(answer_stream.list_models))
                        self._set_model(line.rest)
                    case _:
                        assert_never(line.verb)
                return True
            case _:
                assert_never(line)
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            click.echo(self._conversation.settings.system or "there is no system prompt")
            return
        self._conversation.settings = replace(
            self._conversation.settings, system="" if text == "-" else text
        )
        click.echo("there is no system prompt now" if text == "-" else "the system prompt is set")

    def _set_model(self, name: str) -> None:
        if not name:
            for known in self._models:
                click.echo(f"{'*' if known == self._conversation.settings.model else ' '} {known}")
            return
        self._check_model(name)
        self._conversation.settings = replace(self._conversation.settings, model=name)

    def _check_model(self, name: str) -> None:
        if name in self._models:
            return
        raise FleetctlError(answer_stream.unknown_model_text(name, self._models))
