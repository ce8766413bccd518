"""Facts of this very machine: failures that can be made real on Linux are made real."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from nodeagent.doctor import checks, collector, process_facts
from nodeagent.doctor.host_facts import HostFacts
from nodeagent.doctor.readers import AgentKnowledge, CollectionScope, in_thread, read_bounded
from nodeagent.engines import engine_logs
from schemas.wire.engine_config import EngineIdentity
from schemas.wire.findings import Finding
from tests.support.ports import free_port

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux has these readers")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
CLOCK = SystemClock()


def of(facts: HostFacts, check: str) -> list[Finding]:
    return [finding for finding in checks.run_checks(facts) if finding.check == check]


@contextmanager
def started(*argv: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block; it has printed a line when the block begins."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=cwd)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


LISTEN = (
    "import socket, sys, time\n"
    "s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "print('listening', flush=True)\n"
    "time.sleep(600)\n"
)
SLEEP = "import time; print('runs', flush=True); time.sleep(600)"


def engine_argv(port: int) -> tuple[str, ...]:
    """Return the command line of a process that is an engine to its agent."""
    identity = EngineIdentity(replica="tiny-0", model="tiny", url=f"http://127.0.0.1:{port}")
    return (sys.executable, "-c", SLEEP, "-m", "engine", *identity.to_argv())


@linux
async def test_a_port_that_another_program_took_is_named(tmp_path: Path) -> None:
    port = free_port()
    scope = CollectionScope(models_dir=tmp_path, engine_ports=range(port, port + 1))
    [free] = of(await collector.collect_facts(scope, CLOCK), "ports")
    assert free.level == "OK"
    with started(sys.executable, "-c", LISTEN, str(port)) as other:
        [taken] = of(await collector.collect_facts(scope, CLOCK), "ports")
    assert taken.level == "FAIL"  # it was the only port
    assert f"{port} by python" in taken.message
    assert f"(pid {other.pid})" in taken.message


@linux
async def test_our_own_port_is_not_taken(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        scope = CollectionScope(models_dir=tmp_path, api_port=port)
        facts = await collector.collect_facts(scope, CLOCK)
    assert facts.listeners is not None
    assert [listener.is_fleet for listener in facts.listeners] == [True]
    assert [finding.level for finding in of(facts, "ports")] == ["OK"]


async def test_an_engine_that_its_agent_does_not_know_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "engines" / "tiny-0"
    folder.mkdir(parents=True)
    known: list[int] = []

    async def nothing() -> dict[str, int | None]:
        return {}

    async def nobody() -> list[tuple[str, int]]:
        return []

    agent = AgentKnowledge(engine_pids=lambda: known, in_flight=nothing, neighbours=nobody)
    scope = CollectionScope(models_dir=tmp_path, engine_folders=(folder.parent,), agent=agent)
    with started(*engine_argv(4107), cwd=folder) as engine:
        [orphan] = of(await collector.collect_facts(scope, CLOCK), "stopped engines")
        known.append(engine.pid)
        [well] = of(await collector.collect_facts(scope, CLOCK), "stopped engines")
    assert orphan.level == "FAIL"
    assert orphan.message.startswith(
        "an engine of replica/tiny-0 still runs on port 4107 and holds "
    )
    assert orphan.advice == f"kill {engine.pid}"
    assert orphan.since is not None
    assert (well.level, well.message) == ("OK", "1 engine runs, and the agent knows all of them")


OOM = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"


async def test_the_logs_of_the_last_two_runs_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "engines" / "tiny-0"
    folder.mkdir(parents=True)

    def run(text: str) -> None:
        with engine_logs.new_run(folder).open("a") as log:
            log.write(text)

    async def levels() -> list[str]:
        scope = CollectionScope(models_dir=tmp_path, engine_folders=(folder.parent,))
        return [
            finding.level
            for finding in of(await collector.collect_facts(scope, CLOCK), "memory kills")
        ]

    run(f"loading\n{OOM}\n")
    assert await levels() == ["FAIL"]
    run("loading\nserves\n")
    assert await levels() == ["WARN"]  # the run before the last one
    run("loading\nserves\n")
    assert await levels() == ["OK"]


CHILD = """
import asyncio, os, resource, sys
from pathlib import Path
folder, user, files = sys.argv[1:]
import nodeagent.doctor.collector as collector
from nodeagent.doctor.checks import run_checks
from nodeagent.doctor.readers import CollectionScope
from machinery.clock import SystemClock
if int(files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
if int(user):
    os.setuid(int(user))
facts = asyncio.run(collector.collect_facts(CollectionScope(models_dir=Path(folder)), SystemClock()))
for one in run_checks(facts):
    print(one.check, one.level, one.message, sep="|")
"""


def examined(folder: Path, *, user: int = 0, files: int = 0) -> dict[str, list[str]]:
    """Return level and message by check, as a child process with other rights sees them."""
    done = subprocess.run(
        (sys.executable, "-c", CHILD, str(folder), str(user), str(files)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}


@linux
def test_a_low_limit_of_open_files_is_that_of_the_process(tmp_path: Path) -> None:
    level, message = examined(tmp_path, files=256)["open files"]
    assert (level, message) == (
        "FAIL",
        "a program started from this shell may open 256 files at most; an engine needs 4096",
    )


@pytest.mark.ci
@linux
@as_root
def test_a_folder_that_the_user_of_the_process_may_not_list(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir(mode=0o700)
    assert examined(folder)["models folder"][0] == "OK"
    level, message = examined(folder, user=65534)["models folder"]
    assert level == "FAIL"
    assert f"cannot list {folder}: the system refuses it (EACCES: Permission denied)" in message


async def test_a_reader_that_hangs_or_fails_is_unknown_and_holds_up_nobody() -> None:
    never = threading.Event()

    async def fine() -> str:
        return "read"

    def fails() -> str:
        raise PermissionError(1, "Operation not permitted")

    hanging, failed, read = await asyncio.gather(
        read_bounded("hangs", lambda: in_thread(never.wait), limit_s=0.2),
        read_bounded("fails", lambda: in_thread(fails)),
        read_bounded("fine", fine),
    )
    never.set()
    assert (hanging, failed, read) == (None, None, "read")


def test_a_command_line_of_an_agent_is_the_fleets() -> None:
    assert process_facts.is_fleet(("/opt/bin/python", "/opt/bin/fleet-nodeagent", "--etcd", "x"))
    assert process_facts.is_fleet(("python", "-m", "nodeagent", "--etcd", "x"))
    assert process_facts.is_fleet(engine_argv(4100))
    assert not process_facts.is_fleet(("ollama", "serve"))


async def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    scope = CollectionScope(models_dir=tmp_path / "none")
    [finding] = of(await collector.collect_facts(scope, CLOCK), "models folder")
    assert (finding.level, finding.advice) == ("WARN", f"mkdir -p {tmp_path / 'none'}")
