"""The verb `fleetctl backup`: writes all keys of a fleet to one file. The fleet may keep running."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click

from fleetctl.cli.connect import etcd_address, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.authority_backup import SealedAuthority, authority_options, seal_authority
from fleetctl.fleets.data_dir import DataDir
from machinery import files
from machinery.clock import SystemClock
from machinery.version import version as fleet_version
from schemas import quantity
from store import backup as backups
from store.backup import PREFIX
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect


@click.command(short_help="Write the whole store to FILE; the fleet may keep running.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--etcd-snapshot",
    is_flag=True,
    help="Write etcd's own snapshot, for `etcdutl snapshot restore`; `fleetctl restore` cannot read it.",
)
@click.option(
    "--with-ca",
    is_flag=True,
    help="Include the keys in --authority-dir (default: those of `fleetctl up --join`), encrypted with a passphrase.",
)
@authority_options
@store_options
def backup(file: Path, *, force: bool, etcd_snapshot: bool, with_ca: bool, **options: Any) -> None:
    """Write the whole store to FILE, as of one revision; the fleet may keep running.

    The file contains secrets and is readable by you only. `fleetctl restore` reads it. The key of the fleet's authority
    is in it with --with-ca only, and encrypted: without --passphrase-file with a new passphrase that is shown once.
    """
    etcd = etcd_address(options)
    if with_ca and etcd_snapshot:
        raise click.UsageError("--etcd-snapshot is etcd's own file; --with-ca needs ours")
    sealed = _sealed(options) if with_ca else None
    if etcd_snapshot and etcd.transport != "grpc":
        raise click.UsageError("--etcd-snapshot needs gRPC: remove --etcd-transport")
    if not file.absolute().parent.is_dir():
        raise FleetctlError(
            f"cannot write {file}: the folder {file.absolute().parent} does not exist"
        )
    if file.exists() and not file.is_file():
        raise FleetctlError(
            f"{file} is not a regular file (a device or a pipe?). Give the name of a file"
        )
    if (file.exists() or file.is_symlink()) and not force:
        raise FleetctlError(f"{file} already exists. Give another name, or --force to replace it")
    file = file.resolve()  # replace the target of a symbolic link, not the link
    with _replacing_file(file) as opened:
        summary = run(
            _snapshot(etcd, opened)
            if etcd_snapshot
            else _save(etcd, opened, None if sealed is None else sealed.text)
        )
    click.echo(f"backed up etcd at {etcd} to {file}: {summary}")
    if sealed is not None and sealed.new_passphrase:
        click.echo(
            f"passphrase of the authority in it, shown only now: {sealed.new_passphrase}", err=True
        )


def _sealed(options: dict[str, Any]) -> SealedAuthority:
    folder = options["authority_dir"]
    if folder is None and not options["etcd"]:
        folder = DataDir(options["data_dir"]).authority
    if folder is None or not folder.is_dir():
        raise click.UsageError(
            "--with-ca needs --authority-dir DIR, the folder with ca.pem and ca.key"
        )
    return seal_authority(folder, options["passphrase_file"])


@contextmanager
def _replacing_file(file: Path) -> Iterator[BinaryIO]:
    try:
        with files.open_replacement(file) as opened:
            yield opened
    except OSError as error:
        raise FleetctlError(
            f"cannot write {file}: {error.strerror}. No partial file was left behind"
        ) from error


async def _save(etcd: EtcdAddress, file: BinaryIO, authority: str | None) -> str:
    transport = connect(etcd)
    try:
        saved = await backups.save(
            transport,
            file,
            now=SystemClock().now(),
            fleet_version=fleet_version(),
            authority=authority,
        )
    finally:
        await transport.close()
    if saved.keys == 0:
        raise FleetctlError(
            f"etcd at {etcd} has no keys below {etcd.prefix}{PREFIX}, so there is nothing to back up. "
            "Check --etcd and --etcd-prefix"
        )
    return (
        f"{saved.keys} keys as of revision {saved.header.revision}, "
        f"{quantity.show(saved.size_bytes)}\nsha256 {saved.sha256}"
    )


async def _snapshot(etcd: EtcdAddress, file: BinaryIO) -> str:
    # Imported only here: this module loads the generated messages of etcd's API.
    from store.etcd.grpc import admin  # noqa: PLC0415 - see above

    member = admin.MaintenanceClient(admin.member_addresses(etcd)[0])
    try:
        snapshot = await member.snapshot(file)
    finally:
        await member.close()
    return (
        f"a snapshot for `etcdutl snapshot restore`, {quantity.show(snapshot.size_bytes)}\n"
        f"sha256 {snapshot.sha256}"
    )
