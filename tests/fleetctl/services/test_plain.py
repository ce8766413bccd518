"""The supervisor of plain services survives what programs do, and programs survive it."""

import os
import signal
from pathlib import Path

import pytest

from fleetctl.services.plain import PlainFiles
from fleetctl.services.port import ServiceError
from machinery import processes
from tests.fleetctl.services.conftest import Bench
from tests.support.waiting import until, until_async

plain = pytest.mark.parametrize("bench", ["plain"], indirect=True)


@plain
async def test_a_program_survives_its_supervisor_and_is_adopted(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    state = await bench.services.state("nodeagent")
    assert state.pid is not None
    assert state.note == ""
    files = PlainFiles(bench.definitions, "nodeagent")
    supervisor = processes.adopt(files.supervisor)
    assert supervisor is not None
    os.kill(supervisor.record.pid, signal.SIGKILL)
    await until(lambda: not files.is_supervised())

    lost = await bench.services.state("nodeagent")
    assert lost.pid == state.pid
    assert lost.note == (
        "its supervisor is gone, so nothing restarts it; run `fleetctl service start nodeagent`"
    )
    await bench.services.start("nodeagent")
    adopted = await bench.services.state("nodeagent")
    assert (adopted.pid, adopted.note) == (state.pid, "")

    os.kill(state.pid, signal.SIGKILL)

    async def restarted() -> bool:
        pid = (await bench.services.state("nodeagent")).pid
        return pid not in (None, state.pid)

    await until_async(restarted)


@plain
async def test_stop_ends_a_program_without_a_supervisor(bench: Bench) -> None:
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    files = PlainFiles(bench.definitions, "nodeagent")
    supervisor, program = processes.adopt(files.supervisor), processes.adopt(files.program)
    assert supervisor is not None
    assert program is not None
    os.kill(supervisor.record.pid, signal.SIGKILL)
    await until(lambda: not files.is_supervised())
    await bench.services.stop("nodeagent")
    assert not program.running()


@plain
async def test_a_program_that_does_not_exist_is_reported(bench: Bench) -> None:
    await bench.services.install(bench.spec(command=("/nowhere/fleet-nodeagent",)))
    with pytest.raises(ServiceError, match=r"No such file or directory: /nowhere/fleet-nodeagent"):
        await bench.services.start("nodeagent")


@plain
async def test_a_damaged_definition_is_reported(bench: Bench) -> None:
    PlainFiles(bench.definitions, "nodeagent").definition.write_text("{}")
    with pytest.raises(ServiceError, match="is no definition of a service"):
        await bench.services.start("nodeagent")


@plain
async def test_secrets_of_the_caller_do_not_reach_a_program(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_ETCD_PASSWORD", "hunter2")
    monkeypatch.setenv("FLEET_ETCD", "http://another-fleet:2379")
    await bench.services.install(bench.spec())
    await bench.services.start("nodeagent")
    pid = (await bench.services.state("nodeagent")).pid
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"FLEET_" not in environment
    assert b'WITH=a "b" $c 100%' in environment
