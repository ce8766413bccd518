"""Logs that are rotated under a program that writes: no line is lost, and any rotation may be killed."""

import asyncio
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from machinery import log_rotation
from machinery.clock import SystemClock
from machinery.log_rotation import rotate, rotated_path
from machinery.processes import spawn
from machinery.supervisor import Program, Supervisor
from tests.support.waiting import until

# Writes numbered lines, some of them through C.
WRITER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
for number in range(int(sys.argv[1])):
    line = b"line %06d\\n" % number
    libc.write(2, line, len(line)) if number % 2 else os.write(2, line)
    time.sleep(0.0001)
"""


def numbers(path: Path) -> list[int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.removeprefix("line ")) for line in lines]


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert not rotate(log)
    log.write_text("12345678")
    assert not rotate(log, limit_bytes=8)
    assert log.read_text() == "12345678"
    assert sorted(tmp_path.iterdir()) == [log]


def test_a_large_log_is_moved_with_its_mode(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    log.chmod(0o640)
    told: list[str] = []
    assert rotate(log, limit_bytes=3, before_truncate=lambda: told.append(log.read_text()))
    assert (log.read_text(), rotated_path(log).read_text(), told) == ("", "one\n", ["one\n"])
    assert rotated_path(log).stat().st_mode & 0o777 == 0o640
    log.write_text("two\n")
    assert rotate(log, limit_bytes=3)
    assert rotated_path(log).read_text() == "two\n"


def test_a_program_writes_on_while_its_log_is_rotated(tmp_path: Path) -> None:
    log, count = tmp_path / "log", 10_000
    child = spawn([sys.executable, "-c", WRITER, str(count)], log=log)
    seen: list[int] = []
    while child.running() or log.stat().st_size > 20_000:
        if rotate(log, limit_bytes=20_000):
            seen += numbers(rotated_path(log))
    seen += numbers(log)
    assert child.exit_code() == 0
    # Whole lines, in order; at most those between the last copy and the truncation are missing.
    assert seen == sorted(set(seen))
    assert len(seen) > 0.9 * count


@pytest.mark.parametrize("step", ["copied", "truncated"])
def test_a_rotation_that_was_killed_is_finished_by_the_next(tmp_path: Path, step: str) -> None:
    log = tmp_path / "log"
    log.write_text("old\n" * 100)
    kill = f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    code = (
        "import os, sys, pathlib\\n"
        "from machinery import log_rotation\\n"
        "def end(*_):\\n    " + kill + "\\n"
        "path = pathlib.Path(sys.argv[1])\\n"
        "if sys.argv[2] == 'copied':\\n    log_rotation.rotate(path, limit_bytes=9, before_truncate=end)\\n"
        "log_rotation.rotated_path = end\\n"
        "log_rotation.rotate(path, limit_bytes=9)\\n"
    ).replace("\\n", "\n")
    ended = subprocess.run([sys.executable, "-c", code, str(log), step], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not rotated_path(log).exists()
    with log.open("a") as file:
        file.write("new\n")
    rotate(log, limit_bytes=9)
    assert (rotated_path(log).read_text() + log.read_text()).replace("old\n", "") == "new\n"
    assert rotated_path(log).read_text().count("old\n") == 100
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_drops_the_content(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n" * 100)

    def fail() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    assert rotate(log, limit_bytes=9, before_truncate=fail)
    assert log.stat().st_size == 0
    assert sorted(tmp_path.iterdir()) == [log]


def test_two_rotations_at_once_do_not_mix(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n" * 100)
    told: list[bool] = []
    rotate(log, limit_bytes=9, before_truncate=lambda: told.append(rotate(log, limit_bytes=9)))
    assert told == [False]
    assert rotated_path(log).read_text() == "old\n" * 100


async def test_a_supervisor_bounds_the_log_of_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any program's: etcd knows nothing of it."""
    monkeypatch.setattr(log_rotation, "_CHECK_S", 0.05)
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(log_rotation.LIMIT_BYTES + 1)
    program = Program(
        name="chatter",
        command=("sh", "-c", "while true; do echo line; sleep 0.1; done"),
        log=log,
        record=tmp_path / "pid",
    )
    supervisor = Supervisor(program, SystemClock())
    await supervisor.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await until(lambda: rotated_path(log).exists() and 0 < log.stat().st_size < 4096)
        pid = supervisor.pid
        await supervisor.stop()
    assert pid is not None
    assert supervisor.restarts == 0
    assert rotated_path(log).stat().st_size > log_rotation.LIMIT_BYTES


def test_the_command_of_a_periodic_job_rotates_what_is_large(tmp_path: Path) -> None:
    large, small = tmp_path / "large.log", tmp_path / "small.log"
    large.write_bytes(b"x" * (log_rotation.LIMIT_BYTES + 1))
    small.write_bytes(b"y")
    command = (sys.executable, "-m", "machinery.log_rotation", str(large), str(small))
    subprocess.run(command, check=True, timeout=60)
    assert large.read_bytes() == b""
    assert log_rotation.rotated_path(large).stat().st_size == log_rotation.LIMIT_BYTES + 1
    assert small.read_bytes() == b"y"
