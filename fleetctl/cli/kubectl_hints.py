"""Answers for users of kubectl and similar tools: synonyms of verbs, and flags that fleetctl does not need."""

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]

# What users of other tools type. Typing errors are found by their letters.
VERB_SYNONYMS = {
    "cat": "get", "list": "get", "ls": "get", "ps": "get", "status": "get",
    "remove": "delete", "rm": "delete", "show": "describe", "inspect": "describe",
    "start": "up", "run": "up", "stop": "down", "deploy": "apply", "prompt": "chat", "ask": "chat",
    "tail": "logs", "journal": "logs", "stats": "top", "check": "doctor", "context": "config",
}  # fmt: skip

_NO_NAMESPACES = (
    "fleets have no namespaces; a fleet in a shared etcd has its own --etcd-prefix. Remove"
)


def unsupported_flag(
    hint: str, *names: str, takes_value: bool = False
) -> Callable[[Command], Command]:
    """Return the decorator for a hidden flag that fails with a hint on what to use instead."""

    def refuse(_: click.Context, parameter: click.Parameter, value: object) -> None:
        if value not in (None, False):
            raise click.UsageError(f"{'/'.join(parameter.opts)} is not supported: {hint}")

    return click.option(
        *names,
        is_flag=not takes_value,
        default=None if takes_value else False,
        hidden=True,
        expose_value=False,
        callback=refuse,
    )


def namespace_flags(command: Command) -> Command:
    """Add the hidden flags -n and -A, which fail: fleets have no namespaces."""
    for names, is_flag in (("-A", "--all-namespaces"), True), (("-n", "--namespace"), False):
        option = click.option(
            *names, is_flag=is_flag, expose_value=False, hidden=True, callback=_refuse_namespaces
        )
        command = option(command)
    return command


def _refuse_namespaces(_: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value:
        raise click.UsageError(f"{_NO_NAMESPACES} {parameter.opts[0]}")
