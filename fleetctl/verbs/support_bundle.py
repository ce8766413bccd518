"""`fleetctl support-bundle`: one file with what somebody who helps needs to see, secrets taken out."""

from pathlib import Path
from typing import Any

import click

from fleetctl.cli.connect import etcd_address, open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.doctor import checks
from fleetctl.support_bundle import contents
from fleetctl.support_bundle.contents import BundleArchive, BundleRequest
from machinery import files
from machinery.clock import SystemClock
from schemas import duration, quantity
from store.errors import StoreError

_HELP = """Write one file with what somebody who helps needs to see: objects, events, versions, what doctor finds, figures and
logs of agents, engines and gateways.

Secrets, what was asked of models, home folders and mail addresses are taken out; README.txt in the file says what is in it.
Names of machines and models stay. Look through it before you give it to anybody. Who does not answer is noted there.
"""


@click.command("support-bundle", help=_HELP)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write (else fleet-support-DATE.tar.gz in this folder).",
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--no-logs", is_flag=True, help="Leave the logs out.")
@click.option("--node", multiple=True, help="Only this node's logs (again for each).")
@click.option(
    "--tail",
    type=click.IntRange(1, 1_000_000),
    default=5000,
    show_default=True,
    help="So many lines of each log, 2 MiB at most.",
)
@click.option("--since", default="", help="Only what was logged within so long, such as 2h.")
@click.option(
    "--max-size",
    default="64Mi",
    show_default=True,
    help="How much may be in it, before it is compressed; what is beyond is left out.",
)
@store_options
def support_bundle(output: Path | None, force: bool, max_size: str, **options: Any) -> None:
    """Write one file with what somebody who helps needs to see, secrets taken out."""
    clock = SystemClock()
    now = clock.now()
    name = f"fleet-support-{now:%Y%m%d-%H%M%S}"
    path = Path(f"{name}.tar.gz") if output is None else output
    if path.exists() and not force:
        raise FleetctlError(f"{path} is there already; give --force to write over it")
    if not path.parent.is_dir():
        raise FleetctlError(f"cannot write {path}: there is no folder {path.parent}")
    wish = BundleRequest(
        has_logs=not options["no_logs"],
        nodes=options["node"],
        tail=options["tail"],
        since=_since(options["since"]),
    )
    limit = _limit(max_size)
    try:
        with files.open_replacement(path) as file, ProgressLine() as progress:
            archive = BundleArchive(file, name, now, limit)
            run(_fill(archive, wish, progress, options))
            archive.finish()
    except OSError as error:
        raise FleetctlError(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"{path}: {len(archive.entries)} files, {quantity.show(path.stat().st_size)}")
    for line in archive.missing:
        click.echo(f"warning: not in it: {line}", err=True)
    click.echo("secrets were taken out; look through it before you give it to anybody", err=True)


def _since(text: str) -> str:
    if text:
        try:
            duration.parse_fine(text)
        except ValueError as error:
            raise click.UsageError(f"--since: {error}") from error
    return text


def _limit(text: str) -> int:
    try:
        return quantity.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--max-size: {error}") from error


async def _fill(
    archive: BundleArchive, wish: BundleRequest, progress: ProgressLine, options: dict[str, Any]
) -> None:
    address = etcd_address(options)
    folder: Path | None = None if options["etcd"] else options["data_dir"]
    if folder is not None:
        contents.add_local_logs(archive, folder, wish)
    try:
        async with open_store(options) as transport:
            found = contents.BundleCollector(transport, archive, SystemClock())
            progress.show("reading the store")
            await found.fleet(str(address), folder)
            await found.told(wish, progress)
    except StoreError as error:
        # A bundle is wanted most where the store is what is wrong.
        archive.add_tree(
            "doctor.json", checks.findings_tree(checks.unreachable_findings(str(error)))
        )
        archive.miss("what is in the store, and everybody who is found by it", str(error))
