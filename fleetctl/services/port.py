"""The port `Services`: programs that the machine starts at boot and keeps running.

Two adapters: `fleetctl.services.launchd` and `fleetctl.services.systemd`. Everything above knows this port only.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fleetctl.cli.errors import FleetctlError


class ServiceError(FleetctlError):
    """A service that cannot be installed, started, stopped or removed; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One program that runs as a service. It holds no secret: every user may read a service's definition."""

    name: str
    """Name of the part: nodeagent, gateway, reconciler or etcd."""
    command: tuple[str, ...]
    """The executable as an absolute path, and its arguments."""
    log: Path
    """File for its output; systemd writes to its journal instead."""
    working_folder: Path
    python: Path
    """Interpreter of the installation, for what the adapter itself runs beside the program."""
    writable: tuple[Path, ...] = ()
    """The only folders that it may write to, where the adapter can enforce that."""
    user: str = ""
    """User that it runs as; empty for the user of the installing process."""
    group: str = ""
    environment: tuple[tuple[str, str], ...] = field(default=())
    stop_timeout_s: int = 30
    """Time to end after SIGTERM, in seconds, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """The state of one service, as its manager reports it."""

    is_installed: bool = False
    pid: int | None = None
    """The process of the program; None if it does not run."""
    restarts: int | None = None
    """Restarts after the program ended by itself; None if unknown."""
    last_exit: int | None = None
    """The last exit code; None if it never ended, or it is unknown."""
    note: str = ""
    """A sentence about what is unusual, with the remedy."""


class Services(Protocol):
    """A service manager. Every call may be repeated: one that was killed half way is finished by the next."""

    async def install(self, spec: ServiceSpec) -> None:
        """Write the definition, for this run and every boot; stop a service that runs with another definition."""
        ...

    async def start(self, name: str) -> None:
        """Start the service if it does not run.

        Raises:
            ServiceError: it is not installed, or its manager refuses to start it.

        """
        ...

    async def stop(self, name: str) -> None:
        """End the program, and nothing that it started; it runs again after `start` or the next boot."""
        ...

    async def state(self, name: str) -> ServiceState:
        """Return the state; one that is not installed is no error."""
        ...

    async def remove(self, name: str) -> None:
        """Stop the service and delete its definition."""
        ...
