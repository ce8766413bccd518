"""The verb `fleetctl service`: programs of the fleet as services of this machine."""

import asyncio
import os
import pwd
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from fleetctl.cli.arguments import parse_duration
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.output import printers
from fleetctl.services import link_plan
from fleetctl.services.changes import ChangeRecord
from fleetctl.services.host import ROLE_USER, Host, find_user
from fleetctl.services.installer import ServiceInstaller, installed_parts
from fleetctl.services.launchd import LaunchdServices
from fleetctl.services.layout import (
    BACKENDS,
    Backend,
    Layout,
    default_backend,
    running_backend,
    system_layout,
    user_layout,
)
from fleetctl.services.plan import InstallSettings, desired_changes, sentence, service_spec
from fleetctl.services.port import Services, ServiceState
from fleetctl.services.programs import PROGRAMS, SERVICES, Part, build_command
from fleetctl.services.systemd import SystemdServices
from machinery.clock import SystemClock
from schemas import local_network, quantity

# The exit code of `systemctl status` for a service that does not run.
_NOT_RUNNING: Final = 3
_TITLES: Final = ("NAME", "STATE", "PID", "RESTARTS", "LAST EXIT", "LOG")
_SECOND_BEST: Final = (
    "warning: --user is second best: the service runs only while you are logged in, and macOS may keep it from "
    f"reaching other Macs ({local_network.NAME})"
)

_part = click.argument("part", type=click.Choice(SERVICES))
_parts = click.argument("parts", type=click.Choice(SERVICES), nargs=-1)


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that say which installation is meant."""
    root = click.option(
        "--root",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("/"),
        hidden=True,
        help="Folder above all paths, as systemctl --root: for images and tests.",
    )
    user = click.option(
        "--user",
        "is_user",
        is_flag=True,
        help="A service of this user, without root: LaunchAgent or systemd --user. Second best: it does not run before "
        "the user logs in.",
    )
    return user(root(command))


_HELP = """Install programs of the fleet as services of this machine: they start at boot and are kept running.

\b
  sudo fleetctl service install nodeagent -- --etcd https://mac-1:2379
  fleetctl service status
  sudo fleetctl service uninstall nodeagent
"""


@click.group(
    "service",
    cls=SuggestingGroup,
    help=_HELP,
    short_help="Run programs of the fleet as services, from boot on.",
)
def service() -> None:
    """Install programs of the fleet as services of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The services of one layout, with their manager."""

    backend: Backend
    layout: Layout
    services: Services
    is_system: bool

    @property
    def installer(self) -> ServiceInstaller:
        """Return what installs and uninstalls them."""
        clock = SystemClock()
        host = Host(self.services, clock, is_mac=self.backend == "launchd")
        return ServiceInstaller(self.layout, self.services, host, clock)


def installation_at(root: Path, backend: Backend, *, is_user: bool) -> Installation:
    """Return the installation of a backend."""
    user_home = Path.home() if root == Path("/") else root / "home"
    layout = (
        user_layout(backend, user_home, sys.platform) if is_user else system_layout(backend, root)
    )
    services: Services
    if backend == "launchd":
        services = LaunchdServices(layout.definitions, SystemClock(), is_user=is_user)
    else:
        services = SystemdServices(layout.definitions, is_user=is_user)
    return Installation(backend=backend, layout=layout, services=services, is_system=not is_user)


def _existing(root: Path, *, is_user: bool) -> Installation:
    """Return the installation that has services: the machine's before the user's."""
    for is_of_user in (True,) if is_user else (False, True):
        for backend in BACKENDS:
            installation = installation_at(root, backend, is_user=is_of_user)
            if ChangeRecord(installation.layout.home).read().backend == backend:
                return installation
    return installation_at(root, default_backend(sys.platform), is_user=is_user)


@service.command()
@_part
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@_where
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would change and what needs root, and change nothing.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    hidden=True,
    help="Service manager (default: launchd on macOS, systemd elsewhere): for images and tests.",
)
@click.option(
    "--service-user",
    metavar="NAME",
    default=ROLE_USER,
    show_default=True,
    help="User that the service runs as; the default is created if it does not exist.",
)
@click.option(
    "--program",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Program to run (default: the one below /opt/mlx-fleet/current/bin; without root, else the one beside this "
    "fleetctl).",
)
@click.option(
    "--wired-limit",
    metavar="SIZE",
    help="macOS: memory that the GPU may wire, such as 100Gi, now and at each boot (default: left alone).",
)
@click.option("--no-power", is_flag=True, help="macOS: leave the power settings alone.")
@click.option("--no-firewall", is_flag=True, help="macOS: leave the application firewall alone.")
def install(*, part: Part, dry_run: bool, **options: Any) -> None:
    """Install a program as a service, and start it; flags of the program come after --.

    Every change of the machine is recorded first, and `fleetctl service uninstall` undoes it. Installing again with other
    flags replaces the service. Engines keep running meanwhile.
    """
    asyncio.run(_install(part, options, is_dry_run=dry_run))


async def _install(part: Part, options: dict[str, Any], *, is_dry_run: bool) -> None:
    backend: Backend = options["backend"] or running_backend(sys.platform)
    installation = installation_at(options["root"], backend, is_user=options["is_user"])
    settings = await _settings(part, installation, options, is_dry_run=is_dry_run)
    if options["is_user"]:
        click.echo(_SECOND_BEST, err=True)
    changes = await installation.installer.preview(desired_changes(settings))
    if is_dry_run:
        scope = "need root" if installation.is_system else "need no root"
        click.echo(f"These changes {scope}:")
        for change in changes:
            click.echo(f"  {sentence(change)}")
        click.echo(f"The service runs: {' '.join(service_spec(settings).command)}")
        click.echo("Nothing was changed.")
        return
    if installation.is_system and os.geteuid() != 0:
        raise FleetctlError(
            f"{len(changes)} changes need root, which --dry-run lists. Run `sudo fleetctl service install "
            f"{part} ...`, or give --user for a service of this user only"
        )
    await installation.installer.install(settings, click.echo)
    click.echo(f"{part} runs; see `fleetctl service status`")


def open_installation(root: Path) -> Installation:
    """Return the installation to which this machine's default service manager belongs.

    Raises:
        FleetctlError: it needs root.

    """
    installation = installation_at(root, running_backend(sys.platform), is_user=False)
    _require_root(installation, "install")
    return installation


async def install_joined(part: Part, flags: Sequence[str], found: Installation) -> None:
    """Install a program with the defaults of `fleetctl service install`, and start it.

    Raises:
        ServiceError: it is not installed, or the machine refuses a change.

    """
    options = install.make_context("install", [part, "--", *flags]).params
    settings = await _settings(part, found, options, is_dry_run=False)
    if (await found.services.state(part)).pid is not None:
        await found.services.stop(part)  # it has read its password at its start
    await found.installer.install(settings, click.echo)


async def _settings(
    part: Part, found: Installation, options: dict[str, Any], *, is_dry_run: bool
) -> InstallSettings:
    program = options["program"] or _program(part, found)
    command = build_command(part, options["flags"], found.layout, program)
    user = options["service_user"] if found.is_system else ""
    user_home = _owner_home(command.state_folder, user) if part == "fleet" else None
    group = await _group(user, is_dry_run=is_dry_run) if user else ""
    return InstallSettings(
        part=part,
        command=command,
        backend=found.backend,
        layout=found.layout,
        user=user,
        group=group,
        user_home=user_home or Path("/var/empty"),
        has_power=not options["no_power"],
        has_firewall=not options["no_firewall"],
        wired_limit_mib=_parse_wired_limit(options["wired_limit"], found),
    )


def _owner_home(data_dir: Path, user: str) -> Path:
    """Return the home of the user whose fleet the data folder is.

    Raises:
        FleetctlError: the service would run as root, or as another user.

    """
    try:
        owner = pwd.getpwuid(data_dir.stat().st_uid)
    except (OSError, KeyError) as error:
        raise FleetctlError(f"--data-dir {data_dir}: {error}") from error
    if owner.pw_name != user or (owner.pw_uid == 0 and sys.platform == "darwin"):
        raise FleetctlError(
            f"{data_dir} belongs to {owner.pw_name}: give --service-user {owner.pw_name}, which must not be root. "
            "`fleetctl up --detach --join ADDRESS` gives all of it"
        )
    return Path(owner.pw_dir)


def _program(part: Part, found: Installation) -> Path | None:
    """Return the program beside this fleetctl, if the layout has none; None for the layout's.

    A service of the machine never runs it: the folder may be one that a user can write to.
    """
    name = PROGRAMS[part].executable
    beside = Path(sys.executable).with_name(name)
    return None if found.is_system or found.layout.program(name).exists() else beside


async def _group(user: str, *, is_dry_run: bool) -> str:
    """Return the group of the service's user; the role user has one of its own.

    Raises:
        FleetctlError: there is no such user.

    """
    if user == ROLE_USER:
        return ROLE_USER
    if user == "root" and not is_dry_run:
        click.echo("warning: the service runs as root; an ordinary user is safer", err=True)
    ids = await find_user(user)
    if ids is None:
        raise FleetctlError(
            f"--service-user {user}: this machine has no such user; create it first"
        )
    return ids.group


def _parse_wired_limit(text: str | None, found: Installation) -> int | None:
    if text is None:
        return None
    if found.backend != "launchd" or not found.is_system:
        raise click.UsageError("--wired-limit: only a service of the machine on macOS can set it")
    try:
        return quantity.parse(text) >> 20
    except ValueError as error:
        raise click.UsageError(f"--wired-limit: {error}") from error


@service.command()
@_part
@_where
@click.option(
    "--service-user",
    metavar="NAME",
    default=ROLE_USER,
    show_default=True,
    help="User that the service will run as; the default is created if it does not exist.",
)
def prepare(part: Part, **options: Any) -> None:
    """Make the changes that a service needs, without the service: its user, folders, power and firewall.

    `fleetctl node add` uses it: the machine joins as that user before the service is installed.
    """
    unset = {"backend": None, "flags": (), "program": None, "wired_limit": None}
    asyncio.run(_prepare(part, {**unset, "no_power": False, "no_firewall": False, **options}))


async def _prepare(part: Part, options: dict[str, Any]) -> None:
    installation = installation_at(
        options["root"], running_backend(sys.platform), is_user=options["is_user"]
    )
    _require_root(installation, f"prepare {part}")
    settings = await _settings(part, installation, options, is_dry_run=False)
    await installation.installer.apply(
        desired_changes(settings), part, settings.backend, click.echo
    )


@service.command()
@_parts
@_where
@click.option("--purge", is_flag=True, help="Delete models and the data of etcd, too.")
def uninstall(*, parts: tuple[Part, ...], root: Path, is_user: bool, purge: bool) -> None:
    """Stop services, and undo every change of the machine that they needed; all of them without a name.

    Without a name, what `fleetctl fabric setup` changed is undone, too. Engines of the node agent end. Models and the data
    of etcd stay.
    """
    installation = _existing(root, is_user=is_user)
    _require_root(installation, "uninstall")

    async def work() -> None:
        recorded = installed_parts(ChangeRecord(installation.layout.home).read())
        was_installed = False
        names: tuple[str, ...] = parts or (*SERVICES, link_plan.PART)
        for part in names:
            if await installation.installer.uninstall(part, click.echo, is_purge=purge):
                was_installed = True
                click.echo(
                    f"{part} uninstalled"
                    if part in (*recorded, link_plan.PART)
                    else f"{part}: rest removed"
                )
            elif parts:
                click.echo(f"{part} is not installed")
        if not was_installed and not parts:
            click.echo("no service of the fleet is installed")

    asyncio.run(work())


@service.command()
@_parts
@_where
def start(*, parts: tuple[Part, ...], root: Path, is_user: bool) -> None:
    """Start services; all that are installed without a name."""
    _each(_existing(root, is_user=is_user), parts, "start")


@service.command()
@_parts
@_where
@click.option("--engines", is_flag=True, help="With the node agent, end its engines too.")
@click.option(
    "--grace-period",
    default="30s",
    show_default=True,
    help="With --engines: time for requests to finish before an engine is killed.",
)
def stop(*, parts: tuple[Part, ...], root: Path, is_user: bool, **options: Any) -> None:
    """Stop services until they are started or the machine boots; engines keep running without --engines."""
    grace_s, installation = (
        parse_duration(options["grace_period"]),
        _existing(root, is_user=is_user),
    )
    _each(installation, parts, "stop")
    if options["engines"] and (not parts or "nodeagent" in parts):
        # Its agent has ended, so none starts again.
        count = asyncio.run(installation.installer.end_engines("nodeagent", grace_s=grace_s))
        click.echo(f"{count} {'engine' if count == 1 else 'engines'} ended")


@service.command()
@_parts
@_where
def restart(*, parts: tuple[Part, ...], root: Path, is_user: bool) -> None:
    """Stop services and start them again; engines keep running."""
    _each(_existing(root, is_user=is_user), parts, "stop", "start")


def _each(found: Installation, parts: tuple[Part, ...], *verbs: str) -> None:
    _require_root(found, verbs[-1])
    named = list(parts) or installed_parts(ChangeRecord(found.layout.home).read())
    if not named:
        raise FleetctlError("no service is installed; see `fleetctl service install --help`")

    async def work() -> None:
        for part in named:
            if "start" in verbs:
                await found.installer.renew_firewall(part, click.echo)
            if "stop" in verbs:
                await found.services.stop(part)
            if "start" in verbs:
                await found.services.start(part)
            click.echo(f"{part} {'started' if verbs[-1] == 'start' else 'stopped'}")

    asyncio.run(work())


def _require_root(found: Installation, verb: str) -> None:
    if found.is_system and os.geteuid() != 0:
        raise FleetctlError(f"this needs root: run `sudo fleetctl service {verb} ...`")


@service.command()
@_parts
@_where
@click.option("-o", "--output", type=click.Choice(["json"]), help="Print JSON.")
def status(*, parts: tuple[Part, ...], root: Path, is_user: bool, output: str | None) -> None:
    """Show the state of services; exit code 3 if one of them does not run."""
    installation = _existing(root, is_user=is_user)
    named = list(parts) or installed_parts(ChangeRecord(installation.layout.home).read())

    async def states() -> dict[str, ServiceState]:
        return {part: await installation.services.state(part) for part in named}

    service_states = asyncio.run(states())
    if output == "json":
        trees = [_tree(name, installation, state) for name, state in service_states.items()]
        print_tree(trees, "json")
    elif not service_states:
        click.echo("no service of the fleet is installed")
    else:
        _print_table(installation, service_states)
    if any(state.pid is None for state in service_states.values()):
        raise SystemExit(_NOT_RUNNING)


def _word(state: ServiceState) -> str:
    if state.pid is not None:
        return "running"
    return "stopped" if state.is_installed else "not installed"


def _log_of(found: Installation, name: str) -> str:
    if found.backend == "systemd":
        scope = "" if found.is_system else "--user "
        return f"journalctl {scope}-u mlx-fleet-{name}"
    return str(found.layout.logs / f"{name}.log")


def _tree(name: str, found: Installation, state: ServiceState) -> dict[str, object]:
    return {
        "name": name,
        "state": _word(state),
        "pid": state.pid,
        "restarts": state.restarts,
        "lastExit": state.last_exit,
        "backend": found.backend,
        "log": _log_of(found, name),
        "note": state.note,
    }


def _print_table(found: Installation, seen: dict[str, ServiceState]) -> None:
    def text(value: int | None) -> str:
        return "-" if value is None else str(value)

    rows = [
        [
            name,
            _word(state),
            text(state.pid),
            text(state.restarts),
            text(state.last_exit),
            _log_of(found, name),
        ]
        for name, state in seen.items()
    ]
    click.echo(printers.align_columns(rows, _TITLES))
    for name, state in seen.items():
        if state.note:
            click.echo(f"{name}: {state.note}", err=True)
