"""The leader's task that puts idle Macs to sleep and wakes them: orders for agents, and attempts to wake.

The decisions are pure (`reconciler/nodes/power.py`); agents carry the orders out (`nodeagent/node/power.py`).
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Literal
from urllib.parse import urlsplit

from machinery.backoff import SLOW_RETRY, Backoff, Retries
from machinery.clock import Clock
from reconciler.deployments.demand.gateway_metrics import Demand
from reconciler.listers.lister import Lister
from reconciler.nodes import power
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.power import PowerDecision, PowerView, WakeState
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import NodeView, request_for
from reconciler.placement.table import NodeTable
from reconciler.services.demand_weeks import DemandWeeks
from schemas.event import ObjectReference
from schemas.meta import ENDED_BECAUSE, Condition, ObjectKey, find_condition, make_condition
from schemas.node import NodeStatus
from schemas.pools import NodePool, in_pool
from schemas.power import PowerOrder, WakeRequest
from schemas.records import GatewayLease, ReconcilerLease
from schemas.replica import Replica
from schemas.wire.engine_address import is_loopback
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.events import EventRecorder
from store.port import Delete, Guard, Operation, Put, Transport

log = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0
_BACKOFF: Final = Backoff(first_s=1.0, limit_s=10.0)
# Gateways and reconcilers come and go rarely.
_CONTROL_S: Final = 10.0
_BATCH: Final = 100
# From the lease of a Mac that woke to the endpoints of its engines.
_FIRST_TOKEN_S: Final = 15.0
ASLEEP: Final = "Asleep"


@dataclass(slots=True, kw_only=True)
class PowerController:
    """Writes the orders of sleep and wake. Needs leadership; `run()` runs for as long."""

    lister: Lister
    liveness: NodeLiveness
    transport: Transport
    clock: Clock
    recorder: EventRecorder
    demand: Callable[[str], Demand | None]
    table: Callable[[], NodeTable]
    """Returns all nodes as placement sees them."""
    unplaced: Callable[[], Iterable[str]]
    """Returns the deployments with a replica that has no room on the Macs that are awake."""
    fence: Callable[[], Guard]
    """Guards what is written."""
    on_change: Callable[[ObjectKey], None]
    """Gets each node whose condition changed, and each deployment whose replicas are lost."""
    _weeks: DemandWeeks = field(init=False)
    _began: float = field(init=False)
    _used_at: dict[str, float] = field(default_factory=dict)
    """Monotonic time of the last request by deployment."""
    _returned_at: dict[str, float] = field(default_factory=dict)
    """Monotonic time of the last wake by node."""
    _orders: dict[str, PowerOrder] = field(default_factory=dict)
    _asleep: set[str] = field(default_factory=set)
    _wakes: dict[str, WakeState] = field(default_factory=dict)
    _requests: dict[str, tuple[str, WakeRequest]] = field(default_factory=dict)
    """The relay and its request, by the node to wake."""
    _coming: dict[str, int] = field(default_factory=dict)
    """By deployment, the requests that Macs will take which are woken in this round."""
    _given_up_at: dict[str, float] = field(default_factory=dict)
    _control: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Hosts of gateways and of reconcilers."""
    _control_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._weeks = DemandWeeks(self.transport, self.clock, self.fence)
        self._began = self.clock.monotonic()

    async def run(self) -> None:
        """Decide every second, forever; does nothing while no pool lets Macs sleep."""
        retries, last_error, is_restored = Retries(_BACKOFF, self.clock), "", False
        while True:
            try:
                if not is_restored:
                    await self._restore()
                    is_restored = True
                await self._advance()
            except (StoreError, codec.UndecodableError) as error:
                if str(error) != last_error:
                    log.info("sleep and wake wait for the store", extra={"why": str(error)})
                last_error = str(error)
                await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
                continue
            retries.reset()
            await self.clock.sleep(_PERIOD_S)

    async def _restore(self) -> None:
        """Read what earlier leaders have ordered, learned and given up."""
        await self._weeks.read()
        async with aclosing(self.transport.pages(keys.POWER_ORDER_PREFIX)) as pages:
            async for page in pages:
                for item in page.items:
                    self._orders[keys.node_of_power_order(item.key)] = PowerOrder()
        for name in self.lister.announced_asleep():
            life, _ = self.lister.node_life(name)
            asleep = None if life is None else find_condition(life.conditions, ASLEEP)
            if asleep is not None and asleep.reason == "WakeFailed":
                self.liveness.give_up(name, self.clock.monotonic())

    async def _advance(self) -> None:
        pools = [pool for pool in self.lister.pools() if pool.spec.power is not None]
        asleep = self.liveness.asleep(self.lister)
        if not (pools or asleep or self._orders or self.liveness.sleep_conditions):
            return
        now, monotonic = self.clock.now(), self.clock.monotonic()
        for name in self._asleep - asleep:
            self._end_wake(name)
            if self.lister.is_ready(name):
                self._returned_at[name] = monotonic
                await self._record(name, "NodeWoken", "its agent is back")
        self._asleep = set(asleep)
        due = (
            name
            for name in self.liveness.given_up()
            if monotonic >= self._given_up_at.get(name, self._began) + SLOW_RETRY.limit_s
        )
        for name in self._unplaced_needs(frozenset(due)):
            self.liveness.forgive(name)  # the next round wakes it once more
        names = self._observe_demand(monotonic)
        await self._weeks.advance(names, now)
        await self._read_control(monotonic)
        decisions = self._decide_all(pools, asleep, now, monotonic)
        for name in sorted(asleep):
            await self._wake(name, decisions[name], now, monotonic)
        await self._write(self._wanted_orders(decisions))
        self._set_conditions(decisions)

    def _observe_demand(self, monotonic: float) -> list[str]:
        names = [deployment.name for deployment in self.lister.declared_deployments()]
        for name in names:
            demand = self.demand(name)
            is_used = demand is not None and self._weeks.observe(name, demand)
            # With incomplete demand a request may have been missed.
            if demand is None or is_used or not demand.is_complete:
                self._used_at[name] = monotonic
        return names

    async def _read_control(self, monotonic: float) -> None:
        """Read where gateways and reconcilers run."""
        if monotonic - self._control_at < _CONTROL_S:
            return
        gateways = (await self.transport.list(keys.GATEWAY_LEASE_PREFIX)).items
        reconcilers = (await self.transport.list(keys.RECONCILER_LEASE_PREFIX)).items
        urls = (codec.decode(GatewayLease, item).url for item in gateways)
        identities = (codec.decode(ReconcilerLease, item).identity for item in reconcilers)
        self._control = (
            frozenset(urlsplit(url).hostname or "" for url in urls),
            frozenset(_host(identity.partition("/")[0]) for identity in identities),
        )
        self._control_at = monotonic

    def _decide_all(
        self, pools: Sequence[NodePool], asleep: frozenset[str], now: datetime, monotonic: float
    ) -> dict[str, PowerDecision]:
        """Return the decision about each Mac that sleeps or is in a pool with spec.power."""
        lister = self.lister
        staying = {n: s for n in lister.ready_nodes() if (s := lister.node_status(n)) is not None}
        unplaced = self._unplaced_needs(asleep)
        decisions: dict[str, PowerDecision] = {}
        used = {name: self._last_use(name) for name in {*staying, *asleep}}
        self._coming = dict.fromkeys(self._coming, 0)

        def order(name: str) -> tuple[bool, bool, float, str]:
            # Those that are being woken first, so that no other is woken for the same requests. The Mac that was used
            # last goes last: if one must stay awake to wake the others, it is this one.
            is_waking = name in self._wakes
            return not is_waking, bool(lister.replicas_on(name)), used[name], name

        for name in sorted(used, key=order):
            node, is_asleep = lister.node(name), name in asleep
            own = [pool for pool in pools if in_pool(pool, node)]
            if node.status is None or not (own or is_asleep):
                continue
            replicas = lister.replicas_on(name)
            others = [status for other, status in staying.items() if other != name]
            deployments = {replica.spec.deployment for replica in replicas}
            view = PowerView(
                policy=power.power_policy(own),
                is_asleep=is_asleep,
                quiet_s=monotonic - used[name],
                is_expected=any(self._weeks.is_expected(each, now) for each in deployments),
                need=self._need(replicas, is_draining=node.spec.draining) or unplaced.get(name),
                obstacle=None
                if is_asleep
                else next(self._obstacles(name, node.status, replicas), None)
                or power.link_obstacle(node.status, others),
                awake_until=node.spec.awake_until,
            )
            decisions[name] = power.decide(view, now)
            if not decisions[name].is_awake:
                staying.pop(name, None)
        return decisions

    def _last_use(self, name: str) -> float:
        """Return the monotonic time of the last request for a model of the Mac, or of its last wake."""
        deployments = {replica.spec.deployment for replica in self.lister.replicas_on(name)}
        used_at = (self._used_at.get(deployment, self._began) for deployment in deployments)
        return max(self._began, self._returned_at.get(name, self._began), *used_at)

    def _need(self, replicas: Iterable[Replica], *, is_draining: bool) -> PowerDecision | None:
        """Return why the replicas of a Mac need it now."""
        for replica in replicas:
            name, notes = replica.spec.deployment, replica.metadata.annotations
            is_ending = replica.metadata.deletion_timestamp is not None
            is_idle = notes.get(ENDED_BECAUSE, "").startswith("ScaledDown")
            if is_draining or (is_ending and not is_idle):
                return PowerDecision("ReplicaWaits", f"replica {replica.name} ends")
            demand = self.demand(name)
            if is_ending or demand is None or not demand.requests:
                continue
            able = [r for r in self.lister.replicas_of(name) if self._may_serve(r)]
            coming = self._coming.get(name, 0)
            if demand.requests > coming + sum(r.spec.concurrency for r in able):
                self._coming[name] = coming + self._expected_slots(replica)
                return PowerDecision("RequestsWait", f"requests wait for {name}")
        return None

    def _may_serve(self, replica: Replica) -> bool:
        """Return whether a replica serves, or does so in a moment because its Mac woke."""
        node = replica.spec.ranks[0].node
        age_s = self.clock.monotonic() - self._returned_at.get(node, float("-inf"))
        has_just_woken = age_s < _FIRST_TOKEN_S and self.lister.is_ready(node)
        return has_just_woken or self.lister.is_serving(replica)

    def _expected_slots(self, replica: Replica) -> int:
        """Return the requests that a replica on a Mac that sleeps will take; 0 if a first attempt to wake it failed."""
        node = replica.spec.ranks[0].node
        has_failed = node in self._wakes and self._wakes[node].attempts > 1
        return 0 if has_failed or self.lister.is_ready(node) else replica.spec.concurrency

    def _unplaced_needs(self, asleep: frozenset[str]) -> dict[str, PowerDecision]:
        """Return the Macs that sleep and would have room for replicas that no other Mac can take."""
        needs: dict[str, PowerDecision] = {}
        names = sorted(self.unplaced()) if asleep else ()
        views = [_awake_view(view) for view in self.table().named(asleep)] if names else []
        for name in names:
            deployment = self.lister.deployment(name)
            if deployment is None or not deployment.spec.model.folder:
                continue
            request = request_for(deployment)
            fitting = (view.name for view in views if find_rejection(request, view) is None)
            node = next(fitting, "")
            if node:
                needs.setdefault(
                    node, PowerDecision("ReplicaUnplaced", f"a replica of {name} fits only here")
                )
        return needs

    def _obstacles(
        self, name: str, status: NodeStatus, replicas: Sequence[Replica]
    ) -> Iterator[PowerDecision]:
        """Yield the reasons why a Mac that is awake must not sleep, whatever its network."""
        lister = self.lister
        if status.is_part:
            yield PowerDecision("PartOfMachine", "other agents run on the same machine")
        if status.runs_etcd:
            yield PowerDecision("RunsEtcd", "etcd would lose a member")
        hosts = {_host(status.hostname), status.hostname.lower(), status.address}
        hosts |= {interface.address for interface in status.fabric.interfaces}
        gateways, reconcilers = self._control
        if gateways and all(host in hosts or is_loopback(host) for host in gateways):
            yield PowerDecision("LastGateway", "no gateway runs elsewhere")
        if reconcilers and reconcilers <= hosts:
            yield PowerDecision("LastReconciler", "no reconciler runs elsewhere")
        if status.is_owner_active or status.is_in_meeting:
            yield PowerDecision("OwnerActive", "its owner uses it")
        for replica in replicas:
            if replica.spec.formation is not None:
                yield PowerDecision("GroupMember", f"{replica.name} has ranks on other Macs, too")
            is_ending = replica.metadata.deletion_timestamp is not None
            if is_ending or not lister.is_serving(replica):
                yield PowerDecision("ReplicaNotIdle", f"{replica.name} starts, ends or fails")
            demand = self.demand(replica.spec.deployment)
            if demand is None or not demand.is_complete:
                yield PowerDecision("DemandUnknown", "not every gateway shows its requests")
        if any(not lister.has_files(name, each.source.folder) for each in lister.preloads_on(name)):
            yield PowerDecision("FilesMissing", "it fetches a model that it will run")

    async def _wake(
        self, name: str, decision: PowerDecision, now: datetime, monotonic: float
    ) -> None:
        """Make the next attempt to wake a Mac that is needed, or give it up."""
        if not decision.is_awake:
            self._end_wake(name)
            return
        before, status = self._wakes.get(name), self.lister.node_status(name)
        if before is None:
            await self._record(name, "NodeWaking", f"{decision.reason}: {decision.message}")
        state = power.next_attempt(before, monotonic, jitter=random.random())
        self._wakes[name] = state
        if state.is_over(monotonic):
            await self._give_up(name, monotonic)
            return
        if status is None or (before is not None and before.attempts == state.attempts):
            return
        lister = self.lister
        ready = ((n, lister.node_status(n)) for n in sorted(lister.ready_nodes()))
        awake = [(n, relay) for n, relay in ready if relay is not None]
        relay = power.pick_relay(status, awake, state.attempts)
        if relay is None:
            self._requests.pop(name, None)
            log.warning("no Mac can wake another", extra={"node": name})
            return
        first = self._requests[name][1].requested_at if name in self._requests else now
        node, packets = relay
        request = WakeRequest(
            node=name, attempt=state.attempts, requested_at=first, packets=packets[:16]
        )
        self._requests[name] = node, request

    async def _give_up(self, name: str, monotonic: float) -> None:
        """Count a Mac that did not wake as lost, so that its replicas move."""
        self._end_wake(name)
        self.liveness.give_up(name, monotonic)
        self._given_up_at[name] = monotonic
        message = f"it did not come back within {power.WAKE_LIMIT_S:.0f} s; its replicas move"
        failed = make_condition(ASLEEP, "WakeFailed", message, holds=False)
        self._set_condition(name, failed)
        for replica in self.lister.replicas_on(name):
            self.on_change(ObjectKey("ModelDeployment", replica.spec.deployment))
        await self._record(name, "WakeFailed", message, "Warning")

    def _end_wake(self, name: str) -> None:
        self._wakes.pop(name, None)
        self._requests.pop(name, None)

    def _wanted_orders(self, decisions: Mapping[str, PowerDecision]) -> dict[str, PowerOrder]:
        idle = {name for name, decision in decisions.items() if not decision.is_awake}
        # A Mac between the end of its lease and its status is neither awake nor asleep: its order stays.
        idle |= {
            name
            for name, order in self._orders.items()
            if order.sleep and name not in decisions and not self.lister.is_ready(name)
        }
        orders = {name: PowerOrder(sleep=True) for name in idle}
        for _, (relay, request) in sorted(self._requests.items()):
            order = orders.get(relay, PowerOrder())
            orders[relay] = order.model_copy(update={"wakes": (*order.wakes, request)})
        return orders

    async def _write(self, wanted: dict[str, PowerOrder]) -> None:
        """Write the orders that differ; withdrawals and requests to wake in one transaction."""
        writes: list[Operation] = []
        for name in sorted(wanted.keys() | self._orders.keys()):
            key, order = keys.power_order_key(name), wanted.get(name)
            if order is None:
                writes.append(Delete(key=key))
            elif order != self._orders.get(name):
                writes.append(Put(key=key, value=codec.encode(order)))
        for first in range(0, len(writes), _BATCH):
            await self.transport.commit([self.fence()], writes[first : first + _BATCH])
        self._orders = wanted

    def _set_conditions(self, decisions: Mapping[str, PowerDecision]) -> None:
        """Publish the condition of each Mac that changed."""
        conditions = self.liveness.sleep_conditions
        for name in conditions.keys() - decisions.keys():
            if conditions[name].reason != "WakeFailed" or self.lister.is_ready(name):
                del conditions[name]
                self.on_change(ObjectKey("Node", name))
        for name, decision in decisions.items():
            if name not in self._asleep:
                new = make_condition(ASLEEP, decision.reason, decision.message, holds=False)
            elif name in self._wakes:
                new = make_condition(ASLEEP, "Waking", decision.message, holds=True)
            elif name in self.liveness.asleep(self.lister):
                new = make_condition(ASLEEP, "Sleeping", "a request wakes it", holds=True)
            else:
                continue  # given up in this round
            self._set_condition(name, new)

    def _set_condition(self, name: str, new: Condition) -> None:
        if self.liveness.sleep_conditions.get(name) != new:
            self.liveness.sleep_conditions[name] = new
            self.on_change(ObjectKey("Node", name))

    async def _record(
        self, name: str, reason: str, message: str, type_: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        about = ObjectReference(kind="Node", name=name)
        await self.recorder.record(about, reason, message, type_=type_)


def _host(name: str) -> str:
    return name.lower().partition(".")[0]


def _awake_view(view: NodeView) -> NodeView:
    """Return a Mac that sleeps as it would be awake, without the replicas that end then."""
    staying = tuple(one for one in view.allocations if not one.is_ending)
    used = view.used_bytes - sum(one.bytes for one in view.allocations if one.is_ending)
    return replace(view, is_ready=True, allocations=staying, used_bytes=used)
