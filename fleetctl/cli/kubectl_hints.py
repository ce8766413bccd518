"""Flags of kubectl's that fleetctl has another way for: each is refused with a sentence that says which."""

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def unsupported_flag(
    sentence: str, *names: str, takes_value: bool = False
) -> Callable[[Command], Command]:
    """Return the decorator for a flag that help does not show, and that is refused; `sentence` says what to do."""

    def refuse(_: click.Context, parameter: click.Parameter, value: object) -> None:
        if value not in (None, False):
            raise click.UsageError(f"there is no {'/'.join(parameter.opts)} here: {sentence}")

    return click.option(
        *names,
        is_flag=not takes_value,
        default=None if takes_value else False,
        hidden=True,
        expose_value=False,
        callback=refuse,
    )
