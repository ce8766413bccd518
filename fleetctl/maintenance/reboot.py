"""Restarts one Mac: what is read before, the restart over ssh, and the wait until it serves again."""

import asyncio
import plistlib
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.fleet_watch import FleetWatch, NotReadyError
from fleetctl.maintenance.reboot_plan import (
    EtcdMember,
    GroupMate,
    RebootFacts,
    hosts_of_urls,
    parse_file_vault,
)
from fleetctl.remote.errors import RemoteError, UnreachableHostError
from fleetctl.remote.prompts import Prompts
from fleetctl.remote.session import RemoteMac
from identity.dialer import is_local
from machinery import macos_commands
from nodeagent.hardware.macos import parse_mac_memory
from schemas.meta import ConditionStatus, find_condition
from schemas.node import Node, NodeLease, NodeStatus
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup
from store import codec, keys, object_trees, objects
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import MaintenanceClient
from store.etcd.member.membership import ClusterClient
from store.port import Transport

_MEMBER_S: Final = 5.0
# An agent's lease lives for 4 s, and a Mac takes up to a minute to end its programs.
_DOWN_S: Final = 180.0
# `sh` answers 127 where there is no such program.
_FILE_VAULT: Final = (
    "/bin/sh",
    "-c",
    "command -v fdesetup >/dev/null || exit 127; fdesetup status",
)
_RESTART: Final = ("/bin/sh", "-c", "PATH=$PATH:/sbin:/usr/sbin exec shutdown -r now")


async def read_facts(
    transport: Transport, node: Node, etcd: EtcdAddress, mac: RemoteMac, *, can_unlock: bool
) -> RebootFacts:
    """Return what depends on a Mac. Raises StoreError, RemoteError."""
    status = node.status
    # A loopback address is a forwarded port.
    hosts = {node.name, "" if is_local(f"ssh://{mac.target}") else mac.target.host}
    if status is not None:
        hosts |= {status.address, status.hostname, *(i.address for i in status.fabric.interfaces)}
    vault = await mac.run(_FILE_VAULT)
    return RebootFacts(
        node=node.name,
        hosts=frozenset(host.lower() for host in hosts if host),
        mates=await _mates(transport, node),
        members=await _members(etcd),
        replicas=await replicas_on(transport, node.name),
        file_vault=parse_file_vault(vault.code, vault.out),
        can_unlock=can_unlock,
    )


async def replicas_on(transport: Transport, node: str) -> tuple[str, ...]:
    """Return the replicas with a rank on a node. Raises StoreError."""
    replicas = await objects.list_all(transport, Replica)
    return tuple(r.name for r in replicas if any(rank.node == node for rank in r.spec.ranks))


async def _mates(transport: Transport, node: Node) -> tuple[GroupMate, ...]:
    ready = await object_trees.ready_nodes(transport)
    others = {one.name: one for one in await objects.list_all(transport, Node)}
    group_mates: list[GroupMate] = []
    for group in await objects.list_all(transport, ShardGroup):
        members = [member.node for member in group.spec.members]
        if node.name not in members:
            continue
        for name in members:
            other = others.get(name)
            if name != node.name and other is not None:
                group_mates.append(
                    GroupMate(
                        group=group.name,
                        node=name,
                        is_ready=name in ready,
                        is_draining=other.spec.draining,
                    )
                )
    return tuple(group_mates)


async def _members(etcd: EtcdAddress) -> tuple[EtcdMember, ...]:
    """Return etcd's members; each is asked whether it answers. Raises StoreError."""
    cluster = ClusterClient(etcd)
    try:
        members = await cluster.list()
    finally:
        await cluster.close()
    return tuple(
        [
            EtcdMember(
                name=member.name,
                hosts=_hosts(etcd, (*member.client_urls, *member.peer_urls)),
                is_healthy=await _answers(etcd, member.client_urls),
            )
            for member in members
        ]
    )


def _hosts(etcd: EtcdAddress, urls: Sequence[str]) -> frozenset[str]:
    """Return the hosts of a member; one that is reached over a socket runs on this machine."""
    if etcd.socket is None:
        return hosts_of_urls(urls)
    return frozenset({"127.0.0.1", "localhost", "::1", socket.gethostname().lower()})


async def _answers(etcd: EtcdAddress, urls: Sequence[str]) -> bool:
    if etcd.socket is not None:
        return True  # it has just listed the members
    if not urls:
        return False  # it never started
    client = MaintenanceClient(replace(etcd, endpoints=(urls[0],)))
    try:
        async with asyncio.timeout(_MEMBER_S):
            await client.status()
    except (StoreError, TimeoutError):
        return False
    finally:
        await client.close()
    return True


@dataclass(frozen=True, slots=True)
class Restarter:
    """Restarts one Mac that is drained, and waits for it."""

    node: str
    watch: FleetWatch

    async def restart(self, mac: RemoteMac, prompts: Prompts | None, *, unlocks: bool) -> None:
        """Ask the Mac to restart; with `unlocks`, FileVault's password is asked and the disk is unlocked once.

        Raises:
            FleetctlError: it refuses.

        """
        if unlocks:
            assert prompts is not None
            await self._unlock_and_restart(mac, prompts)
            return
        # The connection may end before the answer comes.
        with suppress(UnreachableHostError):
            done = await mac.run(_RESTART, sudo=True)
            if not done.is_ok and not done.signal:
                raise FleetctlError(f"node/{self.node} refuses to restart: {done.line}")

    async def _unlock_and_restart(self, mac: RemoteMac, prompts: Prompts) -> None:
        user = mac.target.user
        password = await prompts.secret(f"Password of {user} on {mac.target.host}, for FileVault")
        answer = plistlib.dumps({"Username": user, "Password": password})
        with suppress(UnreachableHostError):
            done = await mac.run(macos_commands.RESTART_UNLOCKED.words(), stdin=answer, sudo=True)
            if not done.is_ok and not done.signal:
                raise FleetctlError(
                    f"node/{self.node}: fdesetup authrestart failed: {done.line}. The Mac was not restarted; {user} must be a "
                    "user who may unlock FileVault (`fdesetup list`)"
                )

    async def wait_down(self, session: str) -> None:
        """Wait until the lease of the agent is gone. Raises FleetctlError: it stays."""

        async def lacks() -> str:
            found = await self._lease()
            return "its agent still holds its lease" if found == session and found else ""

        try:
            await self.watch.wait(lacks, limit_s=_DOWN_S)
        except NotReadyError as error:
            raise FleetctlError(
                f"node/{self.node} did not restart: {error}. It stays drained; `fleetctl uncordon {self.node}` ends that"
            ) from error

    async def wait_back(self, session: str, *, limit_s: float) -> None:
        """Wait until a new agent of the Mac holds a lease and needs no restart. Raises FleetctlError."""

        async def lacks() -> str:
            if await self._lease() in ("", session):
                return "it has not come back"
            return await self._reboot_reason()

        try:
            await self.watch.wait(lacks, limit_s=limit_s)
        except NotReadyError as error:
            raise FleetctlError(
                f"node/{self.node}: {error}. It stays drained. If its disk is locked by FileVault, `fleetctl node unlock "
                f"{self.node}` does that; `fleetctl uncordon {self.node}` ends the drain"
            ) from error

    async def _lease(self) -> str:
        item = await self.watch.transport.get(keys.node_lease_key(self.node))
        return "" if item is None else codec.decode(NodeLease, item).session

    async def _reboot_reason(self) -> str:
        """Return why the Mac still needs a restart; "" if it does not."""
        item = await self.watch.transport.get(keys.status_key("Node", self.node))
        if item is None:
            return "its new agent has not reported"
        condition = find_condition(codec.decode(NodeStatus, item).conditions, "NeedsReboot")
        if condition is None or condition.status is not ConditionStatus.TRUE:
            return ""
        return f"it came back, and still needs a restart ({condition.reason}: {condition.message})"

    async def session(self) -> str:
        """Return the session of the agent now; "" if the node is away. Raises StoreError."""
        return await self._lease()


async def wired_bytes(mac: RemoteMac) -> int | None:
    """Return the wired memory of a Mac; None if it does not tell, as Linux."""
    try:
        done = await mac.run(macos_commands.VM_STAT.words())
    except RemoteError:
        return None
    memory = parse_mac_memory(done.out, "") if done.is_ok else None
    return None if memory is None else memory.wired_bytes
