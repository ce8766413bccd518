"""The command-line flags for the log of a process, shared by every program of the fleet."""

import os
from pathlib import Path
from typing import Final, get_args

import click

from machinery.options import FILE, Option, options
from machinery.process_log import LogFormat, LogLevel

LEVEL_VARIABLE: Final = "FLEET_LOG_LEVEL"


def parse_level(text: str) -> LogLevel:
    """Return the level of that name; `info` for any other text."""
    return next((level for level in get_args(LogLevel) if level == text), "info")


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


LOG_LEVEL: Final = Option(
    "--log-level",
    "Lowest level of the lines that are logged.",
    variable=LEVEL_VARIABLE,
    type=click.Choice(get_args(LogLevel)),
    default="info",
)
LOG_FORMAT: Final = Option(
    "--log-format",
    "Format of the log on stderr: lines of JSON, or text for people. auto: text on a terminal.",
    type=click.Choice(get_args(LogFormat)),
    default="auto",
)
LOG_FILE: Final = Option(
    "--log-file",
    "File for the log besides stderr, as lines of JSON; rotated at 16 MiB, with three older files.",
    type=FILE,
    callback=usable_file,
)
log_options: Final = options("FLEET", LOG_LEVEL, LOG_FORMAT, LOG_FILE)
"""Adds the options of the log. The command receives `log_level`, `log_format` and `log_file` for `process_log.setup`."""
