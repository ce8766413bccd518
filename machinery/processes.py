"""Processes that outlive us: start, find again, end. A pid alone is never trusted.

A record on disk names the pid and the moment it was started; if both still match, the process is
ours, whoever started it. So a restarted parent adopts what its predecessor left running.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import psutil

from machinery import birthmark
from machinery.clock import Clock
from machinery.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What identifies one running process, now and after our own restart."""

    pid: int
    birthmark: str
    """When it was started, as `machinery.birthmark` tells."""
    command: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Keep the record. Raises OSError."""
        write_atomically(path, json.dumps(asdict(self)))


def load(path: Path) -> Record | None:
    """Return the record in a file; None if there is none, or none that can be read."""
    try:
        tree = json.loads(path.read_text())
        record = Record(
            pid=int(tree["pid"]),
            birthmark=str(tree["birthmark"]),
            command=tuple(tree["command"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    # 0 and below are no processes but groups of them.
    return record if record.pid > 0 else None


def is_running(record: Record) -> bool:
    """Return whether this very process runs (a zombie does not, nor one that reuses the pid)."""
    try:
        same = birthmark.of(record.pid) == record.birthmark
        return same and psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Process(Protocol):
    """What can be done to a running process."""

    @property
    def record(self) -> Record: ...

    def running(self) -> bool: ...

    def is_frozen(self) -> bool: ...

    def exit_code(self) -> int | None: ...

    def send(self, signal_number: int) -> None: ...


class Child:
    """A process that we started or adopted, in a session of its own."""

    def __init__(self, record: Record, popen: subprocess.Popen[bytes] | None) -> None:
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


def adopt(path: Path) -> Child | None:
    """Return the process of a record on disk, if it still runs."""
    record = load(path)
    return Child(record, None) if record is not None and is_running(record) else None


def running(pid: int) -> Child | None:
    """Return the process that has this pid now; only for pids that a lock proves to be alive."""
    try:
        process = psutil.Process(pid)
        record = Record(pid=pid, birthmark=birthmark.of(pid), command=tuple(process.cmdline()))
    except psutil.Error:
        return None
    return Child(record, None)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Child:
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
        mark = birthmark.of(popen.pid)
    except psutil.Error:  # it has ended already; poll() will tell
        mark = ""
    record = Record(pid=popen.pid, birthmark=mark, command=tuple(command))
    return Child(record, popen)


async def wait_ended(child: Process, clock: Clock, *, limit_s: float) -> bool:
    """Wait until the process ended; return whether it did within the limit."""
    deadline = clock.monotonic() + limit_s
    while child.running():
        if clock.monotonic() >= deadline:
            return False
        await clock.sleep(0.02)
    return True


async def end(child: Process, clock: Clock, *, grace_s: float) -> None:
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
