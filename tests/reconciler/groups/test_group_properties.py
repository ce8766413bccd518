"""Properties of groups: all ranks or none, no memory assigned twice, no needless writes.

Real parts decide and write. Agents are simulated: they start every rank, or lose it.
"""

import random
from dataclasses import replace
from datetime import datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.actions import (
    Action,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveReplica,
    StartRanks,
)
from reconciler.deployments.execute import WriteContext, make_replica, remake_replica
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.plan import DeploymentPlan, plan
from reconciler.deployments.status import replica_status
from reconciler.groups.epochs import epoch_of, mark_given_up
from reconciler.groups.group_view import GroupView, group_shapes
from reconciler.placement.inputs import NodeView
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment
from schemas.meta import Condition, ConditionStatus
from schemas.replica import RankStatus, Replica, ReplicaStatus
from tests.support.reconciler_world import counted, group, mac, seen, sharded
from tests.support.sampling import samples
from tests.support.world import NOW

Key = tuple[str, str, int]
"""A node, a replica, and the number of a rank."""


def _condition(type_: str, reason: str, *, holds: bool) -> Condition:
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=type_, status=truth, reason=reason, message="so it is")


class World:
    """One deployment, its groups and its Macs."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now: datetime = NOW
        self.nodes = {name: self._mac(name) for name in "abcde"[: dice.randint(2, 5)]}
        self.away: set[str] = set()
        self.groups = self._groups()
        self.deployment: ModelDeployment = sharded(
            dice.choice(["pair", "pair", "Auto"]), replicas=dice.randint(0, 3)
        )
        self.replicas: dict[str, Replica] = {}
        self.statuses: dict[str, ReplicaStatus] = {}
        self.reports: dict[Key, RankStatus] = {}
        self.secrets = 0
        self.epochs: set[tuple[str, int]] = set()
        """Every epoch of every replica that there ever was."""

    def _mac(self, name: str) -> NodeView:
        memory_gib = self.dice.choice([6, 10, 10, 10, 10, 20, 20])
        return mac(name, memory_gib, is_cordoned=self.dice.random() < 0.1)

    def _groups(self) -> list[GroupView]:
        letters, dice = "".join(self.nodes), self.dice
        fallbacks: list[dict[str, object]] = dice.choice(
            [[], [{"model": "qwen-4bit"}], [{"size": 2}], [{"parallelism": "Pipeline"}]]
        )
        size = dice.randint(2, len(letters))
        pair = group(letters, size=size, fallbacks=fallbacks)
        if dice.random() < 0.3:
            pair = group(letters, size=size, selector={}, fallbacks=fallbacks)
        return [pair, group(letters[:2], name="other")]

    def observe(self) -> DeploymentView:
        """Return the fleet as the planner sees it."""
        views = [self._view(one) for _, one in sorted(self.replicas.items())]
        nodes = [replace(node, is_ready=node.name not in self.away) for node in self.nodes.values()]
        return seen(self.deployment, views, nodes, self.groups)

    def _view(self, replica: Replica) -> ReplicaView:
        reports = self._reports_of(replica)
        away = frozenset(rank.node for rank in replica.spec.ranks) & self.away
        old = self.statuses.get(replica.name)
        epoch = epoch_of(replica, reports, away=self.away, lost=self.away, old=old, now=self.now)
        formation = replica.spec.formation
        if formation is not None:
            named = next(view for view in self.groups if view.name == formation.group)
            epoch = mark_given_up(replica, epoch, len(group_shapes(named.spec)))
        is_over = epoch is not None and epoch.over != ""
        said = reports[0] is not None and any(
            condition.type == "Ready" and condition.status is ConditionStatus.TRUE
            for condition in reports[0].conditions
        )
        return ReplicaView(
            replica=replica,
            version=1,
            is_ready=said and not is_over and replica.spec.ranks[0].node not in self.away,
            reported_ready=said and not is_over,
            is_stopped=all(
                any(condition.type == "Stopped" for condition in report.conditions)
                if report is not None
                else rank.node in self.away
                for rank, report in zip(replica.spec.ranks, reports, strict=True)
            ),
            is_node_lost=bool(away),
            epoch=epoch,
            away_nodes=away,
            leaving_ranks=tuple(
                leaving_rank
                for leaving_rank in replica.spec.leaving
                if (leaving_rank.node, replica.name, leaving_rank.rank) in self.reports
            ),
        )

    def _reports_of(self, replica: Replica) -> list[RankStatus | None]:
        epoch = replica.spec.formation.epoch if replica.spec.formation else 0
        keys = [(rank.node, replica.name, at) for at, rank in enumerate(replica.spec.ranks)]
        found = [self.reports.get(key) for key in keys]
        return [
            status
            if status and (status.replica_uid, status.epoch) == (replica.metadata.uid, epoch)
            else None
            for status in found
        ]

    def step(self) -> DeploymentPlan:
        """Plan once, execute the plan, and write the statuses."""
        decided = plan(self.observe())
        for action in decided.actions:
            self._write(action)
        for view in self.observe().replicas:
            old = self.statuses.get(view.name)
            reports = self._reports_of(view.replica)
            self.statuses[view.name] = replica_status(view, reports, old=old, now=self.now)
        return decided

    def _write(self, action: Action) -> None:
        stamp = WriteContext(now=self.now, secret=self._secret)
        match action:
            case CreateReplica(name=name) | MoveReplica(name=name):
                self._assign(make_replica(action, self.deployment, stamp))
            case ReformReplica(name=name):
                self._assign(remake_replica(action, self.replicas[name], stamp))
            case ReleaseRanks(name=name, leaving=leaving):
                spec = self.replicas[name].spec.model_copy(update={"leaving": leaving})
                self.replicas[name] = self.replicas[name].model_copy(update={"spec": spec})
            case StartRanks(name=name):
                formation = self.replicas[name].spec.formation
                assert formation is not None
                started = formation.model_copy(update={"awaits_files": False})
                spec = self.replicas[name].spec.model_copy(update={"formation": started})
                self.replicas[name] = self.replicas[name].model_copy(update={"spec": spec})
            case DeleteReplica(name=name):
                marks = {"deletion_timestamp": self.now}
                metadata = self.replicas[name].metadata.model_copy(update=marks)
                edited = self.replicas[name].model_copy(update={"metadata": metadata})
                self.replicas[name] = edited
            case RemoveReplica(name=name):
                del self.replicas[name]
                self.statuses.pop(name, None)
                self.reports = {key: one for key, one in self.reports.items() if key[1] != name}
            case _:
                pass  # nothing else is about where replicas are

    def _secret(self) -> str:
        self.secrets += 1
        return f"secret-{self.secrets}"

    def _assign(self, replica: Replica) -> None:
        formation = replica.spec.formation
        self.replicas[replica.name] = replica
        if formation is not None:
            epoch = (replica.metadata.uid, formation.epoch)
            assert epoch not in self.epochs
            self.epochs.add(epoch)

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def agents_act(self, *, ends: float = 0.0) -> None:
        """Let live agents act; a rank of each epoch ends by itself with the probability `ends`."""
        for replica in self.replicas.values():
            spec, uid = replica.spec, replica.metadata.uid
            epoch = spec.formation.epoch if spec.formation else 0
            is_whole = not any(rank.node in self.away for rank in spec.ranks)
            over = is_whole and epoch > 0 and self.dice.random() < ends
            for at, rank in enumerate(spec.ranks):
                key = (rank.node, replica.name, at)
                if rank.node in self.away:
                    continue
                if replica.metadata.deletion_timestamp is not None:
                    said = _condition("Stopped", "EngineEnded", holds=True)
                elif over and at == len(spec.ranks) - 1:
                    said = _condition("EpochOver", "RankEnded", holds=True)
                else:
                    said = _condition("Ready", "Serving", holds=is_whole and not over)
                before = self.reports.get(key)
                is_used_up = (
                    before is not None
                    and before.epoch == epoch
                    and any(condition.type == "EpochOver" for condition in before.conditions)
                )
                if is_used_up and before is not None and before.replica_uid == uid:
                    continue  # an epoch is used once
                self.reports[key] = RankStatus(
                    replica_uid=uid, node=rank.node, epoch=epoch, conditions=(said,)
                )
        self._retract()

    def _retract(self) -> None:
        """Let live agents remove reports on ranks that are no longer theirs and have ended."""
        there = {
            (rank.node, replica.name, at)
            for replica in self.replicas.values()
            for at, rank in enumerate(replica.spec.ranks)
        }
        self.reports = {
            key: one for key, one in self.reports.items() if key in there or key[0] in self.away
        }

    def disturb(self) -> None:
        """Let one random event happen."""
        name = self.dice.choice(sorted(self.nodes))
        match self.dice.randrange(5):
            case 0:
                self.away.add(name)
            case 1:
                self.away.discard(name)
            case 2:
                node = self.nodes[name]
                self.nodes[name] = replace(node, is_cordoned=not node.is_cordoned)
            case 3:
                spec = self.deployment.spec
                marks = {"context_length": 1536 - spec.context_length + 1024}
                changed = spec.model_copy(update=marks)
                self.deployment = self.deployment.model_copy(update={"spec": changed})
            case _:
                spec = self.deployment.spec
                changed = spec.model_copy(update={"replicas": self.dice.randint(0, 3)})
                self.deployment = self.deployment.model_copy(update={"spec": changed})

    def check(self) -> None:
        """Hold what must always be so."""
        for replica in self.replicas.values():
            spec = replica.spec
            nodes = [rank.node for rank in spec.ranks]
            assert len(set(nodes)) == len(nodes)
            assert (spec.formation is None) == (len(nodes) == 1)
            if spec.formation is not None:
                named = next(
                    group_view
                    for group_view in self.groups
                    if group_view.name == spec.formation.group
                )
                assert len(nodes) == group_shapes(named.spec)[spec.formation.fallback].size
                assert set(nodes) <= set(named.members)
                assert sum(rank.layers for rank in spec.ranks) in (0, 16)
        for view in counted(self.observe()).table.nodes:
            assert view.used_bytes <= view.allocatable_bytes, view.name


seeds = st.integers(0, 2**32)


@settings(max_examples=samples(40), deadline=None)
@given(seeds, st.integers(1, 12))
def test_no_group_is_ever_half_assigned_nor_memory_given_twice(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
        world.check()
        world.agents_act(ends=0.3)
        world.disturb()
        world.pass_time(world.dice.choice([1, 10, 61]))
    world.step()
    world.check()


@settings(max_examples=samples(25), deadline=None)
@given(seeds, st.integers(0, 6))
def test_a_repeated_plan_writes_nothing(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
        world.agents_act(ends=0.3)
        world.disturb()
        world.pass_time(10)
    for _ in range(60):
        decided = world.step()
        world.check()
        world.agents_act()
        world.pass_time(61)
        # Books are not kept here: nothing saves revisions.
        if not [action for action in decided.actions if "Revision" not in type(action).__name__]:
            break
    else:
        raise AssertionError("the plan does not settle")
    view = world.observe()
    assert plan(view) == plan(view)
    shuffled = replace(
        view,
        table=NodeTable(tuple(reversed(view.table.nodes))),
        replicas=tuple(reversed(view.replicas)),
    )
    assert set(plan(shuffled).actions) == set(plan(view).actions)
    again = [action for action in plan(view).actions if "Revision" not in type(action).__name__]
    assert again == []


@settings(max_examples=samples(10), deadline=None)
@given(seeds)
def test_a_crash_loop_slows_down_and_goes_on(seed: int) -> None:
    """An epoch that never serves begins again after minutes and not before, with any fallback."""
    world = World(random.Random(seed))

    def pass_minutes(number: int) -> dict[str, int]:
        for _ in range(number):
            world.step()
            world.agents_act(ends=1.0)
            world.pass_time(61)
        return {
            name: one.spec.formation.epoch
            for name, one in world.replicas.items()
            if one.spec.formation is not None
        }

    before = pass_minutes(40)
    after = pass_minutes(40)
    assert set(after) == set(before)
    # 40 minutes hold 16 of the shortest delays, 2.5 minutes; the longest is 5, and a plan is made once a minute.
    assert all(5 <= after[name] - before[name] <= 17 for name in after)
