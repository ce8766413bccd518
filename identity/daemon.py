"""Start of a daemon: its log, the store and its identity, from the options that all daemons have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from identity.credentials import Credentials
from identity.flags import etcd_files, identity_folder, identity_option, read_identity
from identity.folder import IdentityFolder
from identity.names import Role
from machinery import process_log
from machinery.clock import SystemClock
from machinery.environment import drop_secrets
from machinery.log_flags import log_options
from machinery.process_log import LogRing
from machinery.process_secrets import disable_core_dumps
from store.etcd.address import EtcdAddress
from store.etcd.flags import VARIABLE_PREFIX, address_from_flags, etcd_options


def daemon_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `start_daemon` reads."""
    return etcd_options(identity_option(log_options(command)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """The parts that every daemon has."""

    clock: SystemClock
    ring: LogRing
    """The last lines of its log."""
    etcd: EtcdAddress
    folder: IdentityFolder | None
    credentials: Credentials | None
    """None until an identity is issued to it."""


def start_daemon(
    process: str, role: Role, options: Mapping[str, Any], *, identity_dir: Path | None = None
) -> Daemon:
    """Begin the life of a process; `identity_dir` is the default of --identity-dir.

    It dumps no core, and its children do not inherit the store's password.

    Raises:
        click.UsageError: an option is wrong, or a file that it names.

    """
    disable_core_dumps()
    ring, clock = LogRing(), SystemClock()
    process_log.setup(
        process,
        options["log_level"],
        log_format=options["log_format"],
        ring=ring,
        file=options["log_file"],
    )
    folder = identity_folder(options["identity_dir"], identity_dir)
    etcd = address_from_flags(options, identity=etcd_files(folder))
    drop_secrets(VARIABLE_PREFIX)
    credentials = read_identity(folder, role, clock)
    return Daemon(clock=clock, ring=ring, etcd=etcd, folder=folder, credentials=credentials)
