"""Asks one question and shows the answer as it comes: the part that conversations and pipes share."""

import asyncio
import sys

import click

from fleetctl import terminal
from fleetctl.chat import talk as talks
from fleetctl.chat.stream import Answer, Door, Piece
from fleetctl.chat.talk import Talk, Told
from fleetctl.errors import FleetctlError, InterruptedByUser
from machinery.clock import SystemClock


class Shown:
    """Prints pieces; a pipe gets the model's words as they are, a terminal gets them harmless, and its thoughts, dim."""

    def __init__(self) -> None:
        self._is_terminal = terminal.is_tty(sys.stdout)
        self._last = ""
        self._was_thought = False

    def show(self, piece: Piece) -> None:
        """Print a piece."""
        if not self._is_terminal:
            if not piece.is_thought:
                self._print(piece.text)
            return
        if self._was_thought and not piece.is_thought:
            self.end_line()
        self._was_thought = piece.is_thought
        text = talks.printable(piece.text)
        self._print(terminal.style(text, "dim") if piece.is_thought else text)

    def end_line(self) -> None:
        """Begin a new line, unless there is one."""
        if self._last and self._last != "\n":
            self._print("\n")

    def _print(self, text: str) -> None:
        self._last = text[-1]
        click.echo(text, nl=False)


def ask(runner: asyncio.Runner, door: Door, talk: Talk, question: str) -> Told:
    """Ask, show the answer, remember both; Ctrl-C stops the answer.

    Raises:
        FleetctlError: there is no answer, or not all of it.
        InterruptedByUser: the answer was stopped; what there is of it is remembered.

    """
    shown = Shown()
    answer = Answer(SystemClock())
    with terminal.Progress() as progress:

        def show(piece: Piece) -> None:
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


def once(door: Door, talk: Talk, question: str, *, with_stats: bool) -> None:
    """Ask one question; the answer is all that is printed."""
    with asyncio.Runner() as runner:
        told = ask(runner, door, talk, question)
    after(told, with_stats=with_stats)
    if not told.text:
        raise FleetctlError("the model answered nothing")


def after(told: Told, *, with_stats: bool) -> None:
    """Say what a reader of the answer should know about it."""
    if told.finish == "length":
        click.echo("the answer is cut off: it reached --max-tokens, or the context's end", err=True)
    if with_stats:
        click.echo(talks.figures(told), err=True)
