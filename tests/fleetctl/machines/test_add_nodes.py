"""Tests of adding several machines: each ends for itself, and every line says what to do."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import click
import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.machines.add_nodes import NodeAdder, read_hosts
from fleetctl.machines.fleet_access import FleetAccess
from fleetctl.machines.setup import SetupOptions
from machinery.clock import SystemClock
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.memory import MemoryTransport
from tests.support.ports import free_port
from tests.support.ssh_server import SshServer, ssh_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[SshServer]:
    async with ssh_server(tmp_path) as running:
        yield running


def adder(server: SshServer, said: list[str]) -> NodeAdder:
    clock = SystemClock()
    fleet = FleetAccess(
        transport=MemoryTransport(clock), clock=clock, fleet="f00d", addresses=("127.0.0.1:1",)
    )
    return NodeAdder(
        fleet=fleet,
        policy=server.policy(),
        options=SetupOptions(release=None),
        clock=clock,
        say=said.append,
    )


async def test_every_machine_gets_one_line_and_failures_stop_no_other(server: SshServer) -> None:
    server.allow_sudo("free")
    said: list[str] = []
    closed = replace(server.target, port=free_port())
    reached, away = await adder(server, said).add_all([server.target, closed])
    assert (reached.step, away.step) == (4, 1)
    assert len(said) == 2
    assert "127.0.0.1: step 1 of 11 (reach the machine) failed: cannot reach" in away.text
    assert "step 4 of 11 (preflight) failed" in reached.text
    assert "--allow-linux" in reached.text


async def test_one_machine_says_each_step(server: SshServer) -> None:
    server.allow_sudo("")
    said: list[str] = []
    (outcome,) = await adder(server, said).add_all([server.target])
    assert said[0] == " 1/11  reach the machine: ok"
    assert said[1] == outcome.text
    assert "step 2 of 11 (become root) failed" in outcome.text
    assert list(server.home.iterdir()) == [server.home / "SUDO"]


@pytest.mark.ci
async def test_eight_machines_are_set_up_at_a_time(server: SshServer) -> None:
    server.allow_sudo("free")
    outcomes = await adder(server, []).add_all([server.target] * 20)
    assert [outcome.step for outcome in outcomes] == [4] * 20
    assert 1 < server.most_commands <= 8


async def test_a_store_that_is_away_is_a_failed_step_and_no_traceback(server: SshServer) -> None:
    server.allow_sudo("free")
    plain = adder(server, [])
    transport = connect(EtcdAddress(endpoints=(f"http://127.0.0.1:{free_port()}",)))
    away = replace(plain, fleet=replace(plain.fleet, transport=transport))
    try:
        (outcome,) = await away.add_all([server.target])
    finally:
        await transport.close()
    assert outcome.step == 4
    assert "Is the fleet up?" in outcome.text


def test_a_file_of_hosts_has_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the rack\nme@mac-1.local\n\nme@mac-2.local:2222   # the new one\n")
    assert [str(host) for host in read_hosts(path)] == ["me@mac-1.local", "me@mac-2.local:2222"]
    path.write_text("me@mac-1.local\nmac-2\n")
    with pytest.raises(click.UsageError, match="'mac-2': expected user@host"):
        read_hosts(path)
    with pytest.raises(FleetctlError, match="--hosts"):
        read_hosts(tmp_path / "none")
