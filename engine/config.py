"""Reads the engine's configuration (schemas/wire/engine_config.py) from standard input, or from a file."""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from pydantic import ValidationError

from machinery.clock import SystemClock
from schemas.wire.engine_config import EngineConfig
from schemas.wire.exit_codes import ExitCode

MAX_BYTES: Final = 1 << 20
_STDIN_FD: Final = 0
# The agent writes it before the process exists; a program that writes it later is quick, or hangs.
_READ_TIMEOUT_S: Final = 30.0


def read(arguments: Sequence[str]) -> EngineConfig:
    """Return the configuration that the command line points to.

    Exits the process with code 2 and a line on stderr if there is none within 30 s, or if it is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="engine", description="Serve one model, as a JSON document says."
    )
    parser.add_argument(
        "--config",
        default="-",
        metavar="FILE",
        help="file of the configuration; default: -, standard input",
    )
    parser.add_argument("identity", nargs="*", metavar="NAME=VALUE", help="for the process table")
    options = parser.parse_args(arguments)
    try:
        raw = _read_stdin() if options.config == "-" else _read_file(Path(options.config))
    except (OSError, ValueError) as error:
        refuse(f"cannot read the configuration: {error}")
    config = parse(raw)
    if options.identity and options.identity != config.identity.to_argv():
        refuse("the command line names another engine than the configuration")
    if config.group is not None and not config.group.secret:
        refuse("a rank needs the secret of its group: group.secret")
    return config


def parse(raw: bytes) -> EngineConfig:
    """Return the configuration in a document; exits the process as `read` does."""
    try:
        return EngineConfig.model_validate_json(raw)
    except ValidationError as error:
        # Never with its values: one of them is a secret.
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        refuse(f"the configuration is wrong: {where}{': ' if where else ''}{reason}")


def refuse(message: str) -> NoReturn:
    """Exit the process: a restart does not help. The agent shows the last line of stderr."""
    sys.stderr.write(f"engine: error: {message}\n")
    sys.exit(ExitCode.UNUSABLE)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return _checked_size(file.read(MAX_BYTES + 1))


def _read_stdin() -> bytes:
    """Return all of standard input.

    Raises:
        ValueError: it is a terminal, too long, or does not end in time.
        OSError: it is closed.

    """
    if os.isatty(_STDIN_FD):
        raise ValueError("standard input is a terminal: pipe the JSON, or give --config FILE")
    clock, content = SystemClock(), bytearray()
    deadline = clock.monotonic() + _READ_TIMEOUT_S
    while len(content) <= MAX_BYTES:
        wait_s = max(0.0, deadline - clock.monotonic())
        if not select.select([_STDIN_FD], [], [], wait_s)[0]:
            raise ValueError(f"standard input did not end within {_READ_TIMEOUT_S:g} s")
        part = os.read(_STDIN_FD, MAX_BYTES)
        if not part:
            break
        content += part
    return _checked_size(bytes(content))


def _checked_size(content: bytes) -> bytes:
    if not content.strip():
        raise ValueError("it is empty: give the JSON on standard input, or with --config FILE")
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    return content
