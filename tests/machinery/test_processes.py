"""Child processes are found again, never confused with others, and always ended."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from machinery import processes
from machinery.clock import SystemClock
from machinery.processes import ChildProcess, ProcessRecord
from tests.support.values import present
from tests.support.waiting import until

SLEEPER = ("sleep", "60")
STUBBORN = (
    sys.executable, "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " "print('deaf', flush=True); signal.pause()",
)  # fmt: skip
CLOCK = SystemClock()


@asynccontextmanager
async def child(folder: Path, command: tuple[str, ...] = SLEEPER) -> AsyncIterator[ChildProcess]:
    made = processes.spawn(command, log=folder / "log")
    try:
        yield made
    finally:
        made.send(signal.SIGKILL)
        assert await processes.wait_ended(made, CLOCK, limit_s=10)


async def test_a_record_leads_back_to_the_process(tmp_path: Path) -> None:
    async with child(tmp_path) as started:
        started.record.save(tmp_path / "pid")
        adopted = present(processes.adopt(tmp_path / "pid"))
        assert adopted.record == started.record
        assert (adopted.running(), adopted.exit_code()) == (True, None)


async def test_it_lives_in_a_session_of_its_own_and_its_output_is_kept(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    line = ("sh", "-c", "pwd; ps -o sid= -p $$; echo oops >&2; exec sleep 60")
    made = processes.spawn(line, log=tmp_path / "logs" / "log", cwd=tmp_path / "sub")
    log = tmp_path / "logs" / "log"
    await until(lambda: log.exists() and "oops" in log.read_text())
    folder, session, _ = log.read_text().split()
    assert (folder, int(session)) == (str(tmp_path / "sub"), made.record.pid)
    await processes.end(made, CLOCK, grace_s=5)
    assert made.exit_code() == -signal.SIGTERM


async def test_a_pid_that_was_used_again_is_not_trusted(tmp_path: Path) -> None:
    async with child(tmp_path) as other:
        earlier = dataclasses.replace(other.record, start=other.record.start + "0")
        earlier.save(tmp_path / "pid")
        assert processes.adopt(tmp_path / "pid") is None
        assert not processes.is_running(earlier)
        ChildProcess(earlier, None).send(signal.SIGKILL)
        assert other.running()


async def test_a_zombie_does_not_run(tmp_path: Path) -> None:
    async with child(tmp_path) as ours:
        ours.record.save(tmp_path / "pid")
        os.kill(ours.record.pid, signal.SIGKILL)
        process = psutil.Process(ours.record.pid)
        await until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert not processes.is_running(ours.record)
        assert processes.adopt(tmp_path / "pid") is None
        assert not ours.running()  # and reaps it
        assert ours.exit_code() == -signal.SIGKILL
        assert not psutil.pid_exists(ours.record.pid)


@pytest.mark.parametrize("content", [
    pytest.param(None, id="missing"),
    pytest.param("", id="empty"),
    pytest.param("{", id="cut"),
    pytest.param("[]", id="list"),
    pytest.param("7", id="number"),
    pytest.param("{}", id="no-fields"),
    pytest.param('{"pid": "x", "start": "x", "command": []}', id="no-pid"),
    pytest.param('{"pid": -1, "start": "x", "command": []}', id="negative"),
    pytest.param('{"pid": 0, "start": "x", "command": []}', id="our-group"),
    pytest.param('{"pid": 1e999, "start": "x", "command": []}', id="infinite"),
    pytest.param('{"pid": 99999999999999999999, "start": "x", "command": []}', id="huge"),
    pytest.param('{"pid": 1, "start": "x", "command": []}', id="nan"),
])  # fmt: skip
def test_a_record_that_makes_no_sense_is_no_process(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "pid").write_text(content)
    assert processes.adopt(tmp_path / "pid") is None


def test_a_record_is_read_back(tmp_path: Path) -> None:
    record = ProcessRecord(pid=7, start="b/1", command=("a", "b c"))
    record.save(tmp_path / "pid")
    assert processes.load_record(tmp_path / "pid") == record
    assert json.loads((tmp_path / "pid").read_text())["pid"] == 7


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    async with child(tmp_path, STUBBORN) as deaf:
        await until(lambda: "deaf" in (tmp_path / "log").read_text())
        started = CLOCK.monotonic()
        await processes.end(deaf, CLOCK, grace_s=0.3)
        assert 0.3 <= CLOCK.monotonic() - started < 5
        assert (deaf.running(), deaf.exit_code()) == (False, -signal.SIGKILL)


async def test_a_stopped_process_ends_within_the_grace(tmp_path: Path) -> None:
    async with child(tmp_path) as frozen:
        frozen.send(signal.SIGSTOP)
        started = CLOCK.monotonic()
        await processes.end(frozen, CLOCK, grace_s=20)
        assert CLOCK.monotonic() - started < 5
        assert frozen.exit_code() == -signal.SIGTERM


async def test_ending_an_ended_process_has_no_effect(tmp_path: Path) -> None:
    async with child(tmp_path, ("true",)) as short:
        assert await processes.wait_ended(short, CLOCK, limit_s=30)
        await processes.end(short, CLOCK, grace_s=0)
        assert short.exit_code() == 0


async def test_waiting_has_a_limit(tmp_path: Path) -> None:
    async with child(tmp_path) as long:
        assert not await processes.wait_ended(long, CLOCK, limit_s=0.1)


async def test_a_pid_known_to_be_alive_is_taken_as_it_is(tmp_path: Path) -> None:
    async with child(tmp_path) as ours:
        running = present(processes.find_running(ours.record.pid))
        assert running.record.start == ours.record.start
        assert running.running()
    assert processes.find_running(ours.record.pid) is None


def test_what_cannot_be_started_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="/nowhere/program"):
        processes.spawn(("/nowhere/program",), log=tmp_path / "log")


@pytest.mark.parametrize(("content", "expected"), [
    (None, ""), (b"", ""), (b"one\n", "one"),
    (b"1\n 2 \n\n3\n4\n", "3 | 4"),
    (b"\xff\n", "\N{REPLACEMENT CHARACTER}"),
    (b"x" * 10_000 + b"\nend\n", f"{'x' * 8187} | end"),
])  # fmt: skip
def test_last_words(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    assert processes.last_lines(tmp_path / "log") == expected


@pytest.mark.parametrize(("line", "expected"), [
    ("engine: rank 1 was lost", "engine: rank 1 was lost"),
    ('{"level": "info", "message": "request"}', ""),
    ('{"level": "error", "message": "no"}', '{"level": "error", "message": "no"}'),
    ("[]", "[]"), ("", ""),
])  # fmt: skip
def test_an_ordinary_entry_is_no_last_word(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "log").write_text(f"before\n{line}\n" if line else "")
    assert processes.last_words(tmp_path / "log") == expected


async def test_a_process_reads_its_input_though_its_parent_was_killed(tmp_path: Path) -> None:
    parent = """
import os, signal, sys
from pathlib import Path
from machinery import processes
child = "import sys, time; time.sleep(0.5); print(sys.stdin.read(), flush=True)"
processes.spawn([sys.executable, "-c", child], log=Path(sys.argv[1]), stdin=b"all of it")
os.kill(os.getpid(), signal.SIGKILL)
"""
    log = tmp_path / "log"
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", parent, str(log)], check=False, timeout=60
    )
    assert await until(log.read_text, what="its output") == "all of it\n"


def test_an_input_that_no_pipe_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="larger than a pipe"):
        processes.spawn(["true"], log=tmp_path / "log", stdin=bytes(2 << 20))
