"""Texts that a verb writes to a file or to standard output."""

from pathlib import Path

import click

from fleetctl.cli.errors import FleetctlError


def save_text(text: str, output: Path | None) -> None:
    """Write the text to the file, or to standard output if `output` is None.

    Raises:
        FleetctlError: the file cannot be written.

    """
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FleetctlError(f"cannot write {output}: {error.strerror}") from error
