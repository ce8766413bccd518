"""Processes end with 0 when signalled, and with 1 and a log line after a defect."""

import json
import signal
import sys
from pathlib import Path

import pytest

from machinery import processes
from machinery.clock import SystemClock
from machinery.processes import ChildProcess
from tests.support.waiting import until

_ROOT = Path(__file__).parent.parent.parent


def daemon(folder: Path, how: str) -> ChildProcess:
    line = (sys.executable, "-m", "tests.support.machinery_daemon", how)
    return processes.spawn(line, log=folder / "log", cwd=_ROOT)


async def ended(child: ChildProcess) -> int | None:
    assert await processes.wait_ended(child, SystemClock(), limit_s=15)
    return child.exit_code()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    child = daemon(tmp_path, "waits")
    await until(lambda: "up" in (tmp_path / "log").read_text())
    child.send(number)
    assert await ended(child) == 0
    assert (tmp_path / "log").read_text() == "up\ncleaned up\n"


async def test_an_end_that_hangs_is_forced(tmp_path: Path) -> None:
    """The store may not answer: a signal ends a process within seconds all the same."""
    child = daemon(tmp_path, "hangs")
    await until(lambda: "up" in (tmp_path / "log").read_text())
    child.send(signal.SIGTERM)
    assert await ended(child) == 1
    assert "did not end in time after a signal" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("how", "why"), [("fails", "a defect"), ("groups", "a defect in a task")])
async def test_a_defect_ends_it_with_one_and_one_line(tmp_path: Path, how: str, why: str) -> None:
    assert await ended(daemon(tmp_path, how)) == 1
    _, line = (tmp_path / "log").read_text().splitlines()
    said = json.loads(line)
    assert (said["level"], said["process"]) == ("error", "daemon")
    assert said["message"] == "the process ends because of a defect"
    assert f"RuntimeError: {why}" in said["traceback"]
