"""Workers of a test run as forks of the process that has collected the tests: they are collected once.

It takes the place of xdist where forks are sound, with the same option, `--numprocesses`. A worker that dies fails the
test that it ran, and another one runs the rest of the file.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import pytest

from tests.support import forker
from tests.support.run_order import Unit, next_unit, units_of

_FORK = multiprocessing.get_context("fork")
_END_S = 10.0
_PR_SET_PDEATHSIG = 1
# Modules whose users need the process that forks commands.
_FORKING = {"tests.support.fleet", "tests.support.nodeagent_agents"}


@dataclass(slots=True, kw_only=True)
class Worker:
    """A fork, the unit that it runs, and the number of tests of the unit that it has begun."""

    number: int
    process: BaseProcess
    unit: Unit = field(default_factory=Unit)
    begun: int = 0


class ForkedWorkers:
    """Plugin that runs the collected tests in forks, and reports their results in this process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pending: list[Unit] = []
        self._workers: dict[Connection, Worker] = {}
        self._threads_before_collection = 0
        gc.disable()  # nothing of what collection imports is garbage

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        # Plugins may have imported numpy, whose threads end and start again around a fork, or wait for workers of xdist.
        self._threads_before_collection = _count_threads()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        # What was imported lives as long as the run, and no fork has to look at it again.
        gc.freeze()
        gc.enable()
        self._pending = units_of(session.items)
        if session.testsfailed or session.config.option.collectonly or len(self._pending) < 2:
            return None  # a single file runs in this process
        threads = _count_threads() - self._threads_before_collection
        if threads > 0:
            raise pytest.UsageError(
                f"{threads} threads run after collection, which forks do not have: "
                "a test module computes while it is imported. Let a fixture do it, or use -n0"
            )
        # One folder for all forks, which this process releases at its end: pytest then removes those of earlier runs.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        # Lines of single files would interleave.
        session.config.pluginmanager.getplugin("terminalreporter").showfspath = False
        if _FORKING & sys.modules.keys():
            forker.SHARED.start()  # its imports are three seconds of CPU for each worker
        try:
            for number in range(min(self._count, len(self._pending))):
                self._start(session, number)
            while self._workers:
                for connection in wait(list(self._workers)):
                    self._receive(session, cast(Connection, connection))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers.values():
                worker.process.terminate()
            for worker in self._workers.values():
                worker.process.join(_END_S)
                worker.process.kill()
            forker.SHARED.end()
        return True

    def _start(self, session: pytest.Session, number: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        process = _FORK.Process(target=_work, args=(session, number, theirs))
        process.start()
        theirs.close()
        self._workers[ours] = Worker(number=number, process=process)

    def _receive(self, session: pytest.Session, connection: Connection) -> None:
        """Follow one message of a worker: a test begins, a report, a request for the next unit, or its death."""
        worker, hook = self._workers[connection], session.config.hook
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            del self._workers[connection]
            worker.process.join()
            self._report_death(session, worker)
            return
        if message is None:
            worker.unit, worker.begun = Unit(), 0
            running = [other.unit for other in self._workers.values()]
            unit = next_unit(self._pending, running)
            worker.unit = unit or Unit()
            connection.send(unit and unit.items)
        elif message == "begin":
            worker.begun += 1
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=message)
            hook.pytest_runtest_logreport(report=report)

    def _report_death(self, session: pytest.Session, worker: Worker) -> None:
        """Fail the test that a dead worker ran, and have another worker run what remains of the unit."""
        if not worker.unit.items:
            return
        begun = max(worker.begun, 1)
        item = session.items[worker.unit.items[begun - 1]]
        session.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                item.nodeid, item.location, {}, "failed",
                f"worker {worker.number} ended with exit code {worker.process.exitcode} in this test",
                "call",
            )
        )  # fmt: skip
        rest = worker.unit.items[begun:]
        if rest:
            self._pending.insert(0, Unit(items=rest, waits=worker.unit.waits))
        if self._pending:
            self._start(session, worker.number)


class _Sender:
    """Plugin of a worker that sends its reports to the process that forked it."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def _work(session: pytest.Session, number: int, connection: Connection) -> None:
    """Run unit after unit of the collected tests, in a fork."""
    config = session.config
    # Its environment does not show the reaper that it belongs to the run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"gw{number}"
    factory._basetemp.mkdir(mode=0o700, exist_ok=True)
    # What it captures goes to files of its own, and what its terminal reporter writes to nobody.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(_Sender(config, connection))
    last = None
    while indices := _request_unit(connection):
        items = [session.items[index] for index in indices]
        # Between units only what belongs to the session stays: nobody knows yet which unit is next.
        for item, following in zip(items, [*items[1:], cast(pytest.Item, session)], strict=True):
            connection.send("begin")
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        last = items[-1]
    if last is not None:
        call = pytest.CallInfo.from_call(
            lambda: session._setupstate.teardown_exact(None), when="teardown"
        )
        report = last.ihook.pytest_runtest_makereport(item=last, call=call)
        if report.failed:
            config.hook.pytest_runtest_logreport(report=report)


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _request_unit(connection: Connection) -> Sequence[int]:
    connection.send(None)
    return connection.recv() or ()
