"""Folders of an installation: the program, its state, its logs, and the definitions of its services."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from fleetctl.services.port import ServiceError

Backend: TypeAlias = Literal["launchd", "systemd"]
BACKENDS: Final[tuple[Backend, ...]] = ("launchd", "systemd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Folders of one installation."""

    root: Path
    """The folder above all others that exists on every machine: `/`, or the home of the user."""
    home: Path
    """The program's versions, `current`, and changes.json."""
    state: Path
    """Working folder of the services; models, identities and data below it."""
    logs: Path
    definitions: Path

    @property
    def python(self) -> Path:
        """Return the interpreter of the installed version."""
        return self.home / "current" / "bin" / "python"

    @property
    def models(self) -> Path:
        """Return the default folder of models."""
        return self.state / "models"

    @property
    def node_identity(self) -> Path:
        """Return the folder of the identity of the node agent; `service uninstall` deletes it with the agent's folder."""
        return self.state / "nodeagent" / "identity"

    def program(self, name: str) -> Path:
        """Return a program of the installed version."""
        return self.home / "current" / "bin" / name


def default_backend(platform: str) -> Backend:
    """Return the service manager of a platform."""
    return "launchd" if platform == "darwin" else "systemd"


def running_backend(platform: str) -> Backend:
    """Return the service manager that runs on this machine.

    Raises:
        ServiceError: there is none.

    """
    backend = default_backend(platform)
    # The test of sd_booted(3).
    if backend == "systemd" and not Path("/run/systemd/system").is_dir():
        raise ServiceError(
            "this machine has no systemd (/run/systemd/system does not exist), which starts a service at boot and keeps it "
            "running. Let what supervises this container run the program itself, such as `fleet-nodeagent --etcd ...`, or "
            "start a fleet of this machine with `fleetctl up`"
        )
    return backend


def system_layout(backend: Backend, root: Path) -> Layout:
    """Return the folders of services of the machine."""
    home = root / "opt" / "mlx-fleet"
    if backend == "launchd":
        return Layout(
            root=root,
            home=home,
            state=root / "Library" / "Application Support" / "mlx-fleet",
            logs=root / "Library" / "Logs" / "mlx-fleet",
            definitions=root / "Library" / "LaunchDaemons",
        )
    return Layout(
        root=root,
        home=home,
        state=root / "var" / "lib" / "mlx-fleet",
        logs=root / "var" / "log" / "mlx-fleet",
        definitions=root / "etc" / "systemd" / "system",
    )


def user_layout(backend: Backend, user_home: Path, platform: str) -> Layout:
    """Return the folders of services of one user."""
    is_mac = backend == "launchd" or platform == "darwin"
    library = user_home / "Library"
    home = (
        library / "Application Support" / "mlx-fleet"
        if is_mac
        else user_home / ".local" / "share" / "mlx-fleet"
    )
    definitions = {
        "launchd": library / "LaunchAgents",
        "systemd": user_home / ".config" / "systemd" / "user",
    }
    return Layout(
        root=user_home,
        home=home,
        state=home / "data",
        logs=library / "Logs" / "mlx-fleet" if is_mac else home / "logs",
        definitions=definitions[backend],
    )
