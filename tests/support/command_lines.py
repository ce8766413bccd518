"""Compares command lines in pages and messages with the commands and flags that exist."""

import shlex
from collections.abc import Iterator, Mapping

import click

from dashboard.__main__ import main as fleet_dashboard
from fleetctl.__main__ import main as fleetctl
from gateway.__main__ import main as fleet_gateway
from nodeagent.__main__ import main as fleet_nodeagent
from reconciler.__main__ import main as fleet_reconciler

PROGRAMS: Mapping[str, click.Command] = {
    "fleetctl": fleetctl,
    "fleet-gateway": fleet_gateway,
    "fleet-nodeagent": fleet_nodeagent,
    "fleet-reconciler": fleet_reconciler,
    "fleet-dashboard": fleet_dashboard,
}
_HELP = ("-h", "--help")


def unknown_words(line: str) -> list[str]:
    """Return the verbs and flags of a command line that do not exist."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return [f"{line!r} is no command line"]
    if not words or words[0] not in PROGRAMS:
        return [f"{line!r} starts no program of ours"]
    return list(_unknown(PROGRAMS[words[0]], words[1:]))


def _unknown(command: click.Command, words: list[str]) -> Iterator[str]:
    context = click.Context(command, info_name=command.name)
    flags = _flags(command, context)
    for number, word in enumerate(words):
        # "--": what follows are the flags of a program that fleetctl starts.
        if word in ("|", "&&", ";", "&", ">", "<", "--"):
            return
        if word.startswith("-") and len(word) > 1:
            name = word.partition("=")[0]
            if not name.startswith("--"):
                name = name[:2]
            if name not in flags:
                yield f"{context.info_name} has no flag {name}"
        elif isinstance(command, click.Group) and not _is_value(command, words, number):
            inner = command.get_command(context, word)
            if inner is None or inner.name is None:
                yield f"{context.info_name} has no command {word}"
            else:
                yield from _unknown(inner, words[number + 1 :])
            return


def _flags(command: click.Command, context: click.Context) -> set[str]:
    found = set(_HELP)
    for parameter in command.get_params(context):
        found.update(parameter.opts, parameter.secondary_opts)
    return found


def _is_value(command: click.Command, words: list[str], number: int) -> bool:
    """Return whether the word is the value of the flag before it."""
    if number == 0:
        return False
    before = words[number - 1]
    return any(
        isinstance(one, click.Option) and before in one.opts and not one.is_flag
        for one in command.params
    )
