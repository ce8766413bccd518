"""Observation of the fleet for the doctor's checks; each probe has a time limit.

It writes nothing that stays: one lease, and tickets for agents and gateways under another, both revoked.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import aiohttp
import orjson

from fleetctl.cli.connect import etcd_dir
from fleetctl.doctor import (
    observe_control,
    observe_links,
    observe_models,
    observe_security,
)
from fleetctl.doctor.observe_control import SETTLE_S
from fleetctl.objects import reader
from identity.dialer import Dialer, UntrustedAddressError, is_local
from insight import process_client, version_skew
from insight.doctor.checks import CONDITION_KINDS, FleetObservation, StoreHealth
from insight.doctor.control_plane import ProbeResult
from insight.doctor.group_admission import check_admission
from insight.doctor.lost_nodes import try_lost_nodes
from insight.doctor.machines import MachineReport
from insight.errors import ProcessRefusedError, ProcessUnreachableError
from insight.process_client import ProcessAddress
from insight.tickets import issue_tickets
from insight.version_skew import ComponentVersion
from machinery.clock import Clock
from machinery.http_body import read_limited
from machinery.http_date import seconds_ahead
from machinery.version import version as fleet_version
from nodeagent.hardware.probe import read_disk
from schemas import kinds
from schemas.meta import ApiObject
from schemas.node import Node
from schemas.replica import Endpoint, EndpointSpec, Replica
from schemas.shardgroup import ShardGroup
from schemas.wire import findings as wire
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
    client = ComponentVersion(part="fleetctl", version=fleet_version())
    versions = await version_skew.read_versions(transport, client)
    nodes = [node for node in await _read_kind(transport, "Node") if isinstance(node, Node)]
    ready = await reader.ready_nodes(transport)
    observed = await _read_objects(transport)
    reading = await observe_control.read_control(transport, observed)
    read_at = clock.monotonic()
    groups = [group for group in observed if isinstance(group, ShardGroup)]
    leases = await process_client.list_gateway_leases(transport)
    dashboards = await process_client.list_dashboard_leases(transport)
    endpoints = await objects.list_all(transport, Endpoint)
    dialer = dialer or Dialer()
    agents = [
        # The URL is empty if the agent serves no API.
        process_client.agent_address(
            dialer, node.name, "" if node.status is None else node.status.agent_url
        )
        for node in nodes
        if node.name in ready
    ]
    gateways = [process_client.gateway_address(dialer, *lease) for lease in leases.items()]
    (probed, engines), machines, multicast = await asyncio.gather(
        _probe_all(transport, dialer, (*agents, *gateways), endpoints, clock),
        examine_machines(transport, agents),
        observe_links.read_multicast(leases, clock),
    )
    if not reading.is_settled:
        # The probes above took a part of this time.
        await clock.sleep(max(0.0, SETTLE_S - (clock.monotonic() - read_at)))
        observed = await _read_objects(transport)
        reading = reading.confirm(await observe_control.read_control(transport, observed))
    processes = {
        **{f"gateway/{id_}": lease.full_disk for id_, lease in leases.items()},
        **{f"dashboard/{id_}": lease.full_disk for id_, lease in dashboards.items()},
    }
    return FleetObservation(
        store=store,
        etcd=await observe_control.observe_etcd(
            transport,
            address,
            None if data_dir is None else etcd_dir(data_dir),
            is_writable=not store.write_error,
        ),
        versions=versions,
        skew=version_skew.warnings(versions),
        leader="" if versions.reconciler is None else versions.reconciler.name,
        nodes=nodes,
        ready=ready,
        replicas=await objects.list_all(transport, Replica),
        objects=observed,
        admissions=[check_admission(group, nodes, ready) for group in groups],
        agents=probed[: len(agents)],
        gateways=probed[len(agents) :],
        engines=engines,
        endpoints=reading.endpoints,
        foreign_endpoints=sorted(reading.foreign, key=lambda one: (one.node, one.replica)),
        unobserved=observe_control.unobserved_changes(reading, observed, clock),
        disk=None if data_dir is None or not data_dir.exists() else read_disk(data_dir),
        full_disks={label: folder for label, folder in processes.items() if folder},
        machines=machines,
        security=await observe_security.read_security(
            transport, clock.now(), (nodes, leases, endpoints), (address, data_dir)
        ),
        lost=await try_lost_nodes(nodes, ready),
        links=await observe_links.read_links(nodes),
        multicast=multicast,
        partial_files=await observe_models.read_partial_files(data_dir, clock.now()),
    )


async def _read_kind(transport: Transport, name: str) -> list[ApiObject]:
    kind = kinds.by_name(name)
    assert kind is not None  # it is one of ours
    return await reader.read(transport, kind, ())


async def _read_objects(transport: Transport) -> list[ApiObject]:
    return [obj for kind in CONDITION_KINDS for obj in await _read_kind(transport, kind)]


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


async def _probe_all(
    transport: Transport,
    dialer: Dialer,
    addresses: Sequence[ProcessAddress],
    endpoints: Sequence[Endpoint],
    clock: Clock,
) -> tuple[list[ProbeResult], list[ProbeResult]]:
    """Return the results for agents and gateways, and for engines."""
    # Processes on other machines show their health to nothing else without an identity.
    holders = [
        process_address.key
        for process_address in addresses
        if process_address.url and not (dialer.has_identity or is_local(process_address.url))
    ]
    slots = asyncio.Semaphore(_MAX_PARALLEL)
    bearers: Mapping[str, str] = {}
    async with AsyncExitStack() as stack:
        if holders:
            with suppress(StoreError):  # the store may be read-only: a probe says what is missing
                bearers = await stack.enter_async_context(issue_tickets(transport, holders))
        timeout = aiohttp.ClientTimeout(total=_PROBE_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))

        async def probe(address: ProcessAddress) -> ProbeResult:
            async with slots:
                return await _probe_health(session, address, bearers.get(address.key, ""), clock)

        async def connect(endpoint: Endpoint) -> ProbeResult:
            async with slots:
                return await _probe_engine(f"replica/{endpoint.name}", endpoint.spec)

        probed, engines = await asyncio.gather(
            asyncio.gather(*map(probe, addresses)), asyncio.gather(*map(connect, endpoints))
        )
    return probed, engines


async def _probe_health(
    session: aiohttp.ClientSession, address: ProcessAddress, bearer: str, clock: Clock
) -> ProbeResult:
    """Request /health."""
    url = address.url
    result = ProbeResult(label=address.label, url=url)
    if not url:
        why = "its agent serves no HTTP API (the condition ApiServing gives the reason)"
        return replace(result, error=why)
    try:
        dial = address.dial()
        async with session.get(
            f"{url.rstrip('/')}/health",
            allow_redirects=False,
            headers={"authorization": f"Bearer {bearer}"} if bearer else {},
            ssl=dial.ssl,
            server_hostname=dial.server_hostname,
        ) as response:
            offset_s = seconds_ahead(response.headers.get("date", ""), clock.now())
            body = await read_limited(response.content.iter_any(), _MAX_BODY_BYTES)
    except UntrustedAddressError as error:
        return replace(result, error=str(error))
    except TimeoutError:
        why = f"no answer at {url} within {_PROBE_S:.0f} s"
        return replace(result, error=why, is_silent=True)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return replace(result, error=f"no answer at {url}: {_cause(error)}")
    if response.status != 200:
        why = f"{url}/health answers with HTTP status {response.status}"
        return replace(result, error=why)
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError:
        tree = {}
    if not isinstance(tree, dict):
        tree = {}
    view = None
    if health.STORE_STALENESS in tree:
        age_s, message = tree[health.STORE_STALENESS], tree.get(health.STORE_MESSAGE)
        is_refused = tree.get(health.STORE) == health.StoreState.REFUSED
        view = StoreView(
            float(age_s) if isinstance(age_s, int | float) else None,
            str(message or "it gives no reason") if is_refused else "",
        )
    holds_lease = tree.get("leaseHeld") is not False
    return replace(result, offset_s=offset_s, holds_lease=holds_lease, store=view)


async def _probe_engine(label: str, engine: EndpointSpec) -> ProbeResult:
    """Check that an engine accepts connections, unless its socket is on another machine."""
    result = ProbeResult(label=label, url=engine.url)
    try:
        address = EngineAddress.parse(engine.url, node=engine.node)
        if address.socket and not Path(address.socket).parent.exists():
            return replace(result, is_elsewhere=True)
        async with asyncio.timeout(_PROBE_S):
            loop = asyncio.get_running_loop()
            transport, _ = await address.connect(loop, asyncio.Protocol)
    except TimeoutError:
        why = f"no connection to {engine.url} within {_PROBE_S:.0f} s"
        return replace(result, error=why)
    except (OSError, ValueError) as error:
        return replace(result, error=f"no connection to {engine.url}: {_cause(error)}")
    transport.close()
    return result


def _cause(error: Exception) -> str:
    if untrusted := process_client.untrusted_text(error):
        return untrusted
    inner = getattr(error, "os_error", error)
    reason = inner.strerror if isinstance(inner, OSError) else ""
    return (reason or str(error) or type(error).__name__).lower()


_MAX_EXAMINED: Final = 32
# An agent's readers take eight seconds at most, and a second time for the system's log.
_EXAMINE_S: Final = 20.0


async def examine_machines(
    transport: Transport, addresses: Sequence[ProcessAddress]
) -> list[MachineReport]:
    """Ask agents for the findings about their machines; those without an address are left out."""
    asked = {address.key.partition("/")[2]: address for address in addresses if address.url}
    slots = asyncio.Semaphore(_MAX_EXAMINED)

    async def examine(node: str, address: ProcessAddress, bearer: str) -> MachineReport:
        async with slots:
            try:
                document = await process_client.fetch(
                    address, wire.PATH, bearer=bearer, limit_s=_EXAMINE_S
                )
                findings = wire.parse_findings(document)
            except (ProcessRefusedError, ProcessUnreachableError, ValueError) as error:
                return MachineReport(node=node, error=str(error))
        # Whom we asked is what we know; an agent could name any node.
        return MachineReport(
            node=node, findings=tuple(replace(finding, node=node) for finding in findings)
        )

    if not asked:
        return []
    try:
        async with issue_tickets(transport, [address.key for address in asked.values()]) as bearers:
            examinations = (examine(*item, bearers[item[1].key]) for item in asked.items())
            return list(await asyncio.gather(*examinations))
    except StoreError as error:
        why = f"no ticket can be written for it: {error}"
        return [MachineReport(node=node, error=why) for node in asked]
