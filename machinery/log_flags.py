"""The command-line flags for the log of a process, shared by every program of the fleet."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import click

from machinery.process_log import LogFormat, LogLevel

Command = Callable[..., Any]
LEVEL_VARIABLE: Final = "FLEET_LOG_LEVEL"


def parse_level(text: str) -> LogLevel:
    """Return the level of that name; `info` for any other text."""
    return next((level for level in get_args(LogLevel) if level == text), "info")


def log_options(command: Command) -> Command:
    """Add --log-level, --log-format and --log-file.

    The command receives `log_level`, `log_format` and `log_file` for `process_log.setup`.
    """
    return log_level_option("info")(log_format_option(_log_file_option(command)))


def usable_file(
    _context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Return the absolute path of a file that can be written; None if none was given."""
    if path is None:
        return None
    found = path.expanduser().absolute()
    try:
        os.close(os.open(found, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        why = error.strerror or str(error)
        raise click.UsageError(
            f"{parameter.opts[0]} {path}: {why}; expected a file in a folder that exists"
        ) from error
    return found


def _log_file_option(command: Command) -> Command:
    return click.option(
        "--log-file",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="FLEET_LOG_FILE",
        callback=usable_file,
        help="File for the log besides stderr, as lines of JSON; rotated at 16 MiB, with three older files.",
    )(command)


def log_level_option(default: LogLevel) -> Callable[[Command], Command]:
    """Return the decorator for --log-level."""
    return click.option(
        "--log-level",
        type=click.Choice(get_args(LogLevel)),
        default=default,
        show_default=True,
        envvar=LEVEL_VARIABLE,
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
