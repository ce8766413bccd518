"""The configuration of an agent, and its dependencies as ports: engines, health, models, caches of the store.

`real_dependencies` returns those of a real machine; `nodeagent/hollow/` has others, for simulations and load tests.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from identity.credentials import Credentials
from identity.dialer import Dialer
from identity.folder import IdentityFolder
from identity.listeners import ApiSecurity
from machinery.clock import Clock
from machinery.process_log import LogRing
from models import inspection
from models.hub.fetcher import FetchLimits, ModelFetcher
from models.hub.fleet_hub import FleetListings
from models.hub.hub_settings import HubSettings
from models.model_store.store import ModelStore
from models.split_options import SplitInspector
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.engines.engine_http import EngineHttp
from nodeagent.engines.engine_processes import EngineProcesses, EnginesPort
from nodeagent.engines.health_client import HealthClient, HealthPort
from nodeagent.engines.prefix_folders import PrefixFolders
from nodeagent.engines.references import GoldenReferences, ReferencesPort
from nodeagent.engines.stop_order import StopOrder
from nodeagent.engines.tls import NodeTls
from nodeagent.engines.wired_memory import WiringPolicy
from nodeagent.fabric.node_tests import NodeFabricTests
from nodeagent.hardware import metal, panic_reports
from nodeagent.hardware.disk_rate import DiskRate
from nodeagent.hardware.load import LoadSampler
from nodeagent.hardware.machine_sleep import (
    MachineSleeper,
    MacSleeper,
    PowerAssertion,
    send_packets,
)
from nodeagent.hardware.metal import MetalPreflight
from nodeagent.hardware.probe import SystemMachineReader, available_memory_bytes
from nodeagent.hardware.readings import MachineReader
from nodeagent.hub_grants import HubGrants
from nodeagent.kept_copies import ObjectCache
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.flags import ModelDiskLimits
from nodeagent.model_store.missing_bytes import with_missing_bytes
from nodeagent.model_store.preloads import ModelPreloads, preload_cache
from nodeagent.model_store.pulls import ModelPulls
from nodeagent.model_store.quantizations import Quantizations
from nodeagent.model_store.usage import ModelUsers, read_users
from nodeagent.model_uses import ModelUses
from nodeagent.node import machine_conditions
from nodeagent.peers.model_exchange import ModelExchange
from nodeagent.peers.peer_prompts import HttpPeerPrompts
from nodeagent.peers.uploads import DEFAULT_BYTES_PER_S, Uploads
from nodeagent.pool_limits import PoolLimits
from nodeagent.replicas.cache_warmup import CacheWarmup
from nodeagent.replicas.deployment_replicas import Siblings, StoredSiblings
from nodeagent.replicas.last_assignment import AssignedReplicas, AssignmentFile, LastAssignment
from nodeagent.replicas.model_fetches import ModelFetches
from nodeagent.replicas.model_parts import ModelParts
from nodeagent.replicas.node_replicas import NodeReplicas
from nodeagent.replicas.start_queue import DEFAULT_CONCURRENCY
from schemas.model_snapshot import ModelSnapshot, PreloadAssignment
from schemas.model_use import ModelUse
from schemas.node import AdapterReport, ModelReport, NodeStatus
from schemas.power import WakePacket
from schemas.replica import Replica
from store import codec, keys
from store.errors import StoreError
from store.events import EventRecorder
from store.informer import Informer
from store.leases import LEASE_TTL_S
from store.model_listings import read_listings
from store.port import Transport

ReportModels: TypeAlias = Callable[[set[str]], Awaitable[tuple[ModelReport, ...]]]
"""From models' paths to this node's reports of them, sorted by path."""
ReportAdapters: TypeAlias = Callable[[set[str]], Awaitable[tuple[AdapterReport, ...]]]
"""From adapters' paths to this node's reports of them, sorted by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """An agent's flags, and the facts of its machine."""

    state_dir: Path
    models_dir: Path
    addresses: EngineAddresses
    """Those of its engines."""
    session: str
    status: NodeStatus
    """The node's status without its models, which are inspected later."""
    name: str
    casts_to_float32: bool
    is_memory_chosen: bool = False
    """True if `--memory` chose the memory for models."""
    inspect_every_s: float = 10.0
    """The interval in which model folders and the machine are inspected without an event: a person may change them."""
    hubs: HubSettings = field(default_factory=HubSettings)
    """The hub of deployments that name none."""
    model_disk: ModelDiskLimits = field(default_factory=ModelDiskLimits)
    """Room that fetches leave free, and fullness at which unused models are removed."""
    upload_bytes_per_s: float = DEFAULT_BYTES_PER_S
    """The limit of the files that are sent to other agents."""
    serves_hub: bool = False
    """True if the API is a mirror of hubs for other programs."""
    lease_s: int = LEASE_TTL_S
    start_concurrency: int = DEFAULT_CONCURRENCY
    """The number of engines that may load at once."""
    api_port: int | None = None
    """The port of the agent's API, 0 for any; None: no API."""
    api_security: ApiSecurity = field(default_factory=ApiSecurity)
    """The flags that protect the agent's API."""
    insecure_flags: tuple[str, ...] = ()
    """The flags in use that switch protection off, for doctor."""
    ring: LogRing = field(default_factory=LogRing)
    """The agent's own log."""
    has_store_password: bool = False
    """True if the agent has a password for the store, whether or not the store requires one."""
    identity_folder: IdentityFolder | None = None
    """The folder of the node's certificate, which is renewed there; None: the agent has none."""
    credentials: Credentials | None = None
    """The node's certificate and key; None: no TLS."""
    engine_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for engines alone: the level of their logs, and OpenTelemetry's, which may hold a collector's token."""

    @property
    def prefixes_dir(self) -> Path:
        """The folder of cached prompts, one for each deployment."""
        return self.state_dir / "prefixes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything outside one agent that it works with, except the store."""

    engines: EnginesPort
    health: HealthPort
    references: ReferencesPort
    report_models: ReportModels
    report_adapters: ReportAdapters
    replicas: ObjectCache[Replica]
    """Replicas by key: all, or those that concern this node."""
    uses: ObjectCache[ModelUse]
    """The uses of models by deployments, by the deployments' names."""
    is_inspecting: Callable[[], bool] = lambda: False
    """True if a model is still being inspected, so that reports should be asked for again soon."""
    readings: MachineReader | None = None
    """The reader of the machine; None keeps the configured status."""
    fabric: NodeFabricTests | None = None
    """Tests of the cables; None where no process can be started for one."""
    tls: NodeTls | None = None
    """The node's identity for its engines; None: they serve plain HTTP."""
    metal: MetalPreflight | None = None
    disk_rate: DiskRate | None = None
    """The check of the GPU before the first engine; None where there is no Metal."""
    load: LoadSampler | None = None
    """The load of the machine; None where agents share one machine."""
    fetches: ModelFetches | None = None
    """The fetches of hub models; None where every model counts as present."""
    preloads: ModelPreloads | None = None
    """The fetches of models that have no replica here; None where there is no store of models."""
    pulls: ModelPulls | None = None
    """The fetches that people ask for; None where there is no store of models."""
    limits: PoolLimits | None = None
    """The limits that pools set; None where nothing is transferred."""
    wiring: WiringPolicy = field(default_factory=WiringPolicy)
    """The wiring of engines that start."""
    quantizations: Quantizations | None = None
    """The quantizations that people ask for; None where there is no store of models."""
    prefixes: PrefixFolders | None = None
    """The folders of cached prompts; None where no engine has one."""
    collector: ModelCollector | None = None
    """The collection of unused models; None where there is no store of models."""
    snapshots: ObjectCache[ModelSnapshot] | None = None
    """The commits of hub models; None where no model folder is inspected."""
    warmup: CacheWarmup | None = None
    """The warm-up of prefix caches; None where agents do not share."""
    sleeper: MachineSleeper | None = None
    """The machine's sleep; None where it cannot be put to sleep, as on Linux."""
    assertion: PowerAssertion | None = None
    """The assertion against idle sleep; None where the system has none."""
    send_packets: Callable[[Sequence[WakePacket]], None] = send_packets
    """Sends magic packets."""
    last_assignment: LastAssignment | None = None
    """The assignment that is served when the agent starts without the store; None if it waits for the store."""


def real_dependencies(transport: Transport, clock: Clock, config: AgentConfig) -> Dependencies:
    """Return the dependencies of an agent on a real machine."""
    listings = FleetListings(read=partial(read_listings, transport), errors=(StoreError,))
    config = replace(config, hubs=replace(config.hubs, fleet=listings))
    splits = SplitInspector(config.state_dir / "splitting", clock)
    uses = ModelUses(transport, clock)
    replicas = _assigned_replicas(transport, clock, config)
    snapshots = Informer(
        transport, keys.SNAPSHOT_PREFIX, lambda item: codec.decode(ModelSnapshot, item), clock
    )
    assigned = preload_cache(transport, clock, config.name)
    collector = _model_collector(transport, clock, config, assigned)
    limits = FetchLimits(attempts=4, rate_limit_wait_s=0.0)
    fetcher = ModelFetcher(collector.store, clock, limits=limits, make_room=collector.make_room)
    fetches = _model_fetches(transport, clock, config, fetcher, snapshots)
    exchange = fetches.exchange
    preloads = ModelPreloads(assigned, fetches)

    async def report_models(paths: set[str]) -> tuple[ModelReport, ...]:
        known = {item.folder: item for item in snapshots.items.values()}
        split = inspection.split_models(uses.items.values(), snapshots.items.values())

        def report() -> tuple[ModelReport, ...]:
            found = inspection.report_models(
                paths,
                config.models_dir,
                casts_to_float32=config.casts_to_float32,
                splits=splits,
                split=split,
                snapshots=known,
            )
            return preloads.with_problems(with_missing_bytes(found, known, collector.store))

        return await asyncio.to_thread(report)

    tls = None if config.credentials is None else NodeTls(config.credentials, clock)
    preflight = metal.preflight_of(clock, config.state_dir)
    wiring, is_mac = WiringPolicy(), sys.platform == "darwin"
    assertion = PowerAssertion() if is_mac else None
    # Before the first reading of the machine, which engines do not wait for.
    with suppress(OSError):
        wiring.has_panics = machine_conditions.are_many(panic_reports.read_panics(), clock.now())
    return Dependencies(
        tls=tls,
        metal=preflight,
        disk_rate=DiskRate(config.models_dir, clock),
        load=LoadSampler(clock),
        engines=_engine_processes(config, tls, preflight),
        health=HealthClient(tls),
        references=GoldenReferences(config.state_dir),
        report_models=report_models,
        report_adapters=_adapter_reporter(config),
        replicas=replicas,
        fetches=fetches,
        preloads=preloads,
        pulls=ModelPulls(
            fetcher,
            config.hubs,
            clock,
            exchange=exchange,
            grants=HubGrants(store=transport, node=config.name, hubs=config.hubs),
        ),
        quantizations=Quantizations(
            collector,
            clock,
            available_bytes=available_memory_bytes,
            on_published=lambda: None if exchange is None else exchange.rescan(),
        ),
        limits=PoolLimits(
            transport=transport,
            clock=clock,
            node=config.name,
            status=config.status,
            download=fetches.bandwidth,
            uploads=None if exchange is None else exchange.uploads,
            collector=collector,
            wiring=wiring,
            assertion=assertion,
        ),
        wiring=wiring,
        sleeper=MacSleeper(clock) if is_mac else None,
        assertion=assertion,
        prefixes=PrefixFolders(
            config.prefixes_dir, lambda: uses.items.values() if uses.synced else None, clock
        ),
        collector=collector,
        snapshots=snapshots,
        warmup=_cache_warmup(config, tls, StoredSiblings(transport), exchange),
        last_assignment=replicas,
        uses=uses,
        is_inspecting=splits.is_inspecting,
        readings=SystemMachineReader(config.models_dir, state_dir=config.state_dir),
        fabric=NodeFabricTests(
            transport, clock, node=config.name, folder=config.state_dir / "fabric"
        ),
    )


def _engine_processes(
    config: AgentConfig, tls: NodeTls | None, preflight: MetalPreflight | None
) -> EngineProcesses:
    stop_order = StopOrder(config.state_dir)
    return EngineProcesses(
        config.state_dir / "engines",
        node=config.name,
        addresses=config.addresses,
        identity_dir=None if tls is None else tls.folder,
        prefixes=config.prefixes_dir,
        stopped=stop_order.refusal,
        refusal=lambda: preflight.refusal if preflight else "",
        variables=config.engine_variables,
    )


def _adapter_reporter(config: AgentConfig) -> ReportAdapters:
    async def report_adapters(paths: set[str]) -> tuple[AdapterReport, ...]:
        return await asyncio.to_thread(
            inspection.report_adapters,
            paths,
            config.models_dir,
            casts_to_float32=config.casts_to_float32,
        )

    return report_adapters


def _model_collector(
    transport: Transport,
    clock: Clock,
    config: AgentConfig,
    preloads: ObjectCache[PreloadAssignment],
) -> ModelCollector:
    async def users() -> ModelUsers:
        engines, assigned = config.state_dir / "engines", tuple(preloads.items.values())
        return await read_users(transport, config.models_dir, engines, assigned)

    return ModelCollector(
        ModelStore(config.models_dir, clock, reserve_bytes=config.model_disk.reserve_bytes),
        EventRecorder(transport, clock, source=f"Node/{config.name}"),
        users,
        node=config.name,
        policy=config.model_disk.collection,
    )


def _model_fetches(
    transport: Transport,
    clock: Clock,
    config: AgentConfig,
    fetcher: ModelFetcher,
    snapshots: ObjectCache[ModelSnapshot],
) -> ModelFetches:
    def packed_headers(folder: str) -> str | None:
        if not snapshots.synced and not snapshots.refusal:
            return None
        return next(
            (item.headers for item in snapshots.items.values() if item.folder == folder), ""
        )

    exchange = None
    # Files are given to nodes that prove who they are.
    if config.credentials is not None and config.api_port is not None:
        uploads = Uploads(clock, bytes_per_s=config.upload_bytes_per_s)
        exchange = ModelExchange(transport, clock, config.credentials, fetcher.store, uploads)
    return ModelFetches(
        fetcher,
        config.hubs,
        transport,
        clock,
        parts=ModelParts(config.name, packed_headers),
        exchange=exchange,
    )


def _cache_warmup(
    config: AgentConfig,
    tls: NodeTls | None,
    siblings: Siblings,
    exchange: ModelExchange | None,
) -> CacheWarmup | None:
    if config.credentials is None or exchange is None:
        return None
    return CacheWarmup(
        node=config.name,
        siblings=siblings,
        addresses=exchange,
        peers=HttpPeerPrompts(Dialer(config.credentials)),
        engines=EngineHttp(tls),
    )


def _assigned_replicas(transport: Transport, clock: Clock, config: AgentConfig) -> AssignedReplicas:
    replicas = NodeReplicas(transport, clock, config.name)
    file = AssignmentFile(
        path=config.state_dir / "assignment.json", node=config.name, uid=config.status.uid
    )
    return AssignedReplicas(replicas, file, clock)
