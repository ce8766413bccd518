"""What tells a process from a later one with its pid: the moment it was started, as a text.

On Linux that is the kernel's own count of ticks, with the boot it counts from. The wall time that
libraries derive from it moves when the machine's clock is set, and an adopted process would then
be taken for a stranger.

Processes that outlive us: start, find again, end. A pid alone is never trusted.

A record on disk names the pid and the moment it was started; if both still match, the process is
ours, whoever started it. So a restarted parent adopts what its predecessor left running.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import psutil

from machinery.clock import Clock
from machinery.files import write_atomically

_STARTTIME_FIELD = 19  # the 22nd field of /proc/PID/stat (proc(5)), counted from behind the name
_PROC_FOLDER = Path("/proc")


def process_start(pid: int) -> str:
    """Return the mark of a running process.

    Raises:
        psutil.Error: there is none with that pid, or it may not be looked at.

    """
    if sys.platform != "linux":
        return f"{psutil.Process(pid).create_time():.3f}"
    try:
        stat = (_PROC_FOLDER / str(pid) / "stat").read_text(errors="replace")
        boot = (_PROC_FOLDER / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    except OSError as error:
        raise psutil.AccessDenied(pid) from error
    # The name may hold blanks and brackets; the last bracket ends it.
    return f"{boot}/{stat.rpartition(')')[2].split()[_STARTTIME_FIELD]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """What identifies one running process, now and after our own restart."""

    pid: int
    birthmark: str
    """When it was started, as `machinery.processes` tells."""
    command: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Keep the record. Raises OSError."""
        write_atomically(path, json.dumps(asdict(self)))


def load_record(path: Path) -> ProcessRecord | None:
    """Return the record in a file; None if there is none, or none that can be read."""
    try:
        tree = json.loads(path.read_text())
        record = ProcessRecord(
            pid=int(tree["pid"]),
            birthmark=str(tree["birthmark"]),
            command=tuple(tree["command"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    # 0 and below are no processes but groups of them.
    return record if record.pid > 0 else None


def is_running(record: ProcessRecord) -> bool:
    """Return whether this very process runs (a zombie does not, nor one that reuses the pid)."""
    try:
        same = process_start(record.pid) == record.birthmark
        return same and psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class ProcessHandle(Protocol):
    """What can be done to a running process."""

    @property
    def record(self) -> ProcessRecord: ...

    def running(self) -> bool: ...

    def is_frozen(self) -> bool: ...

    def exit_code(self) -> int | None: ...

    def send(self, signal_number: int) -> None: ...


class ChildProcess:
    """A process that we started or adopted, in a session of its own."""

    def __init__(self, record: ProcessRecord, popen: subprocess.Popen[bytes] | None) -> None:
        self.record = record
        self._popen = popen

    def running(self) -> bool:
        """Return whether it runs; reaps it if it was ours and ended."""
        if self._popen is not None:
            return self._popen.poll() is None
        return is_running(self.record)

    def is_frozen(self) -> bool:
        """Return whether it is stopped (SIGSTOP): it can hear no request to end."""
        try:
            is_stopped = psutil.Process(self.record.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False
        return is_stopped and self.running()

    def exit_code(self) -> int | None:
        """Return the exit code (minus the signal that ended it); None if unknown."""
        return None if self._popen is None else self._popen.poll()

    def send(self, signal_number: int) -> None:
        """Send a signal, if it is still this process."""
        if self.running():
            os.kill(self.record.pid, signal_number)


def adopt(path: Path) -> ChildProcess | None:
    """Return the process of a record on disk, if it still runs."""
    record = load_record(path)
    return ChildProcess(record, None) if record is not None and is_running(record) else None


def find_running(pid: int) -> ChildProcess | None:
    """Return the process that has this pid now; only for pids that a lock proves to be alive."""
    try:
        process = psutil.Process(pid)
        record = ProcessRecord(
            pid=pid, birthmark=process_start(pid), command=tuple(process.cmdline())
        )
    except psutil.Error:
        return None
    return ChildProcess(record, None)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ChildProcess:
    """Start a process in a session of its own, its output appended to a file.

    Its own session, so that neither a closed terminal nor Ctrl-C at its parent ends it. Without an `environment` it
    has ours.

    Raises:
        OSError: the program or the log cannot be opened.

    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    try:
        mark = process_start(popen.pid)
    except psutil.Error:  # it has ended already; poll() will tell
        mark = ""
    record = ProcessRecord(pid=popen.pid, birthmark=mark, command=tuple(command))
    return ChildProcess(record, popen)


async def wait_ended(child: ProcessHandle, clock: Clock, *, limit_s: float) -> bool:
    """Wait until the process ended; return whether it did within the limit."""
    deadline = clock.monotonic() + limit_s
    while child.running():
        if clock.monotonic() >= deadline:
            return False
        await clock.sleep(0.02)
    return True


async def end(child: ProcessHandle, clock: Clock, *, grace_s: float) -> None:
    """Ask the process to end, and make it end when the grace is over."""
    child.send(signal.SIGTERM)
    child.send(signal.SIGCONT)  # a stopped process hears nothing until it goes on
    if await wait_ended(child, clock, limit_s=grace_s):
        return
    child.send(signal.SIGKILL)
    await wait_ended(child, clock, limit_s=10.0)


def last_lines(path: Path, count: int = 3) -> str:
    """Return the end of a log in one line, for error messages; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return " | ".join(line.strip() for line in text.splitlines()[-count:] if line.strip())


def last_words(path: Path) -> str:
    """Return the last line of a log if a process may have said there why it ends; empty after a kill in mid-work."""
    line = last_lines(path, 1)
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    # An ordinary entry, such as of the last request, is about anything but the end.
    is_ordinary = isinstance(entry, dict) and entry.get("level") in ("debug", "info")
    return "" if is_ordinary else line
