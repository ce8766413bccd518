"""The programs that run as services: their executables, default flags and folders, and the check of their flags."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import click

from fleetctl.services.layout import Layout
from fleetctl.services.port import ServiceError
from machinery.environment import is_secret_name

Part: TypeAlias = Literal["nodeagent", "gateway", "reconciler", "etcd", "fleet"]
PARTS: Final[tuple[Part, ...]] = ("nodeagent", "gateway", "reconciler", "etcd")
SERVICES: Final[tuple[Part, ...]] = (*PARTS, "fleet")
"""The parts, and the whole fleet of `fleetctl up`, which belongs to the user of its data folder."""
_USER_INFO: Final = re.compile(r"://[^/@\s]*:[^/@\s]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProgram:
    """One program of the fleet."""

    executable: str
    words: tuple[str, ...] = ()
    """Words before its flags."""
    command: str
    """Its click command as "module:function"; empty for a program that is not ours."""
    state_flag: str
    """The flag that names its own folder."""
    has_models: bool = False
    keeps_state: bool = False
    """True if an uninstall keeps its folder."""
    stop_timeout_s: int = 30


PROGRAMS: Final[Mapping[Part, ServiceProgram]] = {
    "nodeagent": ServiceProgram(
        executable="fleet-nodeagent",
        command="nodeagent.__main__:main",
        state_flag="--state-dir",
        has_models=True,
    ),
    "gateway": ServiceProgram(
        executable="fleet-gateway",
        command="gateway.__main__:main",
        state_flag="--state-dir",
        stop_timeout_s=60,  # streams get 30 s to finish (--drain-timeout)
    ),
    "reconciler": ServiceProgram(
        executable="fleet-reconciler", command="reconciler.__main__:main", state_flag="--git-dir"
    ),
    "etcd": ServiceProgram(
        executable="etcd", command="", state_flag="--data-dir", keeps_state=True
    ),
    "fleet": ServiceProgram(
        executable="fleetctl",
        words=("up",),
        command="fleetctl.verbs.up:up",
        state_flag="--data-dir",
        keeps_state=True,
        stop_timeout_s=120,  # engines drain
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """The command line of a service, and the folders that it names."""

    argv: tuple[str, ...]
    state_folder: Path
    models_folder: Path | None
    identity_folder: Path | None
    """The folder with its certificate and key, if it exists; only the program's user may read it."""
    folders: tuple[Path, ...]
    """Folders in flags, to which the program may write."""


def build_command(
    part: Part, flags: Sequence[str], layout: Layout, program: Path | None
) -> ServiceCommand:
    """Return the command line of a service; defaults are added to the given flags.

    Raises:
        ServiceError: the program is not installed, or a flag is wrong, relative or secret.

    """
    service_program = PROGRAMS[part]
    executable = program or layout.program(service_program.executable)
    if not executable.is_absolute() or not executable.is_file():
        raise ServiceError(
            f"{executable} does not exist. Install mlx-fleet in {layout.home}, or name the program "
            "with --program and an absolute path"
        )
    _refuse_secrets(flags)
    given = _parse(part, flags) if service_program.command else _parse_foreign(flags)
    defaults = {service_program.state_flag: str(layout.state / part)}
    if service_program.has_models:
        defaults["--models-dir"] = str(layout.models)
    added = {flag: value for flag, value in defaults.items() if flag not in given}
    paths = {**defaults, **{flag: value for flag, value in given.items() if value is not None}}
    return ServiceCommand(
        argv=(
            str(executable),
            *service_program.words,
            *(word for pair in added.items() for word in pair),
            *flags,
        ),
        state_folder=Path(paths[service_program.state_flag]),
        models_folder=Path(paths["--models-dir"]) if service_program.has_models else None,
        identity_folder=_existing_folder(given.get("--identity-dir")),
        folders=tuple(Path(value) for value in paths.values()),
    )


def _existing_folder(text: str | None) -> Path | None:
    return Path(text) if text and Path(text).is_dir() else None


def _refuse_secrets(flags: Sequence[str]) -> None:
    for word in flags:
        if _USER_INFO.search(word):
            raise ServiceError(
                "a flag holds a URL with a password, which every user of this machine can read in the "
                "service's definition; give the password in a file"
            )


def _parse(part: Part, flags: Sequence[str]) -> dict[str, str | None]:
    """Return the folders among the flags of one of our programs; None for any other flag.

    Raises:
        ServiceError: the program has no such flag, or its value cannot be one of a service.

    """
    module, _, function = PROGRAMS[part].command.partition(":")
    command: click.Command = getattr(importlib.import_module(module), function)
    context = click.Context(command, info_name=PROGRAMS[part].executable)
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(flags))
    except click.UsageError as error:
        raise ServiceError(f"flags of {part}: {error.format_message()}") from error
    if rest:
        raise ServiceError(f"flags of {part}: unexpected argument {rest[0]!r}")
    found: dict[str, str | None] = {}
    for option in command.params:
        if option.name not in values:
            continue
        flag = option.opts[-1]
        if is_secret_name(flag.lstrip("-")):
            raise ServiceError(
                f"flags of {part}: {flag} would put a secret into the service's definition, which every "
                f"user of this machine can read. Write it to a file of the service's user with mode "
                f"0600, and give {flag}-file"
            )
        is_folder = isinstance(option.type, click.Path) and not option.type.file_okay
        if isinstance(option.type, click.Path):
            _check_absolute(flag, values[option.name])
        found[flag] = str(values[option.name]) if is_folder else None
    return found


def _check_absolute(flag: str, value: object) -> None:
    for path in value if isinstance(value, list | tuple) else (value,):
        if not Path(str(path)).is_absolute():
            raise ServiceError(f"{flag} {path}: a service needs an absolute path")


def _parse_foreign(flags: Sequence[str]) -> dict[str, str | None]:
    """Return the folders among the flags of etcd: those of *-dir."""
    foreign: dict[str, str | None] = {}
    words = list(flags)
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        if not equals and number + 1 < len(words):
            value = words[number + 1]
        is_folder = flag.endswith("-dir")
        if is_folder:
            _check_absolute(flag, value)
        foreign[flag] = value if is_folder else None
    return foreign
