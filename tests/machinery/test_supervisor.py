"""A program is kept running, found by the next supervisor, and stopped for good."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from machinery import processes
from machinery.clock import SystemClock
from machinery.supervisor import Program, Supervisor
from tests.support.values import present
from tests.support.waiting import until


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(
        name="sleeper",
        command=("sleep", "60"),
        log=tmp_path / "log",
        record=tmp_path / "pid",
        grace_s=5.0,
    )


@asynccontextmanager
async def supervised(program: Program) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(program, SystemClock())
    try:
        yield supervisor
    finally:
        await supervisor.stop()


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervisor.run())
        yield task
        task.cancel()


async def test_a_killed_program_is_started_again(program: Program) -> None:
    async with supervised(program) as supervisor:
        await supervisor.start()
        first = supervisor.pid
        assert first
        async with running(supervisor):
            os.kill(first, signal.SIGKILL)
            await until(lambda: supervisor.pid != first and supervisor.running)
            assert supervisor.restarts == 1
            record = present(processes.load_record(program.record))
            assert record.pid == supervisor.pid


async def test_a_crash_loop_is_slowed_down_and_logged(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    crashing = replace(program, command=("sh", "-c", "echo broken; exit 3"))
    clock = SystemClock()
    async with supervised(crashing) as supervisor:
        await supervisor.start()
        started = clock.monotonic()
        async with running(supervisor):
            await until(lambda: supervisor.restarts >= 4, limit_s=15)
        # At least half of 0.1, 0.2 and 0.4 s between four ends.
        assert clock.monotonic() - started > 0.35
    logged = [r for r in caplog.records if r.getMessage() == "a program ended; restarting it"]
    assert {(vars(r)["exit_code"], vars(r)["program"]) for r in logged} == {(3, "sleeper")}
    assert "broken" in vars(logged[-1])["last_words"]


async def test_a_disk_that_takes_no_writes_ends_nothing_else(
    program: Program, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    async with supervised(replace(program, record=folder / "pid")) as supervisor:
        await supervisor.start()
        first = supervisor.pid
        assert first
        shutil.rmtree(folder)
        folder.touch()  # as a read-only file system does, this refuses every change below it
        async with running(supervisor) as task:
            os.kill(first, signal.SIGKILL)
            await until(lambda: supervisor.restarts >= 2, limit_s=20.0)
            assert not task.done()
            folder.unlink()
            folder.mkdir()
            await until(lambda: supervisor.running and (folder / "pid").exists(), limit_s=20.0)
        shutil.rmtree(folder)
        folder.touch()
        await supervisor.stop()
        assert not supervisor.running


async def test_a_successor_adopts_a_running_program(program: Program) -> None:
    async with supervised(program) as lost, supervised(program) as successor:
        await lost.start()
        await successor.start()
        assert successor.pid == lost.pid
        async with running(successor):
            await successor.stop()
        assert not lost.running


async def test_what_runs_with_other_flags_is_started_again(program: Program) -> None:
    async with supervised(program) as lost:
        await lost.start()
        async with supervised(replace(program, command=("sleep", "61"))) as successor:
            await successor.start()
            assert successor.pid != lost.pid
            assert (successor.running, lost.running) == (True, False)


async def test_stop_is_for_good(program: Program) -> None:
    async with supervised(program) as supervisor:
        assert (supervisor.running, supervisor.pid, supervisor.wanted()) == (False, None, True)
        await supervisor.start()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            await supervisor.stop()
        assert (supervisor.running, supervisor.wanted()) == (False, False)
        assert not program.record.exists()
        await supervisor.run()  # ends at once
        assert not supervisor.running


async def test_before_start_runs_before_each_start(program: Program) -> None:
    cleared: list[int] = []
    async with supervised(
        replace(program, before_start=lambda: cleared.append(len(cleared)))
    ) as supervisor:
        await supervisor.start()
        async with running(supervisor):
            await supervisor.end()
            await until(lambda: supervisor.running)
    assert cleared == [0, 1]


async def test_a_program_that_does_not_exist_is_an_oserror(program: Program) -> None:
    async with supervised(replace(program, command=("/nowhere/program",))) as supervisor:
        with pytest.raises(FileNotFoundError):
            await supervisor.start()
        assert not supervisor.running


async def test_a_program_without_a_record_is_killed(program: Program, tmp_path: Path) -> None:
    """A child without a record would be an orphan for ever."""
    pid_file = tmp_path / "its-pid"
    (tmp_path / "file").write_text("in the way")
    command = ("sh", "-c", f"echo $$ > {pid_file}; exec sleep 60")
    unkept = replace(program, command=command, record=tmp_path / "file" / "pid")
    supervisor = Supervisor(unkept, SystemClock())
    with pytest.raises(OSError, match="file"):
        await supervisor.start()
    await until(lambda: not supervisor.running)
    if pid_file.exists() and pid_file.read_text().strip():
        pid = int(pid_file.read_text())
        await until(lambda: processes.find_running(pid) is None, what="the end of the orphan")
