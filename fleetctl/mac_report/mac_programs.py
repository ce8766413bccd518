"""Runs programs of macOS for a report, each with limits of time and output; as the user, by sudo, or in a LaunchDaemon.

What runs as root is a program of the system only: a folder of Homebrew, or an interpreter, may belong to a user.
"""

import asyncio
import os
import plistlib
import shlex
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fleetctl.mac_report.readings import CommandRun
from fleetctl.services.host import ROLE_USER
from machinery import macos_commands as mac
from machinery.clock import Clock
from machinery.macos_commands import MacCommand

MAX_OUTPUT: Final = 2 << 20
POLL_S: Final = 0.05
LABEL: Final = "io.mlxfleet.report"
_OF_SYSTEM: Final = ("/usr/bin/", "/usr/sbin/", "/usr/libexec/", "/bin/", "/sbin/")


@dataclass(frozen=True, slots=True, kw_only=True)
class MacPlace:
    """Folders of the Mac; tests have others."""

    programs: Path | None = None
    """Folder of stand-ins for the programs of macOS."""
    daemons: Path = Path("/Library/LaunchDaemons")
    agents: Path | None = None
    scratch: str = "/private/var/tmp"


class MacPrograms:
    """Starts programs of macOS."""

    def __init__(self, place: MacPlace, clock: Clock) -> None:
        self.place, self.clock = place, clock

    def argv(self, command: MacCommand, **values: str) -> tuple[str, ...]:
        """Return the argument list; a stand-in's, where there are any."""
        argv = command.argv(**values)
        if self.place.programs is None:
            return argv
        return (str(self.place.programs / Path(argv[0]).name), *argv[1:])

    def examples(self, command: MacCommand) -> tuple[str, ...]:
        """Return the argument list for a report."""
        return self.argv(command, **command.examples)

    def is_of_system(self, command: MacCommand) -> bool:
        """Return whether the program lies in a folder that only macOS writes."""
        return self.place.programs is not None or command.argv(**command.examples)[0].startswith(_OF_SYSTEM)  # fmt: skip

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes | None = None
    ) -> CommandRun:
        """Run a program with a session of its own; whatever it starts is killed with it at the time limit."""
        started = self.clock.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=DEVNULL if stdin is None else PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
            )  # fmt: skip
        except OSError as error:
            return CommandRun(argv=tuple(argv), note=f"not run: {error.strerror}")
        note, code = "", None
        texts = [bytearray(), bytearray()]

        async def collect(stream: asyncio.StreamReader, text: bytearray) -> None:
            while piece := await stream.read(1 << 16):
                text += piece[: MAX_OUTPUT - len(text)]

        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                assert process.stdout is not None
                assert process.stderr is not None
                group.create_task(collect(process.stdout, texts[0]))
                group.create_task(collect(process.stderr, texts[1]))
                if process.stdin is not None:
                    process.stdin.write(stdin or b"")
                    process.stdin.close()
                code = await process.wait()
        except TimeoutError:
            note = f"killed after {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if any(len(text) >= MAX_OUTPUT for text in texts):
            note = f"{note} output cut at {MAX_OUTPUT} bytes".strip()
        out, err = (text.decode(errors="replace") for text in texts)
        seconds = round(self.clock.monotonic() - started, 3)
        return CommandRun(argv=tuple(argv), out=out, err=err, code=code, seconds=seconds, note=note)

    async def run_in_terminal(self, argv: Sequence[str]) -> int:
        """Run a program that may ask for a password; return its exit code."""
        process = await asyncio.create_subprocess_exec(*argv)
        return await process.wait()

    async def start_detached(self, argv: Sequence[str]) -> None:
        """Start a program that ends at once, and leaves another behind."""
        process = await asyncio.create_subprocess_exec(*argv, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)  # fmt: skip
        await process.wait()

    async def call(self, command: MacCommand, **values: str) -> CommandRun:
        """Run a registered command."""
        return await self.run(self.argv(command, **values), timeout_s=command.timeout_s)

    async def as_root(
        self, command: MacCommand, *, stdin: bytes | None = None, **values: str
    ) -> CommandRun:
        """Run a registered command as root by sudo, which must not ask for a password any more."""
        argv = (*self.argv(mac.AS_ROOT), *self.argv(command, **values))
        return await self.run(argv, timeout_s=command.timeout_s, stdin=stdin)

    async def wait_for(self, path: Path, limit_s: float) -> bool:
        """Wait until a file exists and is not empty; return whether it came in time."""
        started = self.clock.monotonic()
        while self.clock.monotonic() - started < limit_s:
            if path.exists() and path.stat().st_size:
                return True
            await self.clock.sleep(POLL_S)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A throw-away job of launchd."""

    argv: Sequence[str]
    log: str = "/dev/null"
    user: str = ""
    settings: Mapping[str, Any] | None = None

    def plist(self) -> bytes:
        """Return its definition."""
        tree: dict[str, Any] = {
            "Label": LABEL, "ProgramArguments": list(self.argv), "RunAtLoad": True, "ProcessType": "Interactive",
            "StandardOutPath": self.log, "StandardErrorPath": self.log, **(self.settings or {}),
        }  # fmt: skip
        return plistlib.dumps(tree | ({"UserName": self.user} if self.user else {}))


class RootJobs:
    """Throw-away LaunchDaemons, one at a time, and root's folder for their files; everything is removed again."""

    def __init__(self, programs: MacPrograms) -> None:
        self._programs = programs
        self._plist = programs.place.daemons / f"{LABEL}.plist"
        self.folder = ""

    async def open(self) -> str:
        """Make the folder, which only root can write; return the reason if that fails."""
        made = await self._programs.as_root(mac.ROOT_FOLDER, template=f"{self._programs.place.scratch}/{LABEL}.XXXXXXXX")  # fmt: skip
        path = made.out.strip()
        if made.code or not path.startswith(f"{self._programs.place.scratch}/{LABEL}."):
            return f"sudo mktemp: {made.err.strip() or made.note or made.out.strip()}"[:200]
        self.folder = path
        await self._programs.as_root(mac.ROOT_MODE, mode="755", path=path)
        return ""

    async def close(self) -> None:
        """Remove the job and the folder."""
        await self.end()
        if self.folder:
            await self._programs.as_root(mac.ROOT_REMOVE, path=self.folder)

    async def write(self, name: str, content: bytes, *, owner: str = "") -> str:
        """Write a file of root's folder; `owner` may write it later. Return its path."""
        path = f"{self.folder}/{name}"
        await self._programs.as_root(mac.ROOT_WRITE, stdin=content, path=path)
        if owner:
            await self._programs.as_root(mac.ROOT_OWNER, owner=owner, path=path)
        return path

    async def start(self, job: Job) -> CommandRun:
        """Define and load a job; the result is that of bootstrap."""
        path = str(self._plist)
        await self._programs.as_root(mac.ROOT_WRITE, stdin=job.plist(), path=path)
        await self._programs.as_root(mac.ROOT_MODE, mode="644", path=path)
        return await self.load()

    async def load(self) -> CommandRun:
        """Load the job that is defined."""
        return await self._programs.as_root(mac.JOB_LOAD, domain="system", path=str(self._plist))

    async def print(self) -> CommandRun:
        """Return what launchd says of the job; the code is not 0 if it has none."""
        return await self._programs.call(mac.JOB, target=f"system/{LABEL}")

    async def unload(self, limit_s: float = 60.0) -> float | None:
        """Unload the job; return the seconds until it was gone, None if it stays."""
        started = self._programs.clock.monotonic()
        await self._programs.as_root(mac.JOB_UNLOAD, target=f"system/{LABEL}")
        while self._programs.clock.monotonic() - started < limit_s:
            if (await self.print()).code:
                return round(self._programs.clock.monotonic() - started, 3)
            await self._programs.clock.sleep(POLL_S)
        return None

    async def end(self) -> None:
        """Unload the job, and remove its definition."""
        if (await self.print()).code == 0:
            await self.unload()
        await self._programs.as_root(mac.ROOT_REMOVE, path=str(self._plist))

    async def run_commands(
        self, commands: Sequence[MacCommand]
    ) -> tuple[dict[MacCommand, CommandRun], int | None]:
        """Run commands in a LaunchDaemon of root; return their runs, and the job's limit of open files."""
        lines = ["cd /", "export LC_ALL=C", f"ulimit -n >{self.folder}/limit"]
        for number, command in enumerate(commands):
            base, argv = f"{self.folder}/{number}", shlex.join(self._programs.examples(command))
            lines += [
                f"s=$(date +%s); {argv} </dev/null >{base}.out 2>{base}.err & p=$!",
                f"( sleep {command.timeout_s:.0f}; kill -9 $p ) >/dev/null 2>&1 & w=$!",
                f'wait $p; echo "$? $(( $(date +%s) - s ))" >{base}.code; kill $w 2>/dev/null',
            ]
        script = await self.write("run.sh", "\n".join([*lines, f"echo 1 >{self.folder}/done", ""]).encode())  # fmt: skip
        limits = {"SoftResourceLimits": {"NumberOfFiles": 65536}, "HardResourceLimits": {"NumberOfFiles": 65536}}  # fmt: skip
        started = await self.start(Job(argv=("/bin/sh", script), settings=limits))
        if started.code:
            raise OSError(f"launchctl bootstrap: {started.err.strip() or started.note}"[:200])
        limit_s = 10.0 + sum(command.timeout_s for command in commands)
        await self._programs.wait_for(Path(self.folder, "done"), limit_s)
        runs = {}
        for number, command in enumerate(commands):
            out, err, code = (read_text(Path(self.folder, f"{number}.{kind}")) for kind in ("out", "err", "code"))  # fmt: skip
            ends = [int(word) for word in code.split() if word.isdecimal()]
            runs[command] = CommandRun(
                argv=self._programs.examples(command), out=out, err=err, code=ends[0] if ends else None,
                seconds=float(ends[1]) if len(ends) > 1 else 0.0, note="" if ends else "did not run to its end",
            )  # fmt: skip
        limit = read_text(Path(self.folder, "limit")).strip()
        await self.end()
        return runs, int(limit) if limit.isdecimal() else None


def read_text(path: Path) -> str:
    """Return the beginning of a file; "" if there is none. A link is not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_OUTPUT).decode(errors="replace")


def role_prefix(programs: MacPrograms) -> tuple[str, ...]:
    """Return the words that run a program as the service's account."""
    return programs.argv(mac.AS_USER, user=ROLE_USER)
