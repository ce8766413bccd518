"""`fleetctl backup`: all that a fleet declares and knows, in one file. The fleet may run meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click
from click.core import ParameterSource

from fleetctl.connect import find, run, store_options
from fleetctl.errors import FleetctlError
from machinery import files
from machinery.clock import SystemClock
from machinery.version import version as fleet_version
from schemas import quantity
from store.backup import save as backups
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@click.option(
    "--etcd-snapshot",
    is_flag=True,
    help="A snapshot of etcd's own, for `etcdutl snapshot restore`; not for `fleetctl restore`.",
)
@store_options
@click.pass_context
def backup(
    ctx: click.Context, /, file: Path, *, force: bool, etcd_snapshot: bool, **options: Any
) -> None:
    """Write all that is in the store to FILE, as of one moment; the fleet may run meanwhile.

    The file holds everything, secrets included, and is readable by you alone. `fleetctl restore` takes it.
    """
    etcd = find(one_target(ctx, options))
    if etcd_snapshot and etcd.transport != "grpc":
        raise click.UsageError("--etcd-snapshot needs gRPC: leave out --etcd-transport")
    _refuse_overwriting(file, force=force)
    with _written(file) as opened:
        told = run(_snapshot(etcd, opened) if etcd_snapshot else _save(etcd, opened))
    click.echo(f"backed up etcd at {etcd} to {file}: {told}")


def one_target(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with one store in them: a flag is stronger than an environment variable.

    Elsewhere --etcd beats --data-dir; here a forgotten FLEET_ETCD must not lead to another store than
    the one on the command line.
    """
    said = {
        name
        for name in ("etcd", "data_dir")
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if len(said) == 2:
        raise click.UsageError("give --etcd or --data-dir: they are two stores")
    return {**options, "etcd": ()} if said == {"data_dir"} else options


def _refuse_overwriting(file: Path, *, force: bool) -> None:
    if not file.absolute().parent.is_dir():
        raise FleetctlError(f"cannot write {file}: there is no folder {file.absolute().parent}")
    if file.exists() and not force:
        raise FleetctlError(f"{file} is there already. Give another name, or --force to replace it")


@contextmanager
def _written(file: Path) -> Iterator[BinaryIO]:
    try:
        with files.replacing(file) as opened:
            yield opened
    except OSError as error:
        raise FleetctlError(
            f"cannot write {file}: {error.strerror}. Nothing of it was left behind"
        ) from error


async def _save(etcd: EtcdAddress, file: BinaryIO) -> str:
    transport = connect(etcd)
    try:
        saved = await backups.save(
            transport, file, now=SystemClock().now(), fleet_version=fleet_version()
        )
    finally:
        await transport.close()
    return (
        f"{saved.keys} keys as of revision {saved.header.revision}, "
        f"{quantity.show(saved.size_bytes)}\nsha256 {saved.sha256}"
    )


async def _snapshot(etcd: EtcdAddress, file: BinaryIO) -> str:
    # Only where it is needed: it takes the generated messages of etcd's API with it.
    from store.etcd.grpc.maintenance import Maintenance, each_endpoint  # noqa: PLC0415 - see above

    member = Maintenance(each_endpoint(etcd)[0])
    try:
        taken = await member.snapshot(file)
    finally:
        await member.close()
    return (
        f"a snapshot for `etcdutl snapshot restore`, {quantity.show(taken.size_bytes)}\n"
        f"sha256 {taken.sha256}"
    )
