"""Places for what a deployment misses: what can be placed becomes an action, what cannot is remembered. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reconciler.actions import Action, CreateReplica, MoveReplica, PreemptReplica
from reconciler.groups.epochs import Epoch
from reconciler.groups.gang import given_up
from reconciler.groups.renewal import next_epoch, without
from reconciler.observe import Observed, ReplicaView, Tenant
from reconciler.placement.filters import reject
from reconciler.placement.place import Displaces, Placed, Placer, Waits, place
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import Table
from reconciler.placement.want import Want, want_of
from reconciler.rollout import steps
from reconciler.rollout.revisions import contents, with_content
from reconciler.rollout.steps import Ending, Goal, Phase
from schemas.deployment import ModelDeployment
from schemas.replica import replica_name
from schemas.revision import Template


class Placing:
    """Finds places for what is missing, and remembers what it could not place."""

    def __init__(
        self, seen: Observed, deployment: ModelDeployment, goal: Goal, table: Table | None
    ) -> None:
        self._seen = seen
        self._deployment = deployment
        self._goal = goal
        self._table = table
        self._contents = contents(seen)
        self._wants: dict[str, Want] = {}
        self._placer: Placer | None = None
        self.actions: list[Action] = []
        self.why: Unschedulable | None = None
        """Why there will be fewer replicas than wanted."""
        self.no_room: Unschedulable | None = None
        """Why one more than wanted could not be placed."""
        self._unfit: dict[str, Unschedulable] = {}
        self.endings: list[Ending] = []
        """Replicas that can be placed elsewhere only as others."""

    @property
    def is_stuck(self) -> bool:
        """Whether something could not be placed, be it only one more than wanted."""
        return bool(self._unfit)

    def place(self, staying: Sequence[ReplicaView], step: steps.Step, leaving: int) -> None:
        """Move what is on lost nodes, then make what the step says.

        Only up to the wanted number may others be displaced: a surge is a convenience.
        """
        seen = self._seen
        if seen.awaits_reports:
            return
        ending = {one.replica.name for one in step.endings}
        kept = sorted((r for r in staying if r.name not in ending), key=lambda r: r.ordinal)
        for replica in (r for r in kept if r.epoch is not None):
            self._next_epoch(replica, replica.epoch)
        for replica in (r for r in kept if r.is_node_lost and r.epoch is None):
            renewed = steps.renewed(self._goal, seen, replica)
            self._needed(renewed, replica.replica.spec.template, replica)
        there = len(staying) - len(ending) + leaving
        names = _free_names(seen)
        for template in step.makes:
            if there < seen.wanted:
                self._needed(template, seen.stable, next(names))
            elif not self._one(template, next(names), is_extra=True):
                self.no_room = self.no_room or self._unfit.get(template)
            there += 1

    def _needed(self, template: str, before: str, what: ReplicaView | str) -> None:
        """Place what is wanted; where the new version fits nowhere, the one before keeps up the number.

        Not while one of ours still ends: its room is what the new version waits for.
        """
        if self._one(template, what, is_extra=False) or template not in self._unfit:
            return
        is_of_use = before in self._contents and before != template
        ends = any(r.is_deleting for r in self._seen.replicas)
        if is_of_use and not ends and self._one(before, what, is_extra=False):
            self.no_room = self.no_room or self._unfit[template]
        else:
            self.why = self.why or self._unfit[template]

    def _next_epoch(self, replica: ReplicaView, epoch: Epoch | None) -> None:
        """Begin the next epoch of a replica whose ranks cannot go on together, once it is time."""
        formation = replica.replica.spec.formation
        content = self._contents.get(replica.replica.spec.template)
        if epoch is None or formation is None or content is None or not epoch.over:
            return
        if epoch.is_given_up:
            self.why = self.why or given_up(formation, replica.name, epoch)
            return
        if epoch.wait_s(formation) > 0:
            return
        want = self._want(replica.replica.spec.template, content)
        found = self._placer_for().again(want, replica.replica, epoch)
        if isinstance(found, Placed):
            self.actions.append(next_epoch(replica, found, epoch))
            return
        self.why = self.why or found
        if content.sharding == "Auto":
            # Another group may do; nothing of it serves, so it is no loss.
            self.endings.append(Ending(replica=replica, because="GroupLost"))

    def fits_instead(self, template: str, *, of: ReplicaView) -> bool:
        """Return whether a replica of the version would fit where another is, once that has ended."""
        want = self._want(template, self._contents[template])
        there = [without(node, of) for node in self._seen.nodes if node.name in of.nodes]
        if want.spec.sharding == "Never":
            return any(reject(want, node) is None for node in there)
        left = {node.name: node for node in there}
        nodes = [left.get(node.name, node) for node in self._seen.nodes]
        return isinstance(place(want, nodes, self._seen.groups), Placed)

    def _one(self, template: str, what: ReplicaView | str, *, is_extra: bool) -> bool:
        """Place one replica; return whether it has a node now."""
        if template in self._unfit:
            return False  # what does not fit once does not fit again
        content = self._contents[template]
        placer, want = self._placer_for(), self._want(template, content)
        outcome = placer.place(want) if is_extra else placer.claim(want)
        name = what if isinstance(what, str) else what.name
        match outcome:
            case Placed():
                self.actions.append(_assign(what, self._checked(outcome, template), content))
                return True
            case Displaces(victims=victims, why=why):
                self.actions.extend(self._preempt(name, victim) for victim in victims)
                self.why = self.why or why
            case Waits(why=why):
                self.why = self.why or why
            case Unschedulable():
                self._unfit[template] = outcome
        return False

    def _checked(self, placed: Placed, template: str) -> Placed:
        """Return the same with the answer that other replicas of the version gave, to check a group's first by."""
        if placed.form is None:
            return placed
        model = placed.form.model
        known = (
            one.epoch.golden
            for one in self._seen.replicas
            if one.epoch is not None
            and one.replica.spec.template == template
            and one.replica.spec.model.path == model
        )
        golden = next((one for one in known if one is not None), None)
        return replace(placed, form=placed.form.with_golden(golden))

    def _placer_for(self) -> Placer:
        """Return who places, after those of a higher priority have chosen."""
        if self._placer is None:
            self._placer = Placer(self._table or Table(self._seen.nodes), self._seen.groups)
            for rival in self._seen.rivals:
                for _ in range(rival.missing):
                    if isinstance(self._placer.claim(rival.want), Unschedulable):
                        break
            self._placer.discount(self._seen.name, self._soon_free())
        return self._placer

    def _soon_free(self) -> list[str]:
        """Return the nodes of replicas that end or are about to be replaced: what comes is spread without them.

        A limit of replicas on one node counts them as long as they are there.
        """
        if self._deployment.spec.placement.max_replicas_per_node is not None:
            return []
        kept = {self._goal.target, self._goal.trial}
        is_rolling = self._goal.phase in (Phase.ROLLING, Phase.ROLLED_BACK)
        return [
            node
            for one in self._seen.replicas
            if one.is_deleting or (is_rolling and one.replica.spec.template not in kept)
            for node in sorted(one.nodes)
        ]

    def _want(self, template: str, content: Template) -> Want:
        # One object for all of a version's replicas: the placer ranks the nodes once for each.
        if template not in self._wants:
            told = with_content(self._deployment, content)
            self._wants[template] = want_of(told, apart_from=self._seen.apart_from)
        return self._wants[template]

    def _preempt(self, name: str, victim: Tenant) -> PreemptReplica:
        priority = self._deployment.spec.priority
        return PreemptReplica(
            name=victim.replica,
            deployment=victim.deployment,
            version=victim.version,
            by=name,
            because=f"{name} has priority {priority}, {victim.replica} has {victim.priority}",
        )


def _free_names(seen: Observed) -> Iterator[str]:
    """Yield names that no replica has, the lowest first: derived, so that making one twice collides."""
    taken = {r.name for r in seen.replicas}
    ordinal = 0
    while True:
        name = replica_name(seen.name, ordinal)
        if name not in taken:
            yield name
        ordinal += 1


def _assign(what: ReplicaView | str, to: Placed, content: Template) -> Action:
    if isinstance(what, str):
        return CreateReplica(name=what, ranks=to.ranks, form=to.form, content=content)
    return MoveReplica(
        name=what.name, ranks=to.ranks, form=to.form, content=content, version=what.version
    )
