"""The verb `fleetctl mac-report`: writes one file with what this Mac says about itself, cross-checked and anonymised."""

import sys
from pathlib import Path
from typing import Final

import click

from fleetctl.cli.connect import run
from fleetctl.cli.errors import FleetctlError
from fleetctl.mac_report import collect
from fleetctl.mac_report.collect import ReportSettings
from machinery.clock import SystemClock

_HELP = """Run every macOS command that the fleet's programs run, compare each value with a second source, and write one file.

\b
Without --sudo: as you. With --sudo: also as the service's account and inside a LaunchDaemon that is removed again;
measures how launchd ends and loads jobs, and what macOS lets each kind of process reach on the local network.
With --with-model: also runs an engine on the model and compares its memory with what macOS reports.

Serial numbers, UUIDs, hardware and IP addresses, names of hosts and users, and keys are replaced by one keyed hash, so
that equal values stay equal. The same --key on two Macs makes the ends of their cables match. The command prints what it
replaced, and writes nothing if a known secret is still in the report.

The exit code is 0 only if all comparisons hold. Nothing is compared by eye: send the file.
"""


IS_MAC: Final[bool] = sys.platform == "darwin"


def _show(line: str) -> None:
    click.echo(line, err=True)


@click.command(
    "mac-report", help=_HELP, short_help="Write a report of this Mac for the developers."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, such as mac.tar.gz.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option(
    "--sudo",
    "has_sudo",
    is_flag=True,
    help="Also run the commands as the service's account and in a LaunchDaemon; asks for your password.",
)
@click.option(
    "--with-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a small MLX model; an engine loads it and generates for 30 seconds.",
)
@click.option(
    "--key",
    default="",
    help="Words for the hash, the same on two Macs that a cable connects (default: random).",
)
def mac_report(
    output: Path, *, force: bool, has_sudo: bool, with_model: Path | None, key: str
) -> None:
    """Write a report of this Mac."""
    if not IS_MAC:
        raise FleetctlError(
            f"mac-report reads macOS, and this machine runs {sys.platform}; run it on the Mac"
        )
    if output.exists() and not force:
        raise FleetctlError(f"{output} already exists; use --force to overwrite it")
    settings = ReportSettings(has_sudo=has_sudo, model=with_model, key=key)
    report = run(collect.collect_report(settings, SystemClock(), _show))
    try:
        report.write(output)
    except OSError as error:
        raise FleetctlError(f"cannot write {output}: {error.strerror}") from error
    for line in report.summary():
        click.echo(line)
    click.echo(f"{output}: review it before you send it", err=True)
    if not report.holds:
        raise SystemExit(1)
