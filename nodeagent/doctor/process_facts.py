"""Readers of what processes hold on this machine: engines, their logs, listening sockets, limits, folders."""

import errno
import os
import platform
import pwd
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil

from nodeagent.doctor.host_facts import (
    EngineFacts,
    FolderFacts,
    Listener,
    OpenFileFacts,
    PythonFacts,
)
from nodeagent.engines import engine_logs
from nodeagent.engines.engine_logs import EngineRun
from nodeagent.engines.engine_processes import EngineProcess, find_engines
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
    user = _user_name()
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
    except (FileNotFoundError, NotADirectoryError):
        return FolderFacts(path=str(folder), error="missing", user=user)
    except OSError as error:
        is_refused = error.errno in (errno.EPERM, errno.EACCES)
        name = errno.errorcode.get(error.errno or 0, "error")
        return FolderFacts(
            path=str(folder),
            error="refused" if is_refused else "failed",
            reason=f"{name}: {error.strerror}",
            user=user,
        )
    return FolderFacts(path=str(folder), user=user)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"


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
    found = [_running_engine(one, known) for one in running]
    with_engine = {one.log.parent for one in running}
    logs = [log for folder in folders for log in folder.glob(f"*/{engine_logs.LOG_FILE}")]
    for log in sorted(logs, key=_modified_at, reverse=True)[:_MAX_LOGS]:
        if now - _modified_at(log) <= _NEWS:
            found += _past_runs(log.parent, is_running=log.parent in with_engine)
    return tuple(found)


def with_in_flight(
    engines: Sequence[EngineFacts], in_flight: Mapping[str, int | None]
) -> tuple[EngineFacts, ...]:
    """Return the engines with the sequences that they generate."""
    return tuple(
        one if one.pid is None else replace(one, in_flight=in_flight.get(one.replica))
        for one in engines
    )


def _running_engine(engine: EngineProcess, known: set[int] | None) -> EngineFacts:
    pid = engine.child.record.pid
    started_at, resident, environment = _process_details(pid)
    return EngineFacts(
        replica=engine.replica,
        pid=pid,
        started_at=started_at,
        port=engine.address.port if not engine.address.socket else None,
        is_expected=None if known is None else pid in known,
        resident_bytes=resident,
        has_fast_synch=None
        if environment is None
        else environment.get(FAST_SYNCH, "") not in ("", "0"),
        last_lines=_last_lines(
            engine.log.parent, engine_logs.find_run(engine.log.parent, previous=False)
        ),
    )


def _process_details(
    pid: int,
) -> tuple[datetime | None, int | None, Mapping[str, str] | None]:
    """Return the start, the resident bytes and the environment of a process; None for what is not ours to read."""
    started_at, resident, environment = None, None, None
    try:
        process = psutil.Process(pid)
        started_at = datetime.fromtimestamp(process.create_time(), UTC)
        resident = int(process.memory_info().rss)
        environment = process.environ()
    except (psutil.Error, OSError):
        pass
    return started_at, resident, environment


def _past_runs(folder: Path, *, is_running: bool) -> Iterator[EngineFacts]:
    """Yield the last run of an engine that has ended, and the run before the last one if it is news."""
    runs = [(engine_logs.find_run(folder, previous=True), True)]
    if not is_running:
        runs.append((engine_logs.find_run(folder, previous=False), False))
    for run, is_past in runs:
        lines = _last_lines(folder, run)
        if lines:
            yield EngineFacts(replica=folder.name, pid=None, last_lines=lines, is_past=is_past)


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


def read_sockets() -> list[tuple[int, int | None]]:
    """Return (port, pid) of the listening sockets; the pid is None for those of other users. Raises psutil.Error."""
    return [
        (one.laddr.port, one.pid)
        for one in psutil.net_connections(kind="tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr
    ]


def name_listeners(
    sockets: Iterable[tuple[int, int | None]], ports: set[int]
) -> tuple[Listener, ...]:
    """Return the listeners on the given ports, with the names of their programs."""
    several = {(port, pid) for port, pid in sockets if port in ports}
    return tuple(
        _listener(port, pid) for port, pid in sorted(several, key=lambda one: (one[0], one[1] or 0))
    )


def _listener(port: int, pid: int | None) -> Listener:
    if pid is None:
        return Listener(port=port)
    try:
        process = psutil.Process(pid)
        argv = process.cmdline()
        is_ours = pid == os.getpid() or is_fleet(argv)
        return Listener(port=port, pid=pid, program=process.name(), is_fleet=is_ours)
    except (psutil.Error, OSError):
        return Listener(port=port, pid=pid)


def is_fleet(argv: Sequence[str]) -> bool:
    """Return whether the command line is that of an engine or an agent."""
    if EngineIdentity.from_argv(argv) is not None:
        return True
    is_module = ("-m", "nodeagent") in pairwise(argv)
    return is_module or any(Path(word).name == "fleet-nodeagent" for word in argv[:3])
