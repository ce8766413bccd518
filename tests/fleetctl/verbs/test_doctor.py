"""The verb `fleetctl doctor` for this machine, and for one node through its agent."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetctl.services.layout import user_layout
from fleetctl.services.port import ServiceSpec
from fleetctl.services.systemd import SystemdServices
from machinery.clock import SystemClock
from machinery.http_server import AdminServer
from machinery.process_log import LogRing
from nodeagent.api.machine_doctor import MachineDoctor
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.server import make_app
from nodeagent.doctor.readers import CollectionScope
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeLease
from schemas.wire.findings import PATH
from store import codec, keys
from store.port import Put
from store.tickets import TicketChecker
from tests.support import service_stand_ins
from tests.support.agent_api import STATUS, Replicas
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.waiting import until_async

CLOCK = SystemClock()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep the checks away from the services of the user."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def levels(out: str) -> dict[str, str]:
    tree: dict[str, Any] = json.loads(out)
    return {one["check"]: one["level"] for one in tree["findings"]}


async def test_a_machine_is_examined_without_a_fleet_and_with_a_broken_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[[[")
    monkeypatch.setenv("FLEETCTL_CONFIG", str(config))
    assert (await run_fleetctl("get", "nodes")).code != 0  # others refuse it
    done = await run_fleetctl("doctor", "--local", "--models-dir", str(tmp_path), "-o", "json")
    assert (done.code, done.err) == (0, "")
    found = levels(done.out)
    assert found["models folder"] == found["service definition"] == "OK"
    assert "store" not in found


async def test_a_service_in_a_crash_loop_is_found_and_fails_the_command(
    home: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = user_layout("systemd", home, sys.platform).definitions
    units.mkdir(parents=True)
    state = short_folder / "state"
    service_stand_ins.install_tools(short_folder / "bin", state, units)
    monkeypatch.setenv("PATH", f"{short_folder / 'bin'}:{os.environ['PATH']}")
    services = SystemdServices(units, is_user=True)
    await services.install(
        ServiceSpec(
            name="nodeagent", command=("/bin/false",), log=home / "log", working_folder=home,
            python=Path(sys.executable),
        )
    )  # fmt: skip
    await services.start("nodeagent")

    async def has_restarted() -> bool:
        return ((await services.state("nodeagent")).restarts or 0) > 5

    try:
        await until_async(has_restarted, limit_s=60, what="six restarts")
        done = await run_fleetctl("doctor", "--local", "--models-dir", str(home), "-o", "json")
    finally:
        service_stand_ins.end_jobs(state)
    assert done.code == 1
    assert levels(done.out)["crash loop"] == "FAIL"
    assert json.loads(done.out)["ok"] is False


async def add_node(fleet: MemoryFleet, name: str, url: str) -> None:
    node = Node(metadata=ObjectMeta(name=name, uid=name))
    status = STATUS.model_copy(update={"agent_url": url})
    puts = [
        Put(key=keys.spec_key("Node", name), value=codec.encode(node)),
        Put(key=keys.status_key("Node", name), value=codec.encode(status)),
        Put(key=keys.node_lease_key(name), value=codec.encode(NodeLease(uid="u", session="s"))),
    ]
    await fleet.store.commit([], puts)


@asynccontextmanager
async def running_agent(
    fleet: MemoryFleet, name: str, folder: Path, *, examines: bool = True
) -> AsyncIterator[None]:
    """Run the API of an agent at the store in memory, with or without its doctor."""
    scope = CollectionScope(models_dir=folder, engine_folders=(folder / "engines",))
    view = AgentView(
        name=name, status=STATUS, clock=CLOCK, started_at=CLOCK.monotonic(), engines={}, replicas=Replicas({}),
        has_lease=lambda: True, folder=folder / "engines", ring=LogRing(),
    )  # fmt: skip
    doctor = MachineDoctor(view, scope, fleet.store) if examines else None
    changed = asyncio.Event()
    app = make_app(view, TicketChecker(fleet.store, CLOCK, f"Node/{name}"), doctor=doctor)
    server = AdminServer(app, CLOCK, ("127.0.0.1", 0), changed.set)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.run())
        await changed.wait()
        await add_node(fleet, name, server.url)
        yield
        running.cancel()


async def test_a_node_is_examined_by_its_agent(fleet: MemoryFleet, tmp_path: Path) -> None:
    async with running_agent(fleet, "mac-2", tmp_path):
        done = await fleet.ctl("doctor", "--node", "mac-2", "-o", "json")
        assert (done.code, done.err) == (0, "")
        found = json.loads(done.out)["findings"]
        assert {one["node"] for one in found} == {"mac-2"}
        assert levels(done.out)["stopped engines"] == "OK"
        table = await fleet.ctl("doctor", "--node", "mac-2")
        assert f" can list {tmp_path}\n" in table.out
        assert "OK    open files          node/mac-2: the agent may open " in table.out
    assert not (
        await fleet.store.list(keys.TICKET_PREFIX)
    ).items  # the ticket went with the command


async def test_a_node_that_does_not_exist_or_answer_is_an_error(fleet: MemoryFleet) -> None:
    await add_node(fleet, "mac-9", "http://127.0.0.1:1")
    away = await fleet.ctl("doctor", "--node", "mac-9")
    assert away.code == 1
    assert "FAIL  machine  node/mac-9 does not answer at http://127.0.0.1:1" in away.out
    unknown = await fleet.ctl("doctor", "--node", "mac-8")
    assert unknown.code == 1
    assert "mac-8" in unknown.err


async def test_the_fleets_doctor_asks_every_agent(fleet: MemoryFleet, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    async with (
        running_agent(fleet, "mac-1", missing),
        running_agent(fleet, "mac-2", missing),
        running_agent(fleet, "mac-3", tmp_path, examines=False),
    ):
        done = await fleet.ctl("doctor", "-o", "json")
    found = json.loads(done.out)["findings"]
    folders = [one for one in found if one["check"] == "models folder"]
    assert [folder["node"] for folder in folders] == ["mac-1"]
    assert folders[0]["message"] == f"{missing} does not exist (also on mac-2)"
    machines = [(one["level"], one["message"]) for one in found if one["check"] == "machines"]
    assert machines[0] == (
        "UNKNOWN",
        "1 machine was not examined: node/mac-3: mac-3: this agent does not examine its machine",
    )
    assert machines[1] == ("OK", "2 agents examined their machines")


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        (b'[{"check": "x", "level": "GREAT", "message": ""}]', "malformed at '0.level'"),
        (b'[{"check": "x", "level": "FAIL", "message": "\\u001b[31mred"}]', "node/mac-7: "),
    ],
)
async def test_an_agent_that_sends_nonsense_harms_nobody(
    fleet: MemoryFleet, document: bytes, shown: str
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=document)

    app = web.Application()
    app.router.add_get(PATH, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        await add_node(fleet, "mac-7", f"http://{host}:{port}")
        done = await fleet.ctl("doctor", "--node", "mac-7")
    finally:
        await runner.cleanup()
    assert done.code == 1
    assert shown in done.out
    assert "\x1b" not in done.out
