"""Options of the fleet's programs as rows of tables: a flag, its help, its type, its default and its variable.

OPTIONS = (Option("--port", "Port of the API.", type=PORT, default=4000), ...)

@click.command()
@options("FLEET_GATEWAY", *OPTIONS)
@options("FLEET", *LOG_OPTIONS)
def main(**flags): ...
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Final

import click

Command = Callable[..., Any]

PORT: Final = click.IntRange(0, 65535)
OWN_PORT: Final = click.IntRange(1024, 65535)
COUNT: Final = click.IntRange(min=0)
POSITIVE: Final = click.IntRange(min=1)
SECONDS: Final = click.FloatRange(min=0)
POSITIVE_SECONDS: Final = click.FloatRange(min=0, min_open=True)
FILE: Final = click.Path(dir_okay=False, path_type=Path)
FOLDER: Final = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Option:
    """One option; fields that are not set have click's defaults."""

    flag: str
    help: str | None = None
    _: KW_ONLY
    variable: str | None = ""
    """Environment variable; empty for PREFIX_FLAG, None for no variable."""
    name: str | None = None
    """The keyword that the command receives; None for the flag's."""
    type: click.ParamType[Any] | Callable[[str], object] | None = None
    default: object = None
    is_flag: bool = False
    multiple: bool = False
    required: bool = False
    hidden: bool = False
    metavar: str | None = None
    nargs: int | None = None
    callback: Callable[[click.Context, click.Parameter, Any], Any] | None = None
    show_default: bool | str = True
    show_envvar: bool = False


def options(
    prefix: str | None, *rows: Option, cls: type[click.Option] = click.Option
) -> Callable[[Command], Command]:
    """Return the decorator that adds the options, in this order; `prefix` begins their variables, None: no variables."""

    def decorate(command: Command) -> Command:
        for row in reversed(rows):
            command = _decorator(row, prefix, cls)(command)
        return command

    return decorate


def _decorator(
    row: Option, prefix: str | None, cls: type[click.Option]
) -> Callable[[Command], Command]:
    settings = {field.name: getattr(row, field.name) for field in fields(row)}
    flag, name, variable = (settings.pop(key) for key in ("flag", "name", "variable"))
    if variable == "":
        variable = prefix and f"{prefix}_{flag[2:].replace('-', '_').upper()}"
    given = {
        key: value for key, value in settings.items() if value is not None and value is not False
    }
    if row.default == "" and row.show_default is True:
        del given["show_default"]
    return click.option(flag, *((name,) if name else ()), cls=cls, envvar=variable, **given)


# What several programs have.
AUTH: Final = Option(
    "--auth",
    "Require API keys (`fleetctl create apikey`). auto: unless the gateway listens on loopback.",
    variable="FLEET_GATEWAY_AUTH",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
)
GATEWAY_CA: Final = Option(
    "--gateway-ca",
    "CA certificate of gateways that serve HTTPS (PEM; default: those of the system).",
    variable="FLEET_GATEWAY_CA",
    type=FILE,
)
