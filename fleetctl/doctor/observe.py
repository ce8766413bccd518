"""Observation of the fleet for the doctor's checks; each probe has a time limit.

It writes nothing that stays: one lease, and tickets for agents and gateways under another, both revoked.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from fleetctl.cli.connect import etcd_dir
from fleetctl.doctor import (
    observe_control,
    observe_links,
    observe_models,
    observe_multicast,
    observe_security,
)
from fleetctl.doctor.observe_control import SETTLE_S
from fleetctl.doctor.observe_machines import examine_machines
from fleetctl.objects import reader
from identity.dialer import Dialer, UntrustedAddressError, is_local
from insight import process_client, version_skew
from insight.doctor.checks import (
    CONDITION_KINDS,
    DiskSpace,
    FleetObservation,
    ProbeResult,
    StoreHealth,
)
from insight.doctor.control_plane import ControlPlane, EtcdHealth
from insight.doctor.group_admission import check_admission
from insight.doctor.lost_nodes import try_lost_nodes
from insight.doctor.machines import MachineReport
from insight.process_client import ProcessAddress
from insight.tickets import issue_tickets
from insight.version_skew import ComponentVersion
from machinery.clock import Clock
from machinery.http_body import read_limited
from machinery.http_date import seconds_ahead
from machinery.version import version as fleet_version
from schemas import kinds
from schemas.meta import ApiObject
from schemas.node import Node
from schemas.records import DashboardLease, GatewayLease
from schemas.replica import Endpoint, EndpointSpec, Replica
from schemas.shardgroup import ShardGroup
from schemas.wire import health
from schemas.wire.engine_address import EngineAddress
from schemas.wire.health import StoreView
from store import keys, objects
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.port import Transport

_LEASE_S = 5
_PROBE_S = 5.0
# Below the default limit of open files on macOS (256).
_MAX_PARALLEL = 64
_MAX_BODY_BYTES = 2**20


async def observe_fleet(
    transport: Transport,
    address: EtcdAddress,
    clock: Clock,
    data_dir: Path | None,
    *,
    dialer: Dialer | None = None,
) -> FleetObservation:
    """Observe all parts of the fleet; `data_dir` is its folder on this machine. Raises StoreError."""
    store = await _observe_store(transport, str(address), clock)
    versions = await version_skew.read_versions(transport, _client_version())
    nodes = [one for one in await _read_all(transport, "Node") if isinstance(one, Node)]
    ready = await reader.ready_nodes(transport)
    objects_by_kind = await _read_objects(transport)
    reading = await observe_control.read_control(transport, _flat(objects_by_kind))
    read_at = clock.monotonic()
    groups = [one for one in objects_by_kind["ShardGroup"] if isinstance(one, ShardGroup)]
    leases = await process_client.list_gateway_leases(transport)
    dashboards = await process_client.list_dashboard_leases(transport)
    endpoints = await objects.list_all(transport, Endpoint)
    present = [node for node in nodes if node.name in ready]
    (agents, answered, engines, machines), multicast = await asyncio.gather(
        _probe_processes(transport, clock, dialer or Dialer(), (present, leases, endpoints)),
        observe_multicast.read_multicast(leases, clock),
    )
    observed = _flat(objects_by_kind)
    if not reading.is_settled:
        # The probes above took a part of this time.
        await clock.sleep(max(0.0, SETTLE_S - (clock.monotonic() - read_at)))
        observed = _flat(await _read_objects(transport))
        reading = reading.confirm(await observe_control.read_control(transport, observed))
    return FleetObservation(
        store=store,
        versions=versions,
        skew=version_skew.warnings(versions),
        nodes=nodes,
        ready=ready,
        replicas=await objects.list_all(transport, Replica),
        objects=observed,
        admissions=[check_admission(group, nodes, ready) for group in groups],
        agents=agents,
        gateways=answered,
        engines=engines,
        control=ControlPlane(
            etcd=await _observe_etcd(transport, address, data_dir, store),
            endpoints=reading.endpoints,
            foreign_endpoints=sorted(reading.foreign, key=lambda one: (one.node, one.replica)),
            unobserved=observe_control.unobserved_changes(reading, observed, clock),
        ),
        disk=_observe_disk(data_dir),
        full_disks=dict(_full_disks(leases, dashboards)),
        machines=machines,
        security=await observe_security.read_security(
            transport, clock.now(), (nodes, leases, endpoints), (address, data_dir)
        ),
        lost=await try_lost_nodes(nodes, ready),
        links=await observe_links.read_links(nodes),
        multicast=multicast,
        partial_files=await observe_models.read_partial_files(data_dir, clock.now()),
    )


def _client_version() -> ComponentVersion:
    return ComponentVersion(part="fleetctl", version=fleet_version())


async def _probe_processes(
    transport: Transport,
    clock: Clock,
    dialer: Dialer,
    processes: tuple[Sequence[Node], Mapping[str, GatewayLease], Sequence[Endpoint]],
) -> tuple[list[ProbeResult], list[ProbeResult], list[ProbeResult], list[MachineReport]]:
    """Return the results for the nodes' agents, the gateways and the engines, and the agents' own findings."""
    nodes, leases, endpoints = processes
    agents = [_agent_address(node, dialer) for node in nodes]
    addresses = (
        *agents,
        *(process_client.gateway_address(dialer, *entry) for entry in leases.items()),
    )
    async with _issue_tickets(transport, dialer, addresses) as bearers:
        (probed, engines), machines = await asyncio.gather(
            _probe_all(addresses, endpoints, clock, bearers), examine_machines(transport, agents)
        )
    return probed[: len(nodes)], probed[len(nodes) :], engines, machines


@asynccontextmanager
async def _issue_tickets(
    transport: Transport, dialer: Dialer, addresses: Sequence[ProcessAddress]
) -> AsyncIterator[Mapping[str, str]]:
    """Yield tickets for processes on other machines, which show their health to nothing else without an identity."""
    holders = [
        one.key for one in addresses if one.url and not (dialer.has_identity or is_local(one.url))
    ]
    bearers: Mapping[str, str] = {}
    async with AsyncExitStack() as stack:
        if holders:
            with suppress(StoreError):  # the store may be read-only: a probe says what is missing
                tickets = issue_tickets(transport, holders)
                bearers = await stack.enter_async_context(tickets)
        yield bearers


async def _probe_all(
    addresses: Sequence[ProcessAddress],
    endpoints: Sequence[Endpoint],
    clock: Clock,
    bearers: Mapping[str, str],
) -> tuple[list[ProbeResult], list[ProbeResult]]:
    """Return the results for agents and gateways, and for engines."""
    prober = _Prober(clock)
    timeout = aiohttp.ClientTimeout(total=_PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(
            prober.all(prober.health(session, one, bearers.get(one.key, "")) for one in addresses),
            prober.all(prober.engine(f"replica/{e.name}", e.spec) for e in endpoints),
        )


async def _read_objects(transport: Transport) -> dict[str, list[ApiObject]]:
    return {kind: await _read_all(transport, kind) for kind in CONDITION_KINDS}


def _flat(objects_by_kind: Mapping[str, Sequence[ApiObject]]) -> list[ApiObject]:
    return [one for several in objects_by_kind.values() for one in several]


async def _read_all(transport: Transport, name: str) -> list[ApiObject]:
    kind = kinds.by_name(name)
    assert kind is not None  # it is one of ours
    return await reader.read(transport, kind, ())


async def _observe_store(transport: Transport, address: str, clock: Clock) -> StoreHealth:
    began = clock.monotonic()
    restoring = await transport.get(keys.RESTORING)
    read_s = clock.monotonic() - began
    server = await transport.status()
    error = ""
    try:
        # Granting a lease is a write like any other, and leaves no key behind.
        await transport.revoke(await transport.grant(_LEASE_S))
    except StoreError as failure:
        error = str(failure)
    return StoreHealth(
        address=address,
        version=server.version,
        read_s=read_s,
        write_error=error,
        is_restoring=restoring is not None,
    )


async def _observe_etcd(
    transport: Transport, address: EtcdAddress, data_dir: Path | None, store: StoreHealth
) -> EtcdHealth:
    folder = None if data_dir is None else etcd_dir(data_dir)
    is_writable = not store.write_error
    return await observe_control.observe_etcd(transport, address, folder, is_writable=is_writable)


def _observe_disk(data_dir: Path | None) -> DiskSpace | None:
    if data_dir is None or not data_dir.exists():
        return None
    found = shutil.disk_usage(data_dir)
    return DiskSpace(path=str(data_dir), size_bytes=found.total, free_bytes=found.free)


def _full_disks(
    gateways: Mapping[str, GatewayLease], dashboards: Mapping[str, DashboardLease]
) -> Iterator[tuple[str, str]]:
    """Yield the processes whose state folder is on a disk that is almost full, with the folder."""
    for id_, gateway in gateways.items():
        if gateway.full_disk:
            yield f"gateway/{id_}", gateway.full_disk
    for id_, dashboard in dashboards.items():
        if dashboard.full_disk:
            yield f"dashboard/{id_}", dashboard.full_disk


def _agent_address(node: Node, dialer: Dialer) -> ProcessAddress:
    """Return the address of the node's agent; its URL is empty if it serves no API."""
    url = node.status.agent_url if node.status is not None else ""
    return process_client.agent_address(dialer, node.name, url)


class _Prober:
    """Prober that limits the number of parallel connections."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots = asyncio.Semaphore(_MAX_PARALLEL)

    async def all(self, probes: Iterable[Coroutine[Any, Any, ProbeResult]]) -> list[ProbeResult]:
        """Run the probes in parallel."""
        return list(await asyncio.gather(*probes))

    async def health(
        self, session: aiohttp.ClientSession, address: ProcessAddress, bearer: str
    ) -> ProbeResult:
        """Request /health."""
        label, url = address.label, address.url
        if not url:
            why = "its agent serves no HTTP API (the condition ApiServing gives the reason)"
            return ProbeResult(label=label, url="", error=why)
        async with self._slots:
            try:
                dial = address.dial()
                async with session.get(
                    f"{url.rstrip('/')}/health",
                    allow_redirects=False,
                    headers={"authorization": f"Bearer {bearer}"} if bearer else {},
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                ) as response:
                    offset = seconds_ahead(response.headers.get("date", ""), self._clock.now())
                    body = await read_limited(response.content.iter_any(), _MAX_BODY_BYTES)
            except UntrustedAddressError as error:
                return ProbeResult(label=label, url=url, error=str(error))
            except TimeoutError:
                why = f"no answer at {url} within {_PROBE_S:.0f} s"
                return ProbeResult(label=label, url=url, error=why, is_silent=True)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return ProbeResult(
                    label=label, url=url, error=f"no answer at {url}: {_cause(error)}"
                )
        if response.status != 200:
            return ProbeResult(
                label=label,
                url=url,
                error=f"{url}/health answers with HTTP status {response.status}",
            )
        tree = _health_tree(body)
        return ProbeResult(
            label=label,
            url=url,
            offset_s=offset,
            holds_lease=tree.get("leaseHeld") is not False,
            store=_store_view(tree),
        )

    async def engine(self, label: str, engine: EndpointSpec) -> ProbeResult:
        """Check that an engine accepts connections, unless its socket is on another machine."""
        url = engine.url
        async with self._slots:
            try:
                address = EngineAddress.parse(url, node=engine.node)
                if address.socket and not Path(address.socket).parent.exists():
                    return ProbeResult(label=label, url=url, is_elsewhere=True)
                async with asyncio.timeout(_PROBE_S):
                    loop = asyncio.get_running_loop()
                    transport, _ = await address.connect(loop, asyncio.Protocol)
            except TimeoutError:
                return ProbeResult(
                    label=label, url=url, error=f"no connection to {url} within {_PROBE_S:.0f} s"
                )
            except (OSError, ValueError) as error:
                return ProbeResult(
                    label=label, url=url, error=f"no connection to {url}: {_cause(error)}"
                )
        transport.close()
        return ProbeResult(label=label, url=url)


def _cause(error: Exception) -> str:
    if untrusted := process_client.untrusted_text(error):
        return untrusted
    inner = getattr(error, "os_error", error)
    reason = inner.strerror if isinstance(inner, OSError) else ""
    return (reason or str(error) or type(error).__name__).lower()


def _health_tree(body: bytes) -> Mapping[str, Any]:
    """Return the health document; empty if it is none."""
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _store_view(tree: Mapping[str, Any]) -> StoreView | None:
    """Return the process's view of the store; None if it does not report one."""
    if health.STORE_STALENESS not in tree:
        return None
    age_s, message = tree[health.STORE_STALENESS], tree.get(health.STORE_MESSAGE)
    is_refused = tree.get(health.STORE) == health.StoreState.REFUSED
    return StoreView(
        float(age_s) if isinstance(age_s, int | float) else None,
        str(message or "it gives no reason") if is_refused else "",
    )
