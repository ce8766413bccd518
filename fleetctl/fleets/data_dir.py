"""The data folder of a fleet that `fleetctl up` runs: layout, layout version and lock."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fleetctl.cli.connect import LOCK
from fleetctl.cli.errors import FleetctlError
from machinery import unix_sockets
from machinery.files import is_locked, make_owner_folder, write_atomically

# Increase this when an older fleetctl could damage the data of a newer one.
LAYOUT_VERSION = 1
# The last engine of the last node that `fleetctl up` may run.
_LONGEST_SOCKET = "node-64/65535.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """The state of a running fleet (fleet.json), for other fleetctl commands."""

    layout_version: int
    gateway_url: str
    pid: int
    """Process id of the supervisor."""
    is_ready: bool
    error: str = ""
    warning: str = ""
    flags: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Flags of the last `fleetctl up` that got ready, by option, where they differ from the defaults."""


class DataDir:
    """One data folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def etcd(self) -> Path:
        """Folder of the embedded etcd."""
        return self.path / "etcd"

    @property
    def restoring(self) -> Path:
        """Folder in which `fleetctl restore` builds a store; renamed to `etcd` when the store is complete."""
        return self.path / "etcd.restoring"

    @property
    def authority(self) -> Path:
        """Folder of the fleet's certificate authority; it exists once other machines may join."""
        return self.path / "authority"

    @property
    def passwords(self) -> Path:
        """Folder of the processes' passwords in etcd."""
        return self.path / "passwords"

    @property
    def api_key(self) -> Path:
        """File with the API key of fleetctl on this machine."""
        return self.passwords / "api-key"

    def identity(self, role: str) -> Path:
        """Return the folder with the identity of the reconciler, the gateway, etcd or the administrator."""
        return self.path / "identities" / role

    def node_identity(self, name: str) -> Path:
        """Return the folder with a node's identity."""
        return self.node(name) / "identity"

    @property
    def models(self) -> Path:
        """Folder of the demo's model."""
        return self.path / "models"

    @property
    def fleet_file(self) -> Path:
        """File with the state of the fleet."""
        return self.path / "fleet.json"

    @property
    def previous_context_file(self) -> Path:
        """File with the name of the context that `fleetctl up` replaced as the current one."""
        return self.path / "previous-context"

    @property
    def engine_sockets(self) -> Path:
        """Folder of the sockets of engines; in a temporary folder if the data folder's path is too long."""
        return unix_sockets.short_folder(self.path, _LONGEST_SOCKET)

    def log(self, program: str) -> Path:
        """Return the log file of a program."""
        return self.path / "logs" / f"{program}.log"

    def record(self, program: str) -> Path:
        """Return the file that records the process of a program."""
        return self.path / "run" / f"{program}.pid"

    def records(self) -> list[Path]:
        """Return the records of all programs that were started."""
        return sorted((self.path / "run").glob("*.pid"))

    def node(self, name: str) -> Path:
        """Return the state folder of a node's agent."""
        return self.path / "nodes" / name

    def nodes(self) -> list[Path]:
        """Return the state folders of all agents."""
        return sorted((self.path / "nodes").glob("*"))

    def prepare(self) -> None:
        """Create the folder, or check that this version may use it.

        Raises:
            FleetctlError: the folder is not writable, or a newer version wrote it.

        """
        try:
            # Logs name who asked which model when.
            make_owner_folder(self.path, sign=LOCK)
            for name in ("run", "logs", "nodes"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise FleetctlError(
                f"cannot use the data folder {self.path}: {error.strerror}. "
                "Choose another with --data-dir, or fix its permissions"
            ) from error
        self.check_version()

    def check_version(self) -> None:
        """Refuse a folder that a newer version wrote.

        Raises:
            FleetctlError: the layout is newer than this version, or fleet.json cannot be read.

        """
        try:
            tree = json.loads(self.fleet_file.read_text())
            version = int(tree["layout_version"])
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FleetctlError(
                f"{self.fleet_file} cannot be read ({error}). The file records which version wrote the "
                "folder. Restore it from a backup, or choose another --data-dir"
            ) from error
        if version > LAYOUT_VERSION:
            raise FleetctlError(
                f"{self.path} was written by a newer mlx-fleet (layout {version}; this version supports up to "
                f"layout {LAYOUT_VERSION}). Upgrade mlx-fleet, or choose another --data-dir"
            )

    def refuse_unfinished(self) -> None:
        """Refuse a folder in which a restore was killed: `etcd` may hold the old data."""
        if self.restoring.exists():
            raise FleetctlError(
                f"a `fleetctl restore` into {self.path} was interrupted. Run it again, or delete "
                f"{self.restoring} to keep the previous store"
            )

    def read(self) -> FleetRecord | None:
        """Return the last state that the supervisor wrote; None if no fleet ever ran in the folder."""
        self.check_version()
        try:
            return FleetRecord(**json.loads(self.fleet_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, fleet: FleetRecord) -> None:
        """Write fleet.json.

        Raises:
            FleetctlError: the file cannot be written.

        """
        try:
            write_atomically(self.fleet_file, json.dumps(asdict(fleet), indent=2) + "\n")
        except OSError as error:
            raise FleetctlError(
                f"cannot write {self.fleet_file}: {error.strerror}. Free some disk space or fix its "
                "permissions"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for the length of the block; only one supervisor may run in it.

        Raises:
            FleetctlError: a fleet already runs in the folder.

        """
        with (self.path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FleetctlError(
                    f"a fleet already runs in {self.path}. Stop it with `fleetctl down`, or give "
                    "this fleet its own --data-dir"
                ) from error
            yield

    def is_locked(self) -> bool:
        """Return whether a supervisor runs in the folder."""
        return is_locked(self.path / LOCK)
