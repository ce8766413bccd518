"""The data folder of a fleet that `fleetctl up` runs: its layout, its version, who holds it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fleetctl.cli.errors import FleetctlError
from machinery.files import write_atomically

# Counted up when an older fleetctl could damage what a newer one wrote.
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """What of a running fleet others need to know."""

    layout_version: int
    gateway_url: str
    pid: int
    """The supervisor's."""
    is_ready: bool
    error: str = ""
    warning: str = ""


class DataDir:
    """One data folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def etcd(self) -> Path:
        return self.path / "etcd"

    @property
    def restoring(self) -> Path:
        """Where `fleetctl restore` makes a store, until it is whole."""
        return self.path / "etcd.restoring"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def fleet_file(self) -> Path:
        return self.path / "fleet.json"

    def log(self, program: str) -> Path:
        return self.path / "logs" / f"{program}.log"

    def record(self, program: str) -> Path:
        return self.path / "run" / f"{program}.pid"

    def records(self) -> list[Path]:
        return sorted((self.path / "run").glob("*.pid"))

    def node(self, name: str) -> Path:
        return self.path / "nodes" / name

    def nodes(self) -> list[Path]:
        return sorted((self.path / "nodes").glob("*"))

    def prepare(self) -> None:
        """Make the folder, or make sure that this version may use it.

        Raises:
            FleetctlError: it cannot be written to, or a newer version wrote it.

        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "run").mkdir(exist_ok=True)
        except OSError as error:
            raise FleetctlError(
                f"cannot use the data folder {self.path}: {error.strerror}. "
                "Choose another with --data-dir, or mend its permissions"
            ) from error
        self.check_version()

    def check_version(self) -> None:
        """Refuse a folder that a newer version wrote."""
        try:
            tree = json.loads(self.fleet_file.read_text())
            version = int(tree["layout_version"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FleetctlError(
                f"{self.fleet_file} cannot be read ({error}); it says which version wrote the "
                "folder. Restore it from a backup, or choose another --data-dir"
            ) from error
        if version > LAYOUT_VERSION:
            raise FleetctlError(
                f"{self.path} was written by a newer mlx-fleet (layout {version}, this one knows "
                f"{LAYOUT_VERSION}). Upgrade mlx-fleet, or choose another --data-dir"
            )

    def refuse_unfinished(self) -> None:
        """Refuse a folder in which a restore was killed: what is in `etcd` may not be what is meant."""
        if self.restoring.exists():
            raise FleetctlError(
                f"a `fleetctl restore` into {self.path} was interrupted. Run it again; or remove "
                f"{self.restoring} to go on with what was there before"
            )

    def read(self) -> FleetRecord | None:
        """Return what the fleet's supervisor wrote last; None if there never was one."""
        self.check_version()
        try:
            return FleetRecord(**json.loads(self.fleet_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, fleet: FleetRecord) -> None:
        """Tell others about the fleet."""
        try:
            write_atomically(self.fleet_file, json.dumps(asdict(fleet), indent=2) + "\n")
        except OSError as error:
            raise FleetctlError(
                f"cannot write {self.fleet_file}: {error.strerror}. Free some space or mend its "
                "permissions"
            ) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder: one supervisor at a time.

        Raises:
            FleetctlError: a fleet runs in it already.

        """
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FleetctlError(
                    f"a fleet already runs in {self.path}. Stop it with `fleetctl down`, or give "
                    "this one its own --data-dir"
                ) from error
            yield

    def is_held(self) -> bool:
        """Return whether a supervisor runs in the folder."""
        try:
            with (self.path / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False
