"""Readers of processes and services on this machine: engines, logs, listening sockets, limits, folders, definitions."""

import errno
import os
import platform
import pwd
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil

from machinery import macos_commands
from machinery.footprint import footprint_bytes
from nodeagent.doctor.host_facts import (
    EngineFacts,
    FolderFacts,
    Listener,
    OpenFileFacts,
    PythonFacts,
    ServiceFacts,
    ServiceKind,
)
from nodeagent.doctor.readers import CommandRunner
from nodeagent.engines import engine_logs
from nodeagent.engines.engine_logs import EngineRun
from nodeagent.engines.engine_processes import EngineProcess, find_engines
from nodeagent.hardware.service_definitions import (
    job_differences,
    label_of,
    parse_print,
    service_name,
    unit_differences,
    unit_name,
)
from nodeagent.hardware.system_text import parse_pairs
from schemas.wire.engine_config import EngineIdentity

FAST_SYNCH: Final = "MLX_METAL_FAST_SYNCH"
# An exception's traceback ends a log.
_TAIL_BYTES: Final = 32 << 10
_TAIL_LINES: Final = 60
_MAX_LOGS: Final = 100
# A failure of the run before the last one is news for a day.
_NEWS: Final = timedelta(days=1)


def read_python(*, is_translated: bool | None) -> PythonFacts:
    """Return the interpreter of this process."""
    return PythonFacts(
        path=str(Path(sys.executable).resolve()),
        machine=platform.machine(),
        is_translated=is_translated,
    )


def read_open_files() -> OpenFileFacts:
    """Return the limit of open files of this process."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return OpenFileFacts(soft=soft, hard=hard)


def read_models_folder(folder: Path) -> FolderFacts:
    """List the folder as this process may: macOS refuses some folders to services only (TCC)."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = f"user {os.geteuid()}"
    listed = FolderFacts(path=str(folder), user=user)
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
    except (FileNotFoundError, NotADirectoryError):
        return replace(listed, error="missing")
    except OSError as error:
        is_refused = error.errno in (errno.EPERM, errno.EACCES)
        reason = f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"
        return replace(listed, error="refused" if is_refused else "failed", reason=reason)
    return listed


def read_engines(
    folders: Sequence[Path], expected: Callable[[], Iterable[int]] | None, now: datetime
) -> tuple[EngineFacts, ...]:
    """Return the engines that run, and the last runs of those that have ended.

    `folders` are agents' folders of engines. `expected` returns the processes that the agent of the only folder knows;
    without it, the engines of all agents are returned. Raises psutil.Error or OSError if processes cannot be listed.
    """
    if expected is None:
        running, known = find_engines(None), None
    else:
        # Engines start and end meanwhile: the agent knows them before or after.
        before = set(expected())
        running = [engine for folder in folders for engine in find_engines(folder)]
        known = before | set(expected())
    engines = [_running_engine(engine, known) for engine in running]
    with_engine = {engine.log.parent for engine in running}
    logs = [log for folder in folders for log in folder.glob(f"*/{engine_logs.LOG_FILE}")]
    for log in sorted(logs, key=_modified_at, reverse=True)[:_MAX_LOGS]:
        folder = log.parent
        # The run before the last one, and the last one if it has ended.
        runs = (True,) if folder in with_engine else (True, False)
        for is_past in runs if now - _modified_at(log) <= _NEWS else ():
            lines = _last_lines(folder, engine_logs.find_run(folder, previous=is_past))
            if lines:
                ended = EngineFacts(
                    replica=folder.name, pid=None, last_lines=lines, is_past=is_past
                )
                engines.append(ended)
    return tuple(engines)


def _running_engine(engine: EngineProcess, known: set[int] | None) -> EngineFacts:
    pid, folder = engine.child.record.pid, engine.log.parent
    facts = EngineFacts(
        replica=engine.replica,
        pid=pid,
        port=None if engine.address.socket else engine.address.port,
        is_expected=None if known is None else pid in known,
        last_lines=_last_lines(folder, engine_logs.find_run(folder, previous=False)),
    )
    # What is not ours to read stays unknown.
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        facts = replace(facts, started_at=datetime.fromtimestamp(process.create_time(), UTC))
        facts = replace(facts, used_bytes=footprint_bytes(pid))
        has_fast_synch = process.environ().get(FAST_SYNCH, "") not in ("", "0")
        facts = replace(facts, has_fast_synch=has_fast_synch)
    return facts


def _last_lines(folder: Path, run: EngineRun | None) -> tuple[str, ...]:
    """Return the end of a run's log; nothing if it cannot be read."""
    if run is None:
        return ()
    try:
        with (folder / run.file).open("rb") as file:
            end = file.seek(0, os.SEEK_END) if run.end is None else run.end
            file.seek(max(run.start, end - _TAIL_BYTES))
            text = file.read(max(0, end - file.tell())).decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-_TAIL_LINES:])


def _modified_at(path: Path) -> datetime:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return datetime.fromtimestamp(0, UTC)


def is_orphan(services: Iterable[int | None]) -> bool:
    """Return whether this process outlived its terminal: process 1 is the parent of a program of the fleet, not of a shell.

    macOS judges a process by its first ancestor. `services` are the processes of the service manager, which are
    children of process 1, too. Raises psutil.Error.
    """
    first = psutil.Process()
    program = first.exe()
    while (parent := first.parent()) is not None and parent.pid != 1:
        first = parent
    if parent is None or first.pid in services:
        return False
    try:
        return first.exe() == program
    except psutil.AccessDenied:
        return False  # of root: sshd or login


def read_sockets() -> list[tuple[int, int | None]]:
    """Return (port, pid) of the listening sockets; the pid is None for those of other users. Raises psutil.Error."""
    return [
        (connection.laddr.port, connection.pid)
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    ]


def name_listeners(
    sockets: Iterable[tuple[int, int | None]], ports: set[int]
) -> tuple[Listener, ...]:
    """Return the listeners on the given ports, with the names of their programs."""
    wanted = {(port, pid) for port, pid in sockets if port in ports}
    listeners = []
    for port, pid in sorted(wanted, key=lambda pair: (pair[0], pair[1] or 0)):
        listener = Listener(port=port, pid=pid)
        with suppress(psutil.Error, OSError):
            if pid is not None:
                process = psutil.Process(pid)
                is_ours = pid == os.getpid() or is_fleet(process.cmdline())
                listener = replace(listener, program=process.name(), is_fleet=is_ours)
        listeners.append(listener)
    return tuple(listeners)


def is_fleet(argv: Sequence[str]) -> bool:
    """Return whether the command line is that of an engine or an agent."""
    if EngineIdentity.from_argv(argv) is not None:
        return True
    is_module = ("-m", "nodeagent") in pairwise(argv)
    return is_module or any(Path(word).name == "fleet-nodeagent" for word in argv[:3])


_MAX_DEFINITION: Final = 1 << 20
_PROPERTIES: Final = "LoadState,MainPID,NRestarts,ExecMainStatus"


async def read_jobs(
    run: CommandRunner, root: Path, home: Path, now: datetime
) -> tuple[ServiceFacts, ...]:
    """Return the services of launchd: those of the machine, and those of this user."""
    jobs = []
    for folder, kind, domain in (
        (root / "Library" / "LaunchDaemons", ServiceKind.SYSTEM, "system"),
        (home / "Library" / "LaunchAgents", ServiceKind.GUI, f"gui/{os.getuid()}"),
    ):
        for name, content in _definitions(folder, "*.plist"):
            printed = await run(macos_commands.JOB.argv(target=f"{domain}/{label_of(name)}"))
            # A job that is not loaded prints nothing but an error.
            job = parse_print(printed) if printed and " = {" in printed else None
            service = ServiceFacts(
                name=name,
                kind=kind,
                # 0 for a service that launchd has not loaded, unknown if it did not answer.
                restarts=None if printed is None else 0,
                differences=None if content is None else job_differences(content),
            )
            if job is not None:
                service = replace(
                    service,
                    pid=job.pid,
                    restarts=max(0, job.runs - 1),
                    age_s=age_s(job.pid, now),
                    last_exit=job.last_exit,
                )
            jobs.append(service)
    return tuple(jobs)


async def read_units(
    run: CommandRunner, root: Path, home: Path, now: datetime
) -> tuple[ServiceFacts, ...]:
    """Return the services of systemd: those of the machine, and those of this user."""
    units = []
    for folder, scope in (
        (root / "etc" / "systemd" / "system", ()),
        (home / ".config" / "systemd" / "user", ("--user",)),
    ):
        for name, content in _definitions(folder, "*.service"):
            words = ("systemctl", *scope, "show", f"--property={_PROPERTIES}", unit_name(name))
            report = parse_pairs(await run(words) or "", separator="=")
            is_loaded = report.get("LoadState") == "loaded"
            pid = _number(report.get("MainPID")) or None
            units.append(
                ServiceFacts(
                    name=name,
                    kind=ServiceKind.SYSTEMD,
                    pid=pid,
                    restarts=_number(report.get("NRestarts")) if is_loaded else None,
                    age_s=age_s(pid, now),
                    last_exit=None if pid else _number(report.get("ExecMainStatus")),
                    differences=None
                    if content is None
                    else unit_differences(content.decode(errors="replace")),
                )
            )
    return tuple(units)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None


def _definitions(folder: Path, pattern: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name and the definition of each service in a folder; None for one that cannot be read."""
    try:
        paths = sorted(folder.glob(pattern))
    except OSError:
        return
    for path in paths:
        name = service_name(path.name)
        if name is None:
            continue
        try:
            with path.open("rb") as file:
                yield name, file.read(_MAX_DEFINITION)
        except OSError:
            yield name, None


def age_s(pid: int | None, now: datetime) -> float | None:
    """Return the seconds since the start of a process; None if there is none."""
    try:
        started = None if pid is None else psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    return None if started is None else max(0.0, now.timestamp() - started)
