"""A conversation at a terminal: lines in, answers out, until somebody has enough."""

import asyncio
import secrets
from dataclasses import replace
from typing import assert_never

import click

from fleetctl.chat import asking, slash, stream, talk
from fleetctl.chat.prompt import Prompt
from fleetctl.chat.slash import Command, Unknown
from fleetctl.chat.stream import Door
from fleetctl.chat.talk import Talk
from fleetctl.errors import FleetctlError, InterruptedByUser


class Session:
    """One conversation."""

    def __init__(self, door: Door, talk: Talk, prompt: Prompt, *, with_stats: bool) -> None:
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
            self._models = runner.run(stream.models(self._door))
            self._check(self._talk.wishes.model)
            self._prompt.complete(lambda line: slash.completions(line, self._models))
            click.echo(f"{self._talk.wishes.model} at {self._door.url}; /help says more")
            while True:
                try:
                    said = slash.parse(self._message())
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
        if not line.startswith(slash.FENCE):
            return line.strip()
        lines = [line.removeprefix(slash.FENCE)]
        while not lines[-1].endswith(slash.FENCE):
            lines.append(self._prompt.line("... "))
        lines[-1] = lines[-1].removesuffix(slash.FENCE)
        # A slash in front of what stands between fences is no command's.
        text = "\n".join(lines).strip()
        return f"/{text}" if text.startswith("/") else text

    def _answered(self, runner: asyncio.Runner, said: Command | Unknown | str) -> bool:
        """Do what was said; return whether the conversation goes on."""
        match said:
            case str():
                told = asking.ask(runner, self._door, self._talk, said)
                asking.after(told, with_stats=self._with_stats)
                if not told.text:
                    click.echo("the model answered nothing", err=True)
            case Unknown(why=why):
                click.echo(why, err=True)
            case Command():
                return self._obeyed(runner, said)
            case _:
                assert_never(said)
        return True

    def _obeyed(self, runner: asyncio.Runner, command: Command) -> bool:
        """Do what the command says; return whether the conversation goes on."""
        match command.verb:
            case "quit":
                return False
            case "help":
                click.echo("\n".join(slash.usage()))
            case "stats":
                click.echo("\n".join(talk.summary(self._talk)))
            case "reset":
                self._talk.reset(secrets.token_hex(16))
                click.echo("forgotten")
            case "system":
                self._set_system(command.rest)
            case "model":
                self._models = runner.run(stream.models(self._door))
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
        raise FleetctlError(stream.no_model(name, self._models))
