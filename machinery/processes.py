"""Child processes that outlive their parent: start, find again, stop. A pid alone is never trusted.

A record on disk names the pid and the start of the process. If both still match, it is the same process, so a
restarted parent adopts the children of its predecessor.
"""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from machinery.clock import Clock
from machinery.environment import environment_without_secrets
from machinery.file_limit import raise_file_limit
from machinery.files import write_atomically
from machinery.footprint import footprint_bytes

_STARTTIME_FIELD = 19  # the 22nd field of /proc/PID/stat (proc(5)), counted from behind the name
_IS_LINUX: bool = sys.platform == "linux"
_PROC_FOLDER = Path("/proc")


def process_start(pid: int) -> str:
    """Return a text that tells a running process from a later one with the same pid: when it was started.

    On Linux it is the kernel's count of ticks and the id of the boot. The wall time that libraries derive from them
    moves when the machine's clock is set, and an adopted process would then look like another one.

    Raises:
        psutil.Error: there is no such process, or it may not be inspected.

    """
    if not _IS_LINUX:
        return f"{psutil.Process(pid).create_time():.3f}"
    try:
        stat = (_PROC_FOLDER / str(pid) / "stat").read_text(errors="replace")
        boot = (_PROC_FOLDER / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    except OSError as error:
        raise psutil.AccessDenied(pid) from error
    # The name may hold spaces and brackets; the last bracket ends it.
    return f"{boot}/{stat.rpartition(')')[2].split()[_STARTTIME_FIELD]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """The identity of one process, valid also after a restart of its parent."""

    pid: int
    start: str
    """The start of the process, as `process_start` returns it."""
    command: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Write the record to a file. Raises OSError."""
        tree = {"pid": self.pid, "start": self.start, "command": self.command}
        write_atomically(path, json.dumps(tree))


def load_record(path: Path) -> ProcessRecord | None:
    """Return the record in a file; None if there is none, or it cannot be read."""
    try:
        tree = json.loads(path.read_text())
        record = ProcessRecord(
            pid=int(tree["pid"]),
            start=str(tree["start"]),
            command=tuple(tree["command"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    # Pids of 0 and below name process groups.
    return record if record.pid > 0 else None


def is_running(record: ProcessRecord) -> bool:
    """Return whether this very process runs; a zombie does not, nor does another one with its pid."""
    try:
        same = process_start(record.pid) == record.start
        return same and psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class ProcessHandle(Protocol):
    """A process that can be observed and signalled."""

    @property
    def record(self) -> ProcessRecord: ...

    def running(self) -> bool: ...

    def is_frozen(self) -> bool: ...

    def exit_code(self) -> int | None: ...

    def used_bytes(self) -> int: ...

    def send(self, signal_number: int) -> None: ...


class ChildProcess:
    """A process in a session of its own, started by this parent or adopted."""

    def __init__(self, record: ProcessRecord, popen: subprocess.Popen[bytes] | None) -> None:
        """`popen` is None for an adopted process."""
        self.record = record
        self._popen = popen

    def running(self) -> bool:
        """Return whether it runs; reaps it if it was started here and has ended."""
        if self._popen is not None:
            return self._popen.poll() is None
        return is_running(self.record)

    def is_frozen(self) -> bool:
        """Return whether it is stopped (SIGSTOP), so that it cannot react to a request to end."""
        try:
            is_stopped = psutil.Process(self.record.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False
        return is_stopped and self.running()

    def exit_code(self) -> int | None:
        """Return the exit code (minus the signal that ended it); None if unknown."""
        return None if self._popen is None else self._popen.poll()

    def used_bytes(self) -> int:
        """Return the memory that the system charges to it; 0 if it has ended or cannot be read."""
        return (footprint_bytes(self.record.pid) or 0) if self.running() else 0

    def send(self, signal_number: int) -> None:
        """Send a signal, if this very process still runs."""
        if self.running():
            os.kill(self.record.pid, signal_number)


def adopt(path: Path) -> ChildProcess | None:
    """Return the process of a record on disk; None if it does not run any more."""
    record = load_record(path)
    return ChildProcess(record, None) if record is not None and is_running(record) else None


def find_running(pid: int) -> ChildProcess | None:
    """Return the process that has this pid now; only for pids that a lock proves to be alive."""
    try:
        process = psutil.Process(pid)
        record = ProcessRecord(pid=pid, start=process_start(pid), command=tuple(process.cmdline()))
    except psutil.Error:
        return None
    return ChildProcess(record, None)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> ChildProcess:
    """Start a process in a session of its own, and append its output to a file.

    In its own session neither a closed terminal nor Ctrl-C at its parent ends it. Without an `environment` it inherits
    ours, except for variables that hold secrets, and may open as many files as the system allows. It reads `stdin` and then the end, even if this process is killed meanwhile.

    Raises:
        OSError: the program or the log cannot be opened, or `stdin` is larger than a pipe.

    """
    raise_file_limit()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, _filled_pipe(stdin) as pipe:
        popen = subprocess.Popen(
            list(command),
            stdin=pipe,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=environment_without_secrets() if environment is None else environment,
            start_new_session=True,
        )
    try:
        start = process_start(popen.pid)
    except psutil.Error:  # it has ended already; poll() reports it
        start = ""
    record = ProcessRecord(pid=popen.pid, start=start, command=tuple(command))
    return ChildProcess(record, popen)


@contextmanager
def _filled_pipe(content: bytes) -> Iterator[int]:
    """Yield the end to read of a pipe that holds the content and has no writer."""
    if not content:
        yield subprocess.DEVNULL
        return
    reader, writer = os.pipe()
    try:
        try:
            os.set_blocking(writer, False)  # a full pipe is an error, because nothing reads it yet
            if os.write(writer, content) < len(content):
                raise OSError(errno.EMSGSIZE, "the input is larger than a pipe")
        finally:
            os.close(writer)
        yield reader
    finally:
        os.close(reader)


def describe_exit(code: int) -> str:
    """Return how a process ended: "ended with 2", and "was killed by SIGKILL" for -9."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


async def wait_ended(child: ProcessHandle, clock: Clock, *, limit_s: float) -> bool:
    """Wait until the process ends; return whether it ended within `limit_s` seconds."""
    deadline = clock.monotonic() + limit_s
    while child.running():
        if clock.monotonic() >= deadline:
            return False
        await clock.sleep(0.02)
    return True


async def end(child: ProcessHandle, clock: Clock, *, grace_s: float) -> None:
    """Ask the process to end (SIGTERM), and kill it after `grace_s` seconds."""
    child.send(signal.SIGTERM)
    child.send(signal.SIGCONT)  # a stopped process handles no signal until it continues
    if await wait_ended(child, clock, limit_s=grace_s):
        return
    child.send(signal.SIGKILL)
    await wait_ended(child, clock, limit_s=10.0)


def last_lines(path: Path, count: int = 3) -> str:
    """Return the end of a log in one line, for error messages; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return " | ".join(line.strip() for line in text.splitlines()[-count:] if line.strip())


def last_words(path: Path) -> str:
    """Return the last line of a log if it can explain the end of the process; "" after a kill during work."""
    line = last_lines(path, 1)
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    # An ordinary entry, such as the last request, does not explain the end.
    is_ordinary = isinstance(entry, dict) and entry.get("level") in ("debug", "info")
    return "" if is_ordinary else line
