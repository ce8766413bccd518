"""Services of launchd: LaunchDaemons in the domain `system`, or LaunchAgents of one user, and their property lists.

It has not run on hardware: docs/hardware.md has the check-list for the first Mac.
"""

import os
import plistlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fleetctl.services import commands, definition_files
from fleetctl.services.commands import CommandResult
from fleetctl.services.port import ServiceError, ServiceSpec, ServiceState
from machinery import macos_commands
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.macos_commands import find_program
from nodeagent.hardware.service_definitions import JOB_VALUES, JobReport, label_of, parse_print

_POLL_S: Final = 0.2
_BOOTSTRAPS: Final = 5
# launchctl's answers are errno values of macOS (sys/errno.h), and 113 and 125 of launchd's own.
_NO_SUCH_PROCESS, _IO_ERROR, _IN_PROGRESS, _ALREADY = 3, 5, 36, 37
_NOT_FOUND, _NO_DOMAIN = 113, 125
# Beyond ExitTimeOut, within which launchd kills the program.
_END_MARGIN_S: Final = 30.0
_PID_LIMIT_S: Final = 20.0
"""Longer than ThrottleInterval, which delays a start soon after an end."""

_MEANINGS: Final[Mapping[int, str]] = {
    _IO_ERROR: "launchd refused the job (5, Input/output error). Either an earlier job with this label has not ended, or the "
    "definition is not valid or not root's. Check it with `plutil -lint`, and try again",
    _ALREADY: "launchd is still working on this job (37, Operation already in progress). Wait until `launchctl print` "
    "fails for it, and try again",
    _NO_DOMAIN: "the domain takes no jobs (125, Domain does not support specified action). A LaunchAgent needs a user "
    "who is logged in at the screen, and SSH is not enough: install the service without --user",
}


class LaunchdServices:
    """`Services` of launchd. Beside each service runs a job that keeps its log bounded."""

    def __init__(self, folder: Path, clock: Clock, *, is_user: bool = False) -> None:
        """`folder` is where launchd looks for definitions at boot: LaunchDaemons, or LaunchAgents of a user."""
        self._folder = folder
        self._clock = clock
        self._domain = f"gui/{os.getuid()}" if is_user else "system"

    async def install(self, spec: ServiceSpec) -> None:
        jobs = {
            rotation_name(spec.name): rotation_plist(spec),
            spec.name: service_plist(spec),
        }
        for name, content in jobs.items():
            path = self._path(name)
            if not definition_files.has_content(path, content):
                await self._bootout(name)
                definition_files.write(path, content)
                # Let Apple's own tool check a definition, where there is one. Raises: ServiceError:
                # it is not valid.
                if find_program("plutil") is not None:
                    await commands.must_run(*macos_commands.PLIST_CHECK.words(path=str(path)))

    async def start(self, name: str) -> None:
        if not self._path(name).exists():
            raise ServiceError(f"{name} is not installed: {self._path(name)} does not exist")
        for job in (rotation_name(name), name):
            await self._load(job)
        await self._wait_for_pid(name)

    async def stop(self, name: str) -> None:
        # launchd restarts a job with KeepAlive after `kill` and `stop`; only bootout ends it.
        for job in (name, rotation_name(name)):
            await self._bootout(job)

    async def state(self, name: str) -> ServiceState:
        job = await self._print(name)
        is_installed = self._path(name).exists()
        if job is None:
            return ServiceState(is_installed=is_installed)
        return ServiceState(
            is_installed=is_installed,
            pid=job.pid,
            restarts=max(0, job.runs - 1),
            last_exit=job.last_exit,
            note=""
            if is_installed
            else "loaded, but its definition is gone: it ends at the next boot",
        )

    async def remove(self, name: str) -> None:
        await self.stop(name)
        for job in (name, rotation_name(name)):
            definition_files.delete(self._path(job))

    def _path(self, name: str) -> Path:
        return self._folder / f"{label_of(name)}.plist"

    def _target(self, name: str) -> str:
        return f"{self._domain}/{label_of(name)}"

    async def _print(self, name: str) -> JobReport | None:
        """Return the job; None if launchd has not loaded it."""
        result = await commands.run(*macos_commands.JOB.words(target=self._target(name)))
        return None if result.code else parse_print(result.out)

    async def _load(self, name: str) -> None:
        job = await self._print(name)
        if job is None:
            # A job that was disabled by hand stays disabled over boots.
            await commands.run(*macos_commands.JOB_ENABLE.words(target=self._target(name)))
            await self._bootstrap(name)
        elif job.pid is None:
            await commands.run(*macos_commands.JOB_START.words(target=self._target(name)))

    async def _bootstrap(self, name: str) -> None:
        """Load a job. Straight after bootout launchd answers 5 or 37 while the old program still exits."""
        retries = Retries(Backoff(first_s=0.5, limit_s=8.0), self._clock)
        while True:
            result = await commands.run(
                *macos_commands.JOB_LOAD.words(domain=self._domain, path=str(self._path(name)))
            )
            if result.code == 0:
                return
            is_transient = result.code in (_IO_ERROR, _ALREADY, _IN_PROGRESS)
            if not is_transient or retries.failures + 1 >= _BOOTSTRAPS:
                raise _refusal(result)
            await retries.wait()

    async def _bootout(self, name: str) -> None:
        """Unload a job, and wait until its program has ended: bootstrap would fail before that."""
        job = await self._print(name)
        if job is None:
            return
        result = await commands.run(*macos_commands.JOB_UNLOAD.words(target=self._target(name)))
        if result.code not in (0, _NO_SUCH_PROCESS, _IN_PROGRESS, _ALREADY, _NOT_FOUND):
            raise _refusal(result)
        deadline = self._clock.monotonic() + job.exit_timeout_s + _END_MARGIN_S
        while await self._print(name) is not None:
            if self._clock.monotonic() >= deadline:
                raise ServiceError(
                    f"{name} has not ended {job.exit_timeout_s + _END_MARGIN_S:.0f} s after "
                    f"`{result.line}`; see `launchctl print {self._target(name)}`"
                )
            await self._clock.sleep(_POLL_S)

    async def _wait_for_pid(self, name: str) -> None:
        deadline = self._clock.monotonic() + _PID_LIMIT_S
        while True:
            job = await self._print(name)
            if job is not None and job.pid is not None:
                return
            if self._clock.monotonic() >= deadline:
                code = (
                    "" if job is None or job.last_exit is None else f" (exit code {job.last_exit})"
                )
                raise ServiceError(
                    f"launchd loaded {name}, but it does not run{code}; see "
                    f"`launchctl print {self._target(name)}` and its log"
                )
            await self._clock.sleep(_POLL_S)


def _refusal(result: CommandResult) -> ServiceError:
    meaning = _MEANINGS.get(result.code)
    if meaning is None:
        meaning = f"launchd answered {result.code}: {result.words}"
    return ServiceError(f"`{result.line}`: {meaning}")


_ROTATION_PERIOD_S: Final = 60

KEY_TYPES: Final[Mapping[str, type]] = {
    "AbandonProcessGroup": bool,
    "EnvironmentVariables": dict,
    "ExitTimeOut": int,
    "GroupName": str,
    "HardResourceLimits": dict,
    "KeepAlive": bool,
    "Label": str,
    "ProcessType": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "SoftResourceLimits": dict,
    "StandardErrorPath": str,
    "StandardOutPath": str,
    "StartInterval": int,
    "ThrottleInterval": int,
    "UserName": str,
    "WorkingDirectory": str,
}
"""The keys that we write, with their types in launchd.plist(5). launchd ignores a misspelt key in silence."""
_PROCESS_TYPES: Final = ("Background", "Standard", "Adaptive", "Interactive")


def service_plist(spec: ServiceSpec) -> bytes:
    """Return the property list of a service's job."""
    return encode(
        {
            "Label": label_of(spec.name),
            "ProgramArguments": list(spec.command),
            **_owner(spec),
            **JOB_VALUES,
            "ExitTimeOut": spec.stop_timeout_s,
            "StandardOutPath": str(spec.log),
            "StandardErrorPath": str(spec.log),
            "EnvironmentVariables": dict(spec.environment),
            "WorkingDirectory": str(spec.working_folder),
        }
    )


def rotation_name(name: str) -> str:
    """Return the name of the job that keeps a service's log bounded."""
    return f"{name}.logrotation"


def rotation_plist(spec: ServiceSpec) -> bytes:
    """Return the property list of the job that keeps the log bounded.

    newsyslog renames a log, and launchd keeps the old file open for the program: it would grow without a bound. So the
    log is copied and truncated; launchd opens logs for appending.
    """
    return encode(
        {
            "Label": label_of(rotation_name(spec.name)),
            "ProgramArguments": [str(spec.python), "-m", "machinery.log_rotation", str(spec.log)],
            **_owner(spec),
            "StartInterval": _ROTATION_PERIOD_S,
            "ProcessType": "Background",
            "WorkingDirectory": str(spec.working_folder),
        }
    )


def command_plist(name: str, command: tuple[str, ...]) -> bytes:
    """Return the property list of a job that runs one command as root at each boot."""
    return encode({"Label": label_of(name), "ProgramArguments": list(command), "RunAtLoad": True})


def encode(tree: Mapping[str, Any]) -> bytes:
    """Return the property list as XML; refuse keys and types that launchd.plist(5) does not have.

    Raises:
        ValueError: a key is unknown or has another type.

    """
    check(tree)
    return plistlib.dumps(dict(tree))


def check(tree: Mapping[str, Any]) -> None:
    """Check a job's keys against the table.

    Raises:
        ValueError: a key is unknown or has another type.

    """
    for key, value in tree.items():
        expected = KEY_TYPES.get(key)
        # A bool is an int to isinstance().
        if expected is None or type(value) is not expected:
            raise ValueError(f"launchd.plist(5) has no key {key} of type {type(value).__name__}")
    if tree.get("ProcessType", "Standard") not in _PROCESS_TYPES:
        raise ValueError(f"ProcessType {tree['ProcessType']} is none of {_PROCESS_TYPES}")
    arguments = tree["ProgramArguments"]
    if not arguments or not Path(arguments[0]).is_absolute():
        raise ValueError("ProgramArguments must start with an absolute path: launchd has no PATH")


def _owner(spec: ServiceSpec) -> dict[str, str]:
    user = {"UserName": spec.user} if spec.user else {}
    return {**user, "GroupName": spec.group} if spec.group else user
