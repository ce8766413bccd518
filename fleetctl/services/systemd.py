"""Services of systemd, of the system or of one user."""

from pathlib import Path
from typing import Final

from fleetctl.services import commands, definition_files
from fleetctl.services.commands import CommandResult
from fleetctl.services.port import ServiceError, ServiceSpec, ServiceState
from fleetctl.services.systemd_unit import service_unit
from nodeagent.hardware.service_definitions import unit_name
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
