"""`fleetctl node unlock` against a Mac that is locked as macOS 26 is; its agent is this test."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetctl.remote import ssh_flags
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeLease
from store import codec, keys
from store.port import Put, Transport
from tests.support.agent_api import STATUS
from tests.support.fleet import Done, Fleet
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.ssh_server import Answers, SshServer, ssh_server
from tests.support.waiting import until

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]
PASSWORD = "s3cret horse"


@pytest.fixture
async def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SshServer]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_flags, "find_prompts", lambda: Answers(password=PASSWORD))
    async with ssh_server(tmp_path) as server:
        server.locked_with = PASSWORD
        yield server


async def node_there(transport: Transport, name: str) -> None:
    node = Node(metadata=ObjectMeta(name=name, uid=name, generation=1))
    status = Put(key=keys.status_key("Node", name), value=codec.encode(STATUS))
    await transport.commit([], [codec.put_spec(node), status])


async def agent_starts(server: SshServer, transport: Transport, name: str) -> None:
    """Act as the Mac: its agent gets a lease once the disk is unlocked."""
    await until(lambda: not server.locked_with, limit_s=60, what="the password")
    lease = codec.encode(NodeLease(uid="u", session="new"))
    await transport.commit([], [Put(key=keys.node_lease_key(name), value=lease)])


async def unlock(fleet: Fleet, server: SshServer, name: str, *words: str) -> Done:
    ssh = ("--target", f"{name}={server.target}", "--host-key", server.fingerprint)
    key = ("--identity", str(server.key_file))
    etcd = ("--etcd", str(fleet.etcd.address))
    return await run_fleetctl("node", "unlock", name, *ssh, *key, *words, *etcd)


@pytest.mark.parametrize(
    ("is_silent", "words"),
    [
        pytest.param(False, "127.0.0.1 is unlocked, and starts its services", id="it says so"),
        pytest.param(
            True, "127.0.0.1 ended the connection after the password", id="it says nothing"
        ),
    ],
)
async def test_a_locked_mac_takes_the_password_and_comes_back(
    shared: Fleet, transport: Transport, mac: SshServer, words: str,
    caplog: pytest.LogCaptureFixture, *, is_silent: bool,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    name = f"locked-{is_silent:d}"
    mac.is_silent = is_silent
    await node_there(transport, name)
    async with asyncio.TaskGroup() as group:
        group.create_task(agent_starts(mac, transport, name))
        done = await unlock(shared, mac, name)
    assert done.code == 0, done.err
    first, last = done.out.splitlines()
    assert first.startswith(words)
    assert last == f"node/{name} is back"
    assert mac.attempts == [PASSWORD]
    assert PASSWORD not in done.out + done.err + caplog.text
    assert "asyncssh" in caplog.text
    again = await unlock(shared, mac, name)
    assert again.out == f"node/{name} is not locked: its agent holds a lease\n"


async def test_what_cannot_be_unlocked_is_named(
    shared: Fleet, transport: Transport, mac: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node_there(transport, "locked-2")
    mac.locked_with = "another"
    done = await unlock(shared, mac, "locked-2")
    assert done.code == 1
    assert "127.0.0.1 refuses the password of admin" in done.err
    assert mac.attempts == [PASSWORD], "macOS counts wrong passwords"
    mac.locked_with, mac.password = "", PASSWORD
    done = await unlock(shared, mac, "locked-2", "--timeout", "1s")
    assert done.code == 1
    assert "127.0.0.1 was not locked: it lets admin in" in done.out
    assert "node/locked-2: its agent holds no lease" in done.err
    monkeypatch.setattr(ssh_flags, "find_prompts", lambda: None)
    done = await unlock(shared, mac, "locked-2")
    assert "run this in a terminal" in done.err
