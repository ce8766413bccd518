"""The contract of `Services`, which launchd and systemd keep alike."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from fleetctl.services.port import ServiceError, ServiceState
from tests.fleetctl.services.conftest import Bench
from tests.support.waiting import until, until_async


async def running(bench: Bench, *, other_than: int | None = None) -> int:
    """Wait until the program runs, and return its process."""

    async def found() -> int | None:
        pid = (await bench.services.state("nodeagent")).pid
        return pid if pid != other_than else None

    return await until_async(found, what="a running program")


async def test_a_service_that_was_never_installed_is_no_error(bench: Bench) -> None:
    assert await bench.services.state("nodeagent") == ServiceState(
        restarts=(await bench.services.state("nodeagent")).restarts
    )
    await bench.services.stop("nodeagent")
    await bench.services.remove("nodeagent")
    with pytest.raises(ServiceError, match="nodeagent is not installed"):
        await bench.services.start("nodeagent")
    assert list(bench.definitions.iterdir()) == []


@pytest.mark.ci
async def test_a_service_lives_from_install_to_remove(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    state = await bench.services.state("nodeagent")
    assert (state.is_installed, state.pid) == (True, None)
    await bench.services.start("nodeagent")
    pid = await running(bench)
    await until(lambda: bench.words == "first")
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    assert (await bench.services.state("nodeagent")).pid == pid, "same definition, same process"

    await bench.services.stop("nodeagent")
    await bench.services.stop("nodeagent")
    assert not Path(f"/proc/{pid}").exists()
    assert (await bench.services.state("nodeagent")).pid is None
    await bench.services.start("nodeagent")
    await running(bench, other_than=pid)

    await bench.services.remove("nodeagent")
    await bench.services.remove("nodeagent")
    assert not (await bench.services.state("nodeagent")).is_installed
    assert list(bench.definitions.iterdir()) == []


async def test_a_killed_program_is_started_again(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    first = await running(bench)
    os.kill(first, signal.SIGKILL)
    second = await running(bench, other_than=first)
    assert second != first


@pytest.mark.full
async def test_another_definition_replaces_the_running_program(bench: Bench) -> None:
    await bench.services.install(bench.spec("first"))
    await bench.services.start("nodeagent")
    first = await running(bench)
    await bench.services.install(bench.spec("second"))
    assert not Path(f"/proc/{first}").exists()
    await bench.services.start("nodeagent")
    await until(lambda: bench.words == "second")


@pytest.mark.ci
async def test_engines_survive_a_restart_of_their_agent(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    first = await running(bench)
    engine = await until(lambda: bench.engine, what="an engine")
    os.kill(first, signal.SIGKILL)
    second = await running(bench, other_than=first)
    await bench.services.stop("nodeagent")
    assert bench.engine == engine
    await bench.services.install(bench.spec("second"))
    await bench.services.start("nodeagent")
    await running(bench, other_than=second)
    await until(lambda: bench.words == "second")
    await bench.services.remove("nodeagent")
    assert bench.engine == engine


@pytest.mark.full
async def test_simultaneous_starts_run_one_program(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(bench.services.start("nodeagent"))
    pid = await running(bench)
    await bench.services.stop("nodeagent")
    assert not Path(f"/proc/{pid}").exists()
    paths = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(bench.folder).encode() in _content(path)
    ]
    assert paths == []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
