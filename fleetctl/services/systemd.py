"""Services of systemd, of the system or of one user, and their unit files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fleetctl.services import commands, definition_files
from fleetctl.services.commands import CommandResult
from fleetctl.services.port import ServiceError, ServiceSpec, ServiceState
from nodeagent.hardware.service_definitions import UNIT_VALUES, unit_name
from nodeagent.hardware.system_text import parse_pairs

_PROPERTIES: Final = (
    "LoadState,ActiveState,SubState,MainPID,NRestarts,ExecMainStatus,NeedDaemonReload"
)


class SystemdServices:
    """`Services` of systemd."""

    def __init__(self, folder: Path, *, is_user: bool = False) -> None:
        """`folder` is where systemd looks for unit files."""
        self._folder = folder
        self._is_user = is_user

    async def install(self, spec: ServiceSpec) -> None:
        path = self._path(spec.name)
        content = service_unit(spec, is_user=self._is_user).encode()
        if not definition_files.has_content(path, content):
            if path.exists():
                await self._must("stop", unit_name(spec.name))
            definition_files.write(path, content)
        # Repeated even if the file is there: an earlier call may have been killed before it.
        await self._must("daemon-reload")
        await self._must("enable", unit_name(spec.name))

    async def start(self, name: str) -> None:
        if not self._path(name).exists():
            raise ServiceError(f"{name} is not installed: {self._path(name)} does not exist")
        await self._must("start", unit_name(name))

    async def stop(self, name: str) -> None:
        if self._path(name).exists():
            await self._must("stop", unit_name(name))

    async def state(self, name: str) -> ServiceState:
        result = await self._run("show", f"--property={_PROPERTIES}", unit_name(name))
        pairs = parse_pairs(result.out, separator="=")
        if result.code or pairs.get("LoadState") != "loaded":
            return ServiceState(is_installed=self._path(name).exists())
        pid = int(pairs.get("MainPID", "0"))
        is_stale = pairs.get("NeedDaemonReload") == "yes"
        return ServiceState(
            is_installed=self._path(name).exists(),
            pid=pid or None,
            restarts=int(pairs.get("NRestarts", "0")),
            last_exit=None if pid else int(pairs.get("ExecMainStatus", "0")),
            note="its unit file changed; run `systemctl daemon-reload`" if is_stale else "",
        )

    async def remove(self, name: str) -> None:
        path = self._path(name)
        if path.exists():
            await self._must("stop", unit_name(name))
            await self._must("disable", unit_name(name))
        definition_files.delete(path)
        await self._must("daemon-reload")
        # A unit that failed is remembered without its file; one that did not is unknown, which is no failure here.
        await self._run("reset-failed", unit_name(name))

    def _path(self, name: str) -> Path:
        return self._folder / unit_name(name)

    async def _run(self, *words: str) -> CommandResult:
        scope = ("--user",) if self._is_user else ()
        return await commands.run("systemctl", *scope, *words)

    async def _must(self, *words: str) -> CommandResult:
        result = await self._run(*words)
        if result.code:
            raise ServiceError(
                f"`{result.line}` failed with exit code {result.code}: {result.words}"
            )
        return result


KEYS: Final[Mapping[str, frozenset[str]]] = {
    "Unit": frozenset({"Description", "After", "Wants", "StartLimitIntervalSec"}),
    "Service": frozenset(
        {
            *("Type", "ExecStart", "User", "Group", "WorkingDirectory", "Environment", "KillMode"),
            *("Restart", "RestartSec", "TimeoutStopSec", "LimitNOFILE", "NoNewPrivileges"),
            *("ProtectSystem", "ReadWritePaths"),
        }
    ),
    "Install": frozenset({"WantedBy"}),
}
"""The keys that we write: systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.kill(5).

systemd ignores a misspelt key with a warning in its journal.
"""
_MIN_STOP_S: Final = 60


def service_unit(spec: ServiceSpec, *, is_user: bool) -> str:
    """Return the unit file of a service; `is_user` for the manager of one user, which can protect no system folders."""
    sections = {
        "Unit": _unit(spec, is_user=is_user),
        "Service": [*_service(spec), *([] if is_user else _protection(spec))],
        "Install": [("WantedBy", "default.target" if is_user else "multi-user.target")],
    }
    blocks = [
        "\n".join([f"[{title}]", *(f"{key}={value}" for key, value in pairs)])
        for title, pairs in sections.items()
    ]
    text = "\n\n".join(blocks) + "\n"
    check(text)
    return text


def _unit(spec: ServiceSpec, *, is_user: bool) -> list[tuple[str, str]]:
    # The manager of a user knows no units of the system.
    network = [] if is_user else [(key, "network-online.target") for key in ("After", "Wants")]
    return [
        ("Description", f"mlx-fleet {spec.name}"),
        *network,
        # Without it systemd gives up after five restarts in ten seconds.
        ("StartLimitIntervalSec", "0"),
    ]


def _service(spec: ServiceSpec) -> Iterator[tuple[str, str]]:
    yield "Type", "exec"
    yield "ExecStart", " ".join(map(quote, spec.command))
    if spec.user:
        yield "User", spec.user
    if spec.group:
        yield "Group", spec.group
    yield "WorkingDirectory", _escape_specifiers(str(spec.working_folder))
    for key, value in spec.environment:
        yield "Environment", quote(f"{key}={value}", is_command=False)
    yield "KillMode", UNIT_VALUES["KillMode"]
    yield "Restart", UNIT_VALUES["Restart"]
    yield "RestartSec", "1"
    yield "TimeoutStopSec", str(max(_MIN_STOP_S, spec.stop_timeout_s))
    yield "LimitNOFILE", UNIT_VALUES["LimitNOFILE"]


def _protection(spec: ServiceSpec) -> list[tuple[str, str]]:
    # "-": a folder that does not exist yet must not keep the service from starting.
    writable = " ".join(quote(f"-{path}", is_command=False) for path in spec.writable)
    return [
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        *([("ReadWritePaths", writable)] if writable else []),
    ]


def quote(word: str, *, is_command: bool = True) -> str:
    r"""Return one word of a unit file (systemd.syntax(7)): quotes, `\`, `%` and in commands `$` lose their meaning.

    Raises:
        ValueError: it contains a line break.

    """
    if "\n" in word or "\r" in word:
        raise ValueError(f"a unit file cannot hold a word with a line break: {word!r}")
    text = _escape_specifiers(word.replace("\\", "\\\\").replace('"', '\\"'))
    if is_command:
        text = text.replace("$", "$$")
    return f'"{text}"' if set(word) & set(" \t\"'\\;") or not word else text


def _escape_specifiers(text: str) -> str:
    return text.replace("%", "%%")


def check(text: str) -> None:
    """Check the sections, the keys and the executable of a unit file.

    Raises:
        ValueError: one is unknown, or the executable is no absolute path.

    """
    section = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, _, value = line.partition("=")
        if key not in KEYS.get(section, frozenset()):
            raise ValueError(f"systemd has no key {key} in section [{section}]")
        if key == "ExecStart" and not Path(value.lstrip('"')).is_absolute():
            raise ValueError("ExecStart must start with an absolute path")
