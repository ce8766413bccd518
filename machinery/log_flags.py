"""The command-line flags for the log of a process, shared by every program of the fleet."""

from collections.abc import Callable
from typing import Any, get_args

import click

from machinery.process_log import LogFormat, LogLevel

Command = Callable[..., Any]


def log_options(command: Command) -> Command:
    """Add --log-level and --log-format; the command receives `log_level` and `log_format` for `process_log.setup`."""
    return log_level_option("info")(log_format_option(command))


def log_level_option(default: LogLevel) -> Callable[[Command], Command]:
    """Return the decorator for --log-level."""
    return click.option(
        "--log-level",
        type=click.Choice(get_args(LogLevel)),
        default=default,
        show_default=True,
        envvar="FLEET_LOG_LEVEL",
        help="Lowest level of the lines that are logged.",
    )


def log_format_option(command: Command) -> Command:
    """Add --log-format."""
    return click.option(
        "--log-format",
        type=click.Choice(get_args(LogFormat)),
        default="auto",
        show_default=True,
        envvar="FLEET_LOG_FORMAT",
        help="Format of the log on stderr: lines of JSON, or text for people. auto: text on a terminal.",
    )(command)
