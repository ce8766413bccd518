"""The verbs `fleetctl up` and `down`, also after kills and interruptions."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import click
import psutil
import pytest

from fleetctl.fleets import local_programs
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.verbs import up as up_verb
from machinery import processes
from nodeagent import __main__ as nodeagent_main
from nodeagent.engines.engine_processes import EngineProcess, find_engines
from tests.support.fleet import Done, engine_port, fleetctl
from tests.support.ports import free_port
from tests.support.store_certificates import Authority
from tests.support.streams import Stream, stream
from tests.support.waiting import until

MANIFEST = b"""
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: tiny}
spec: {model: {path: tiny}, contextLength: 512}
"""


async def up(folder: Path, models: Path, port: int, *flags: str) -> Done:
    words = ("--data-dir", str(folder), "--models-dir", str(models), "--port", str(port))
    engines = ("--engine-port", str(engine_port()), "--dashboard-port", "0")
    return await fleetctl("up", "--detach", *words, *engines, *flags, limit_s=120)


async def on(folder: Path, *words: str, stdin: bytes = b"") -> Done:
    return await fleetctl(*words, "--data-dir", str(folder), stdin=stdin)


def supervisor(folder: Path) -> int:
    return int(json.loads((folder / "fleet.json").read_text())["pid"])


def pids(folder: Path) -> dict[str, int]:
    """Return the pid of each recorded process that runs."""
    records = {path.stem: processes.load_record(path) for path in (folder / "run").glob("*.pid")}
    return {n: r.pid for n, r in records.items() if r is not None and processes.is_running(r)}


@pytest.mark.parametrize(
    ("words", "command", "printed"),
    [
        ("", "--nodes 3 --port 4750 --no-dashboard",
         "flags of the last start: --nodes 3 --port 4750 --no-dashboard (--reset drops them)\n"),
        ("--port 4000 --join 10.0.0.5 --dashboard-port 4009",
         "--nodes 3 --join 10.0.0.5 --dashboard-port 4009",
         "flags of the last start: --nodes 3 (--reset drops them)\n"
         "changed since the last start: --join 10.0.0.5, --port 4000 (was 4750), "
         "--dashboard-port 4009 (was 4003)\n"),
        ("--reset --nodes 2", "--nodes 2", ""),
    ],
    ids=["kept", "changed", "reset"],
)  # fmt: skip
def test_a_later_start_keeps_the_flags_that_it_does_not_give(
    tmp_path: Path, words: str, command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DataDir(tmp_path).write(
        FleetRecord(
            layout_version=1, gateway_url="", pid=1, is_ready=True,
            flags={"nodes": 3, "port": 4750, "no_dashboard": True, "of_a_later_release": 1},
        )
    )  # fmt: skip
    with up_verb.up.make_context("up", words.split()) as context:
        given = {**context.params, "data_dir": tmp_path}
        flags, options = up_verb.keep_flags(context, given)
        found = up_verb.flag_words(up_verb.up, options)
    assert capsys.readouterr().err == printed
    changed = up_verb.flag_words(up_verb.up, {**dict.fromkeys(options), **flags})
    assert changed == command.split()
    # A process that starts with these words alone gets the same options.
    with up_verb.up.make_context("up", ["--reset", *found]) as context:
        again = {**context.params, "data_dir": tmp_path}
        assert up_verb.keep_flags(context, again)[0] == flags


def test_the_gateway_gets_the_flags_for_https(tmp_path: Path) -> None:
    files = Authority(tmp_path, "ours").issue("gateway")
    given = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    with up_verb.up.make_context("up", ["--host", "0.0.0.0", *given]) as context:
        options = {**context.params, "data_dir": tmp_path}
        settings = up_verb.build_settings(options, {})
    assert settings.gateway_url == "https://0.0.0.0:4000"
    command = " ".join(local_programs.gateway_program(settings, "unix:/s").command)
    assert " ".join(given) in command


def test_no_announce_reaches_the_processes(tmp_path: Path) -> None:
    given = ["--join", "127.0.0.1", "--no-announce"]
    with up_verb.up.make_context("up", given) as context:
        settings = up_verb.build_settings({**context.params, "data_dir": tmp_path}, {})
        assert "--no-announce" in up_verb.flag_words(up_verb.up, context.params)
    for make in (local_programs.gateway_program, local_programs.reconciler_program):
        assert "--no-announce" in make(settings, "unix:/s").command


CAFFEINATE = """#!/bin/sh
echo "$@" >> "{folder}/calls"
echo $$ >> "{folder}/pids"
while kill -0 "$4"; do sleep 0.02; done
"""


def awake(folder: Path) -> int:
    """Return the number of stand-ins for caffeinate that run."""
    return sum(psutil.pid_exists(int(pid)) for pid in (folder / "pids").read_text().split())


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.timeout(240)
async def test_a_killed_fleet_is_adopted_and_stopped(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = tmp_path / "data", free_port()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "caffeinate").write_text(CAFFEINATE.format(folder=tools))
    (tools / "caffeinate").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    try:
        done = await up(folder, models_dir, port, "--nodes", "2")
        assert done.code == 0, done.err
        assert done.out.splitlines() == [
            f"fleet ready: http://127.0.0.1:{port}/v1",
            'Switched to context "local-data".',
            f"stop it with: fleetctl down --data-dir {folder}",
        ]
        monkeypatch.delenv("FLEET_DATA_DIR")
        same = await fleetctl("get", "nodes", "--no-headers")
        assert same.out.startswith("node-1"), same.err
        nodes = await on(folder, "get", "nodes", "--no-headers")
        rows = [line.split()[:2] for line in nodes.out.splitlines()]
        assert rows == [["node-1", "Ready"], ["node-2", "Ready"]]
        second = await up(folder, models_dir, port)
        assert second.code == 1
        assert "already runs" in second.err
        assert (tools / "calls").read_text() == f"-i -s -w {supervisor(folder)}\n"
        assert awake(tools) == 1
        applied = await on(folder, "apply", "-f", "-", stdin=MANIFEST)
        assert applied.code == 0, applied.err
        waited = await on(folder, "wait", "md/tiny", "--for=condition=Available", "--timeout=60s")
        assert waited.code == 0, waited.err

        # No web page and no other user reaches an engine.
        (engine,) = engines(folder)
        assert engine.address.socket.endswith(".sock")
        assert psutil.Process(engine.child.record.pid).net_connections("inet") == []
        endpoints = await on(folder, "get", "endpoints", "--no-headers")
        assert f" {engine.address.url} " in endpoints.out
        checked = await on(folder, "doctor")
        assert "1 of 1 engines answer" in checked.out, checked.out

        # The data folder names the gateway, so the store is not needed.
        asked = await on(folder, "chat", "tiny", "-m", "x", "--max-tokens", "4")
        assert (asked.code, asked.out.endswith("\n")) == (0, True), asked.err

        before = pids(folder)
        os.kill(before["reconciler"], signal.SIGKILL)
        await until(lambda: pids(folder).get("reconciler") not in (None, before["reconciler"]))

        etcd = processes.load_record(folder / "etcd" / "etcd.pid")
        assert etcd is not None
        os.kill(etcd.pid, signal.SIGKILL)
        again = await on(folder, "wait", "md/tiny", "--for=condition=Available", "--timeout=30s")
        assert again.code == 0, again.err

        before = pids(folder)
        os.kill(supervisor(folder), signal.SIGKILL)
        one = Stream()
        await stream(f"http://127.0.0.1:{port}", "tiny", "x", max_tokens=4, into=one)
        assert one.succeeded, one.error
        await until(lambda: awake(tools) == 0, what="the end of caffeinate")
        again = await fleetctl("up", "--detach", "--data-dir", str(folder), limit_s=120)
        assert again.code == 0, again.err
        assert f"flags of the last start: --nodes 2 --port {port} " in again.err
        assert again.out.startswith(f"fleet ready: http://127.0.0.1:{port}/v1")
        assert pids(folder) == {**before, **pids(folder)}, "what ran was not adopted"
        assert awake(tools) == 1
    finally:
        down = await on(folder, "down")
    assert (down.code, down.out) == (0, "stopped\n")
    assert pids(folder) == {}
    assert engines(folder) == []
    await until(lambda: awake(tools) == 0, what="the end of caffeinate")
    nothing = await on(folder, "down")
    assert nothing.out.startswith("no fleet runs in")


def engines(folder: Path) -> list[EngineProcess]:
    engine_processes: list[EngineProcess] = []
    for node in (folder / "nodes").glob("*"):
        engine_processes += find_engines(node / "engines")
    return engine_processes


@pytest.mark.full
@pytest.mark.fleet
@pytest.mark.timeout(120)
async def test_down_stops_orphaned_processes(tmp_path: Path, models_dir: Path) -> None:
    folder = tmp_path / "a folder, with blanks"
    done = await up(folder, models_dir, free_port())
    assert done.code == 0, done.err
    os.kill(supervisor(folder), signal.SIGKILL)
    down = await on(folder, "down")
    assert (down.code, down.out) == (0, "stopped\n")
    assert pids(folder) == {}


@pytest.mark.full
@pytest.mark.fleet
@pytest.mark.timeout(120)
async def test_an_interrupted_start_leaves_nothing_behind(tmp_path: Path, models_dir: Path) -> None:
    """Ctrl-C before the fleet is ready leaves no process behind."""
    folder = tmp_path / "data"
    words = ("up", "--detach", "--data-dir", str(folder), "--port", str(free_port()))
    starting = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *words), stderr=asyncio.subprocess.PIPE
    )
    await until(lambda: "reconciler" in pids(folder), limit_s=30, what="a reconciler")
    starting.send_signal(signal.SIGINT)
    await starting.communicate()
    assert starting.returncode not in (0, None)
    assert pids(folder) == {}
    assert processes.adopt(folder / "etcd" / "etcd.pid") is None


@pytest.mark.full
@pytest.mark.fleet
@pytest.mark.timeout(180)
async def test_of_two_concurrent_starts_one_fleet_remains(tmp_path: Path, models_dir: Path) -> None:
    """The second start is refused, and does not stop the first."""
    folder = tmp_path / "data"
    try:
        async with asyncio.TaskGroup() as group:
            both = [
                group.create_task(up(folder, models_dir, free_port(), "--nodes", "1"))
                for _ in range(2)
            ]
        first, second = sorted((task.result() for task in both), key=lambda done: done.code)
        assert (first.code, second.code) == (0, 1), (first, second)
        assert "already runs" in second.err
        nodes = await on(folder, "wait", "node/node-1", "--for=condition=Ready", "--timeout=30s")
        assert nodes.code == 0, nodes.err
        assert set(pids(folder)) == {"dashboard", "gateway", "node-1", "reconciler"}
    finally:
        await on(folder, "down")


def test_a_model_of_up_is_found_by_an_agent_and_vice_versa() -> None:
    defaults = {
        parameter.get_default(click.Context(command))
        for command in (up_verb.up, nodeagent_main.main)
        for parameter in command.params
        if parameter.name == "models_dir"
    }
    assert defaults == {Path("~/models")}


@pytest.mark.ci
@pytest.mark.timeout(180)
async def test_an_occupied_gateway_port_is_refused_and_one_of_a_dashboard_warned_of(
    tmp_path: Path,
) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = await up(tmp_path / "data", tmp_path, port, "--dashboard-port", str(port))
    said = (tmp_path / "data" / "logs" / "up.log").read_text()
    assert re.search(rf"dashboard waits for port {port}: .*--dashboard-port", said)
    assert done.code == 1
    assert f"port {port} on 127.0.0.1" in done.err
    assert "--port" in done.err
    assert pids(tmp_path / "data") == {}


@pytest.mark.ci
@pytest.mark.timeout(180)
async def test_a_binary_that_is_not_etcd_is_refused(tmp_path: Path) -> None:
    done = await fleetctl("up", "--data-dir", str(tmp_path / "d"), "--etcd-binary", "/bin/true")
    assert done.code == 1
    assert "/bin/true" in done.err
