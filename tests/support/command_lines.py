"""Compares command lines in pages and messages with the commands and flags that exist."""

import shlex
from collections.abc import Mapping

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
# click says UNSET for an argument that was not given.
_ABSENT = (None, click.Option(["--x"]).default)


def problems(line: str, *, is_whole: bool = False) -> list[str]:
    """Return what the program's own parser of arguments says against a command line; values are not checked.

    A command that is only named may lack arguments; one that `is_whole` may not, if it has any.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return [f"{line!r} is no command line"]
    if not words or words[0] not in PROGRAMS:
        return [f"{line!r} starts no program of ours"]
    ends = [number for number, word in enumerate(words) if word in ("|", "&&", ";", "&", ">", "<")]
    called = words[1 : min(ends, default=len(words))]
    if not is_whole:
        # A flag at the end may be named without its value.
        called = [*called, "X"] if called and called[-1].startswith("-") else called
    try:
        return _problems(PROGRAMS[words[0]], called, words[0], is_whole=is_whole)
    except click.UsageError as error:
        return [error.format_message()]


def _problems(command: click.Command, words: list[str], name: str, *, is_whole: bool) -> list[str]:
    context = click.Context(command, info_name=name)
    given, rest, _ = command.make_parser(context).parse_args(list(words))
    if {"-h", "--help"} & set(words):
        return []
    if isinstance(command, click.Group) and rest:
        inner = command.get_command(context, rest[0])
        if inner is None:
            return [f"{name} has no command {rest[0]}"]
        return _problems(inner, rest[1:], f"{name} {rest[0]}", is_whole=is_whole)
    if not is_whole:
        return []
    if rest:
        return [f"{name} takes no {rest[0]}"]
    missing = [
        param
        for param in command.params
        if param.required and given.get(param.name or "") in _ABSENT
    ]
    return [f"{name} needs {parameter.human_readable_name}" for parameter in missing if words]
