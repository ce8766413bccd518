"""The verb `fleetctl support-bundle`: writes a redacted archive for the diagnosis of problems."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from fleetctl.cli.connect import etcd_address, open_store, process_options, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.fleets.dialer import open_dialer
from fleetctl.mac_report.collect import ReportSettings, collect_report
from fleetctl.support_bundle import contents
from fleetctl.support_bundle.contents import BundleArchive, BundleRequest
from insight.doctor import checks
from insight.doctor.findings import findings_tree
from machinery import files
from machinery.clock import SystemClock
from schemas import duration, quantity
from store.errors import StoreError

IS_MAC: Final[bool] = sys.platform == "darwin"
_MAC_LIMIT_S: Final = 180.0

_HELP = """Write an archive for the diagnosis of problems: objects, events, versions, doctor's findings, and metrics and logs of
agents, engines and gateways; on a Mac also what mac-report collects without --sudo.

Secrets, prompts, answers, home folders and mail addresses are removed; names of machines and models stay. README.txt in
the archive lists the contents, and processes that did not answer. Review the archive before you share it.
"""


@click.command(
    "support-bundle", help=_HELP, short_help="Write an archive for the person who helps you."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (default: fleet-support-DATE.tar.gz in the current folder).",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--no-logs", is_flag=True, help="Leave out the logs.")
@click.option("--node", multiple=True, help="Include the logs of this node only; repeatable.")
@click.option(
    "--tail",
    type=click.IntRange(1, 1_000_000),
    default=5000,
    show_default=True,
    help="Lines of each log, up to 2 MiB.",
)
@click.option("--since", default="", help="Include only log lines of this period, such as 2h.")
@click.option(
    "--max-size",
    default="64Mi",
    show_default=True,
    help="Maximum size before compression; further files are left out.",
)
@process_options
def support_bundle(output: Path | None, force: bool, max_size: str, **options: Any) -> None:
    """Write a redacted archive for the diagnosis of problems."""
    clock = SystemClock()
    now = clock.now()
    name = f"fleet-support-{now:%Y%m%d-%H%M%S}"
    path = Path(f"{name}.tar.gz") if output is None else output
    if path.exists() and not force:
        raise FleetctlError(f"{path} already exists; use --force to overwrite it")
    if not path.parent.is_dir():
        raise FleetctlError(f"cannot write {path}: the folder {path.parent} does not exist")
    request = BundleRequest(
        has_logs=not options["no_logs"],
        nodes=options["node"],
        tail=options["tail"],
        since=_since(options["since"]),
    )
    limit = _limit(max_size)
    try:
        with files.open_replacement(path) as file, ProgressLine() as progress:
            archive = BundleArchive(file, name, now, limit)
            run(_fill(archive, request, progress, options))
            archive.finish()
    except OSError as error:
        raise FleetctlError(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"{path}: {len(archive.entries)} files, {quantity.show(path.stat().st_size)}")
    for line in archive.missing:
        click.echo(f"warning: missing: {line}", err=True)
    click.echo("secrets were removed; review the file before you share it", err=True)


def _since(text: str) -> str:
    if text:
        try:
            duration.parse(text)
        except ValueError as error:
            raise click.UsageError(f"--since: {error}") from error
    return text


def _limit(text: str) -> int:
    try:
        return quantity.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--max-size: {error}") from error


async def add_mac(
    archive: BundleArchive, settings: ReportSettings, show: Callable[[str], object]
) -> None:
    """Add what macOS says of this Mac, as mac-report does without --sudo."""
    try:
        async with asyncio.timeout(_MAC_LIMIT_S):
            report = await collect_report(settings, SystemClock(), show)
    except (FleetctlError, TimeoutError) as error:
        archive.add_missing("mac-report.json", str(error) or f"not ready after {_MAC_LIMIT_S:g} s")
        return
    archive.add_tree("mac-report.json", report.tree)


async def _fill(
    archive: BundleArchive, request: BundleRequest, progress: ProgressLine, options: dict[str, Any]
) -> None:
    address = etcd_address(options)
    folder: Path | None = None if options["etcd"] else options["data_dir"]
    if folder is not None:
        contents.add_local_logs(archive, folder, request)
    if IS_MAC:
        await add_mac(archive, ReportSettings(), progress.show)
    try:
        async with open_store(options) as transport:
            dialer = await open_dialer(options, transport)
            collector = contents.BundleCollector(transport, archive, SystemClock(), dialer)
            progress.show("reading the store")
            await collector.add_fleet(address, folder)
            await collector.add_processes(request, progress)
    except StoreError as error:
        # A bundle is most useful when the store is the problem, so write it anyway.
        archive.add_tree("doctor.json", findings_tree(checks.unreachable_findings(str(error))))
        archive.add_missing("all objects in the store, and all agents and gateways", str(error))
