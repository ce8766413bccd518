"""Supervisor of a local fleet: start, readiness check and stop of its processes."""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import LAYOUT_VERSION, DataDir, FleetRecord
from fleetctl.fleets.fleet_trust import Machine
from fleetctl.fleets.local_api_key import prepare_api_key
from fleetctl.fleets.local_programs import (
    LocalFleetSettings,
    agent_programs,
    dashboard_programs,
    etcd_proxy_programs,
    gateway_program,
    node_names,
    reconciler_program,
)
from fleetctl.fleets.local_trust import LocalTrust
from machinery import processes
from machinery.clock import Clock
from machinery.supervisor import Supervisor
from machinery.unix_sockets import SocketFolderError
from nodeagent.engines.engine_processes import stop_all
from nodeagent.hardware.probe import read_machine_facts
from nodeagent.hardware.readings import HardwareError, HardwareFacts
from schemas.deployment import ModelDeployment
from schemas.meta import is_true
from schemas.replica import Replica
from schemas.wire.engine_address import is_loopback
from store import keys, objects
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import Binary, NoBinaryError, locate, written_by
from store.etcd.member.embedded import (
    EmbeddedEtcd,
    EmbeddedEtcdError,
)
from store.etcd.member.maintenance import MemberMaintenance
from store.port import Transport

log = logging.getLogger(__name__)

Say = Callable[[str], None]

_READY_S = 90.0
# Longer than an engine's drain period.
_ENGINE_GRACE_S = 45.0
# An exchange of the authority gives every process five minutes to trust the new one.
_TRUST_EVERY_S = 30.0


def why_unusable(host: str, port: int) -> str:
    """Return why a process cannot listen on the port; "" if it can."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "another program listens on it"
        # Of a failed bind, Python adds the address to the system's words.
        return (error.strerror or str(error)).partition(" (while attempting")[0]
    return ""


class LocalFleet:
    """etcd, a reconciler, agents and a gateway as child processes.

    The children survive a kill of this process. The next supervisor with the same data folder adopts them.
    """

    def __init__(self, settings: LocalFleetSettings, clock: Clock, pid: int) -> None:
        self._settings = settings
        self._clock = clock
        self._pid = pid
        self._etcd: EmbeddedEtcd | None = None
        self._trust: LocalTrust | None = None
        self._supervisors: list[Supervisor] = []
        self._warning = ""

    async def run(self, say: Say, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Start the fleet, report when it is ready, and supervise it until cancelled; then stop it.

        Raises:
            FleetctlError: the fleet cannot be started; no process is left running.

        """
        settings = self._settings
        self._write_record(is_ready=False)
        try:
            await self._start(say)
            async with asyncio.TaskGroup() as group:
                for supervisor in self._all_supervisors():
                    group.create_task(supervisor.run())
                group.create_task(self._maintenance(say).run())
                if self._trust is not None:
                    group.create_task(self._keep_identities(self._trust))
                await self._wait_ready()
                self._write_record(is_ready=True)
                say(f"fleet ready: {settings.gateway_url}/v1")
                if settings.dashboard_port:
                    say(
                        f"dashboard: {settings.dashboard_url} (`fleetctl dashboard` opens it, logged in)"
                    )
                await on_ready()
        except FleetctlError as error:
            self._write_record(is_ready=False, error=str(error))
            raise
        except BaseExceptionGroup as failed:
            refusals = failed.subgroup(FleetctlError)
            if refusals is None:
                raise
            self._write_record(is_ready=False, error=str(refusals.exceptions[0]))
            raise refusals.exceptions[0] from None
        finally:
            await asyncio.shield(self._stop(say))

    def _all_supervisors(self) -> list[Supervisor]:
        assert self._etcd is not None
        return [self._etcd.supervisor, *self._supervisors]

    def _maintenance(self, say: Say) -> MemberMaintenance:
        assert self._etcd is not None
        quota_bytes = self._settings.etcd_quota_bytes
        return MemberMaintenance(self._store_address(), self._clock, say, quota_bytes=quota_bytes)

    def _store_address(self) -> EtcdAddress:
        """Return etcd's address, with a password if it asks for one."""
        assert self._etcd is not None
        address = self._etcd.address
        return address if self._trust is None else self._trust.as_root(address)

    async def _keep_identities(self, trust: LocalTrust) -> None:
        """Renew etcd's certificate and the administrator's; all other processes renew their own."""
        assert self._etcd is not None
        while True:
            await self._clock.sleep(_TRUST_EVERY_S)
            try:
                await trust.renew(self._etcd.address)
            except FleetctlError as error:
                log.warning("certificate not renewed", extra={"why": str(error)})

    def _write_record(self, *, is_ready: bool, error: str = "") -> None:
        before = self._settings.data_dir.read()
        # A start that fails leaves the flags of the last one that succeeded.
        kept = {} if before is None else before.flags
        self._settings.data_dir.write(
            FleetRecord(
                layout_version=LAYOUT_VERSION,
                gateway_url=self._settings.gateway_url,
                pid=self._pid,
                is_ready=is_ready,
                error=error,
                warning=self._warning,
                flags=dict(self._settings.flags) if is_ready else kept,
            )
        )

    async def _start(self, say: Say) -> None:
        settings = self._settings
        settings.data_dir.refuse_unfinished()
        facts = await _read_facts()
        if settings.is_secured:
            self._trust = LocalTrust(
                settings.data_dir,
                self._clock,
                _machine(facts, settings),
                can_dashboard_write=settings.can_dashboard_write,
            )
        try:
            binary = locate(
                settings.etcd_binary,
                written_by=written_by(settings.data_dir.etcd),
                is_exposed=settings.join is not None and not is_loopback(settings.join.address),
            )
            self._warning = binary.warning
            if binary.warning:
                say(f"note: {binary.warning}")
            await self._start_etcd(binary, say)
        except (NoBinaryError, EmbeddedEtcdError, SocketFolderError, OSError) as error:
            raise FleetctlError(str(error)) from error
        assert self._etcd is not None
        if settings.requires_keys and self._trust is None:
            await prepare_api_key(self._store_address(), settings.data_dir, self._clock)
        etcd = str(self._etcd.address)
        started = [
            *etcd_proxy_programs(settings, etcd),
            reconciler_program(settings, etcd),
            *agent_programs(settings, etcd, _memory_share(facts, settings.nodes)),
            gateway_program(settings, etcd),
            *dashboard_programs(settings, etcd),
        ]
        self._supervisors = [Supervisor(program, self._clock) for program in started]
        await self._end_leftovers({program.record for program in started})
        nodes = [path.name for path in settings.data_dir.nodes()]
        await _revoke_leases(
            self._store_address(),
            [n for n in nodes if processes.adopt(settings.data_dir.record(n)) is None],
        )
        self._check_ports(say)
        for supervisor in self._supervisors:
            await supervisor.start()
        agents = "a node agent" if settings.nodes == 1 else f"{settings.nodes} node agents"
        others = (
            "the reconciler" if settings.dashboard_port is None else "the reconciler, the dashboard"
        )
        say(f"started {others}, {agents} and the gateway")

    async def _start_etcd(self, binary: Binary, say: Say) -> None:
        """Start etcd, with users and identities. Other machines reach it through a proxy, which starts later."""
        settings = self._settings
        self._etcd = EmbeddedEtcd(
            binary,
            settings.data_dir.etcd,
            self._clock,
            quota_bytes=settings.etcd_quota_bytes,
        )
        await self._etcd.start()
        if self._trust is not None:
            await self._trust.prepare(self._etcd.address, node_names(settings), say)
        where = f"unix socket, {settings.data_dir.etcd}"
        if settings.etcd_url:
            where = f"{settings.etcd_url} with client certificates; {where}"
        say(f"etcd {binary.text} is up ({where})")

    async def _end_leftovers(self, wanted: set[Path]) -> None:
        """End processes of a previous run with other flags, such as a third node."""
        for path in self._settings.data_dir.records():
            child = processes.adopt(path)
            if path in wanted:
                continue
            if child is not None:
                await processes.end(child, self._clock, grace_s=10.0)
            path.unlink(missing_ok=True)

    def _check_ports(self, say: Say) -> None:
        """Refuse an occupied port of the gateway or etcd, and warn of the dashboard's: they would retry forever.

        A process of an earlier run is adopted with its port.
        """
        settings, data_dir = self._settings, self._settings.data_dir
        if settings.dashboard_port and processes.adopt(data_dir.record("dashboard")) is None:
            why = why_unusable("127.0.0.1", settings.dashboard_port)
            if why:
                say(
                    f"warning: the dashboard waits for port {settings.dashboard_port}: {why}. Choose another with "
                    "--dashboard-port (0: any that is free)"
                )
        wanted = [("gateway", settings.host, settings.gateway_port, "--port")]
        if settings.join is not None:
            wanted.append(
                ("etcd-proxy", settings.join.address, settings.join.etcd_port, "--etcd-port")
            )
        for program, host, port, flag in wanted:
            if processes.adopt(data_dir.record(program)) is None and (
                why := why_unusable(host, port)
            ):
                what = program.partition("-")[0]
                raise FleetctlError(
                    f"port {port} on {host} cannot be used for {'the ' if what == 'gateway' else ''}{what}: {why}. Choose "
                    f"another with {flag}"
                )

    async def _wait_ready(self) -> None:
        """Wait until every node holds its lease, a reconciler has looked at all replicas and the gateway answers."""
        assert self._etcd is not None
        try:
            async with asyncio.timeout(_READY_S):
                await wait_for_control_plane(self._store_address(), node_names(self._settings))
                await _wait_for_gateway(self._settings.gateway_url)
        except TimeoutError:
            details = [
                f"{s.program.name}: {processes.last_lines(s.program.log, 1)}"
                for s in self._supervisors
                if not s.running or s.restarts
            ]
            raise FleetctlError(
                f"the fleet did not get ready within {_READY_S:.0f} s. "
                f"{'; '.join(details) or 'All processes run, but not all have reported'}. "
                f"Logs: {self._settings.data_dir.path / 'logs'}"
            ) from None

    async def _stop(self, say: Say) -> None:
        """Stop everything: the gateway first, so that it can finish its requests; etcd last."""
        say("stopping the fleet")
        for supervisor in reversed(self._supervisors):
            await supervisor.stop()
        await stop_engines(self._settings.data_dir, self._clock)
        if self._etcd is not None:
            await _revoke_leases(self._store_address(), node_names(self._settings))
            await self._etcd.supervisor.stop()
        say("stopped")


async def stop_engines(data_dir: DataDir, clock: Clock) -> None:
    """End the engines of all nodes in the folder."""
    for node in data_dir.nodes():
        await stop_all(node / "engines", clock, grace_s=_ENGINE_GRACE_S)


async def _read_facts() -> HardwareFacts:
    try:
        return await read_machine_facts()
    except HardwareError as error:
        raise FleetctlError(f"cannot read this machine's hardware: {error}") from error


def _machine(facts: HardwareFacts, settings: LocalFleetSettings) -> Machine:
    return Machine(
        hostname=facts.hostname,
        hardware_uuid=facts.hardware_uuid.strip().lower(),
        address="" if settings.join is None else settings.join.address,
    )


def _memory_share(facts: HardwareFacts, nodes: int) -> str:
    """Return an equal share of the memory that models may use on this machine, as a quantity."""
    return f"{facts.gpu_memory_limit_bytes // nodes // 2**20}Mi"


async def _revoke_leases(etcd: EtcdAddress, names: list[str]) -> None:
    """Revoke the leases of nodes without an agent; otherwise they and their endpoints outlive an etcd restart.

    A lease does not run out while etcd is down: after a restart it lives for its whole time again.
    """
    transport = connect(etcd)
    try:
        for name in names:
            item = await transport.get(keys.node_lease_key(name))
            if item is not None and item.lease:
                await transport.revoke(item.lease)
    except StoreError as error:
        log.info("leases not revoked; they will expire", extra={"why": str(error)})
    finally:
        await transport.close()


async def _wait_for_gateway(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=2.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                # Without the certificate's authority: nothing is sent, and the answer is only that it serves.
                async with session.get(f"{url}/health", ssl=False) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(0.1)


async def wait_for_control_plane(etcd: EtcdAddress, names: list[str]) -> None:
    """Wait until the nodes hold their leases, and a reconciler has written what is true since."""
    transport = connect(etcd)
    try:
        while True:
            try:
                listing = await transport.list(keys.NODE_LEASE_PREFIX)
                leader = await transport.get(keys.ELECTION_RECONCILER)
                is_current = await is_readiness_current(transport)
            except StoreError:
                await asyncio.sleep(0.1)
                continue
            present = {item.key.removeprefix(keys.NODE_LEASE_PREFIX) for item in listing.items}
            if present >= set(names) and leader is not None and is_current:
                return
            await asyncio.sleep(0.1)
    finally:
        await transport.close()


async def is_readiness_current(transport: Transport) -> bool:
    """Return whether all replicas that count as ready have an endpoint: statuses outlive the death of all processes."""
    serving = {
        item.key.rpartition("/")[2] for item in (await transport.list(keys.ENDPOINT_PREFIX)).items
    }
    replicas = await objects.list_all(transport, Replica)
    ready = {
        replica.name
        for replica in replicas
        if replica.status and is_true(replica.status.conditions, "Ready")
    }
    deployments = await objects.list_all(transport, ModelDeployment)
    counted = sum(
        deployment.status.ready_replicas
        for deployment in deployments
        if deployment.status is not None
    )
    return ready <= serving and counted <= len(serving)
