"""`fleetctl node reboot` over ssh, with a real etcd; the Mac's programs are small scripts, its agent is this test."""

import asyncio
import plistlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetctl.remote import ssh_flags
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import Node, NodeLease
from store import codec, keys, objects
from store.port import Delete, Put, Transport
from tests.support.agent_api import CLOCK, STATUS
from tests.support.fleet import Done, Fleet
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.mac_transcripts import CAPTURES
from tests.support.ssh_server import Answers, SshServer, ssh_server
from tests.support.waiting import until

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


@pytest.fixture
async def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SshServer]:
    """Return an ssh server whose `shutdown` and `fdesetup authrestart` write files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    async with ssh_server(tmp_path) as server:
        server.allow_sudo("free")
        tool(server, "shutdown", 'echo "$@" > "$HOME/RESTARTED"')
        tool(server, "vm_stat", 'cat "$HOME/VM_STAT"')
        wired(server, 262144)
        yield server


def tool(server: SshServer, name: str, script: str) -> None:
    path = server.home.parent / "tools" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def wired(server: SshServer, pages: int) -> None:
    captured = (CAPTURES / "vm_stat.txt").read_text()
    text = re.sub(r"(Pages wired down:) +\d+", rf"\1 {pages}", captured)
    (server.home / "VM_STAT").write_text(text)


async def node_there(
    transport: Transport, name: str, *, reason: str = "", session: str = "old"
) -> None:
    """Write what an agent writes: status and lease."""
    conditions: tuple[Condition, ...] = ()
    if reason:
        condition = Condition(
            type="NeedsReboot", status=ConditionStatus.TRUE, reason=reason, message="more than usual",
            last_transition_time=CLOCK.now(),
        )  # fmt: skip
        conditions = (condition,)
    status = STATUS.model_copy(
        update={"conditions": conditions, "hostname": name, "address": "10.0.0.9"}
    )
    puts = [
        Put(key=keys.status_key("Node", name), value=codec.encode(status)),
        Put(key=keys.node_lease_key(name), value=codec.encode(NodeLease(uid="u", session=session))),
    ]
    if await objects.get(transport, Node, name) is None:
        puts.append(codec.put_spec(Node(metadata=ObjectMeta(name=name, uid=name, generation=1))))
    await transport.commit([], puts)


async def restarted(
    server: SshServer, transport: Transport, name: str, *, reason: str = ""
) -> None:
    """Act as the Mac: it goes away once it is told to, and comes back with a new agent."""
    await until((server.home / "RESTARTED").exists, limit_s=60, what="the restart")
    await transport.commit([], [Delete(key=keys.node_lease_key(name))])
    wired(server, 131072)
    await node_there(transport, name, reason=reason, session="new")


async def reboot(fleet: Fleet, server: SshServer, name: str, *words: str) -> Done:
    etcd = ("--etcd", str(fleet.etcd.address))
    ssh = ("--target", f"{name}={server.target}", "--host-key", server.fingerprint)
    key = ("--identity", str(server.key_file))
    return await run_fleetctl("node", "reboot", name, *ssh, *key, *words, *etcd)


async def test_a_mac_is_drained_restarted_and_serves_again(
    shared: Fleet, transport: Transport, mac: SshServer
) -> None:
    await node_there(transport, "mac-1", reason="MemoryStranded")
    async with asyncio.TaskGroup() as group:
        group.create_task(restarted(mac, transport, "mac-1"))
        done = await reboot(shared, mac, "mac-1", "--drain", "--yes")
    assert done.code == 0, done.err + done.out
    assert (mac.home / "RESTARTED").read_text() == "-r now\n"
    assert done.out.splitlines()[-4:] == [
        "node/mac-1 drained",
        "node/mac-1 restarts",
        "node/mac-1 is back; wired memory: 4.0 GiB before, 2.0 GiB now",
        "node/mac-1 uncordoned",
    ]
    node = await objects.get(transport, Node, "mac-1")
    assert node is not None
    assert not node.spec.unschedulable
    assert not node.spec.draining


@pytest.mark.ci
async def test_a_mac_that_still_needs_a_restart_stays_drained(
    shared: Fleet, transport: Transport, mac: SshServer
) -> None:
    await node_there(transport, "mac-2", reason="MemoryStranded")
    async with asyncio.TaskGroup() as group:
        group.create_task(restarted(mac, transport, "mac-2", reason="MemoryStranded"))
        done = await reboot(shared, mac, "mac-2", "--drain", "--yes", "--timeout", "6s")
    assert done.code == 1
    assert "still needs a restart (MemoryStranded: more than usual)" in done.err
    node = await objects.get(transport, Node, "mac-2")
    assert node is not None
    assert node.spec.draining


async def test_file_vault_is_unlocked_once_with_the_password_of_a_person(
    shared: Fleet, transport: Transport, mac: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(
        mac, "fdesetup",
        'if [ "$1" = status ]; then echo "FileVault is On."; else echo "$@" > "$HOME/WORDS"; '
        'cat > "$HOME/ANSWER"; touch "$HOME/RESTARTED"; fi',
    )  # fmt: skip
    await node_there(transport, "mac-3")
    refused = await reboot(shared, mac, "mac-3", "--yes")
    assert refused.code == 1
    assert "FileVault is on" in refused.err
    assert "--leave-locked" in refused.err
    monkeypatch.setattr(ssh_flags, "find_prompts", lambda: Answers(password="s3cret"))
    async with asyncio.TaskGroup() as group:
        group.create_task(restarted(mac, transport, "mac-3"))
        done = await reboot(shared, mac, "mac-3", "--yes")
    assert done.code == 0, done.err
    assert (mac.home / "WORDS").read_text() == "authrestart -inputplist\n"
    answer = plistlib.loads((mac.home / "ANSWER").read_bytes())
    assert answer == {"Username": "admin", "Password": "s3cret"}
    assert "s3cret" not in done.out + done.err


async def test_the_mac_with_the_only_etcd_is_not_restarted(
    shared: Fleet, transport: Transport, mac: SshServer
) -> None:
    await node_there(transport, "mac-4")
    local = STATUS.model_copy(update={"address": "127.0.0.1"})
    await transport.commit(
        [], [Put(key=keys.status_key("Node", "mac-4"), value=codec.encode(local))]
    )
    done = await reboot(shared, mac, "mac-4", "--yes")
    assert done.code == 1
    assert "node/mac-4 runs the only member of etcd" in done.err
    assert not (mac.home / "RESTARTED").exists()
