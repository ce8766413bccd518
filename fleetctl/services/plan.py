"""The changes of the machine that a service needs: a value that is computed from settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

from fleetctl.services import launchd, link_plan
from fleetctl.services.changes import (
    BridgeChange,
    Change,
    ExclusionChange,
    FileChange,
    FirewallChange,
    FolderChange,
    MembershipChange,
    NetworkServiceChange,
    NetworkSwitchChange,
    PowerChange,
    ServiceChange,
    UserChange,
    WiredLimitChange,
    key_of,
)
from fleetctl.services.host import ROLE_USER
from fleetctl.services.layout import Backend, Layout
from fleetctl.services.macos_settings import POWER_SETTINGS, REPORTS_GROUP
from fleetctl.services.port import ServiceSpec
from fleetctl.services.programs import PROGRAMS, Part, ServiceCommand
from machinery import macos_commands
from nodeagent.hardware.service_definitions import label_of
from schemas.wire import wired_limit

_USER_PATH: Final = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSettings:
    """Settings of `fleetctl service install`."""

    part: Part
    command: ServiceCommand
    backend: Backend
    layout: Layout
    user: str = ""
    """User that the service runs as; empty for that of the installing process, with --user and the plain backend."""
    group: str = ""
    user_home: Path = Path("/var/empty")
    """Home of the user of a fleet."""
    has_power: bool = True
    has_firewall: bool = True
    wired_limit_mib: int | None = None

    @property
    def is_system(self) -> bool:
        """Return whether it is a service of the machine, and not of one user."""
        return bool(self.user)

    @property
    def is_mac(self) -> bool:
        return self.backend == "launchd"


def service_spec(settings: InstallSettings) -> ServiceSpec:
    """Return the definition of the service."""
    layout, state = settings.layout, settings.command.state_folder
    is_fleet = settings.part == "fleet"
    home = settings.user_home if is_fleet else _home(layout)
    # Where Homebrew installs etcd; launchd gives jobs a PATH without it.
    path = (("PATH", _USER_PATH),) if is_fleet else ()
    return ServiceSpec(
        name=settings.part,
        command=settings.command.argv,
        log=state / "logs" / "up.log" if is_fleet else layout.logs / f"{settings.part}.log",
        working_folder=state if is_fleet else layout.state,
        # The interpreter beside the program; one of another installation has other packages.
        python=_python(settings),
        writable=(layout.state, *settings.command.folders),
        user=settings.user,
        group=settings.group,
        environment=(
            ("HOME", str(home)),
            *path,
            ("LANG", "en_US.UTF-8" if settings.is_mac else "C.UTF-8"),
            # Engines never download: models come through the agent.
            ("HF_HUB_OFFLINE", "1"),
            ("TRANSFORMERS_OFFLINE", "1"),
            ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ),
        stop_timeout_s=PROGRAMS[settings.part].stop_timeout_s,
    )


def desired_changes(settings: InstallSettings) -> list[Change]:
    """Return the changes that the service needs, in the order in which they are made; the service is the last."""
    changes: list[Change] = []
    if settings.user == ROLE_USER:
        changes.append(UserChange(name=ROLE_USER))
        if settings.is_mac and settings.part == "nodeagent":
            # Reports of kernel panics and of memory that ran out belong to this group (docs/operations/nodes.md).
            changes.append(MembershipChange(user=ROLE_USER, group=REPORTS_GROUP))
    if settings.part != "fleet":  # its folders are those of its user
        changes += _folders(settings)
    if settings.is_mac and settings.is_system:
        changes += _settings_of_macos(settings)
    if settings.is_mac:
        changes += _exclusions(settings)
    engines = settings.command.state_folder / "engines" if settings.part == "nodeagent" else ""
    changes.append(ServiceChange(name=settings.part, engines=str(engines)))
    return list({key_of(change): change for change in changes}.values())


def _folders(settings: InstallSettings) -> Iterator[FolderChange]:
    layout, user = settings.layout, settings.user
    own = layout.state / settings.part
    yield from _parents(layout, layout.state, layout.logs, layout.definitions / "file")
    # Open: people put models below it. What is private in it has a mode of its own.
    yield FolderChange(path=str(layout.state), mode=0o755, owner=user, on_undo="keep")
    yield FolderChange(path=str(_home(layout)), mode=0o700, owner=user)
    if settings.backend != "systemd":
        yield FolderChange(path=str(layout.logs), mode=0o750, owner=user)
    if settings.command.state_folder == own:
        keeps = PROGRAMS[settings.part].keeps_state
        yield FolderChange(
            path=str(own), mode=0o700, owner=user, on_undo="keep" if keeps else "delete"
        )
    if user and settings.command.identity_folder is not None:
        # `sudo fleetctl join` has written it as root.
        folder = str(settings.command.identity_folder)
        yield FolderChange(path=folder, mode=0o700, owner=user, has_content=True, on_undo="keep")
    if settings.command.models_folder == layout.models:
        yield FolderChange(path=str(layout.models), mode=0o755, owner=user, on_undo="keep")


def _parents(layout: Layout, *folders: Path) -> Iterator[FolderChange]:
    """Yield the folders above, which exist on most machines; one that is created goes when it is empty."""
    parents = {
        parent
        for folder in folders
        for parent in folder.parents
        # changes.json brings its own folders.
        if parent.is_relative_to(layout.root) and not layout.home.is_relative_to(parent)
    }
    for parent in sorted(parents):
        yield FolderChange(path=str(parent), mode=0o755, on_undo="prune")


def _settings_of_macos(settings: InstallSettings) -> Iterator[Change]:
    if settings.has_power:
        yield from (PowerChange(key=key, new=value) for key, value in POWER_SETTINGS.items())
    if settings.has_firewall:
        # The firewall knows the real program of a process: the interpreter, not a script or a link.
        program = Path(settings.command.argv[0]) if settings.part == "etcd" else _python(settings)
        yield FirewallChange(path=str(program.resolve()), program=str(program))
    if settings.wired_limit_mib is not None:
        yield WiredLimitChange(new=settings.wired_limit_mib)
        label = label_of(wired_limit.JOB_NAME)
        command = macos_commands.WIRED_LIMIT_SET.argv(mebibytes=str(settings.wired_limit_mib))
        yield FileChange(
            path=str(settings.layout.definitions / f"{label}.plist"),
            content=launchd.command_plist(wired_limit.JOB_NAME, command).decode(),
        )


def _exclusions(settings: InstallSettings) -> Iterator[ExclusionChange]:
    """Yield the folders of models and of the agent's state: both are fetched or made again. etcd's stays in backups."""
    command = settings.command
    if command.models_folder is not None:
        yield ExclusionChange(path=str(command.models_folder))
    if settings.part == "nodeagent":
        yield ExclusionChange(path=str(command.state_folder))


def _home(layout: Layout) -> Path:
    """Return the home folder of the services: what libraries write there is deleted with them."""
    return layout.state / "home"


def _python(settings: InstallSettings) -> Path:
    beside = Path(settings.command.argv[0]).parent / "python"
    return beside if beside.exists() else settings.layout.python


def sentence(change: Change) -> str:
    """Return one line about a change, for people."""
    match change:
        case FolderChange():
            verb = "create" if change.old is None else "change"
            old = "" if change.old is None else f" (now {change.old.mode:04o})"
            owner = f", owner {change.owner}" if change.owner else ""
            text = f"{verb} folder {change.path}: mode {change.mode:04o}{owner}{old}"
        case FileChange():
            text = f"{'create' if change.old is None else 'replace'} file {change.path}"
        case UserChange():
            text = f"create user and group {change.name}, which cannot log in"
        case PowerChange():
            text = f"set pmset {change.key} on mains power: {change.old} -> {change.new}"
        case FirewallChange():
            text = f"let {change.path} through the application firewall"
        case ExclusionChange():
            text = f"keep {change.path} out of Time Machine and Spotlight"
        case MembershipChange():
            text = f"make {change.user} a member of {change.group}, which may read macOS's reports"
        case WiredLimitChange():
            text = f"set sysctl iogpu.wired_limit_mb: {change.old} -> {change.new}"
        case BridgeChange() | NetworkServiceChange() | NetworkSwitchChange():
            text = link_plan.sentence(change)
        case ServiceChange():
            text = f"install and start the service {change.name}"
        case _:
            assert_never(change)
    return text
