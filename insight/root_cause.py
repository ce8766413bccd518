"""The root causes of what is wrong with a fleet, found over deployments, replicas and nodes. Pure.

A problem is one thing that a person can mend. It explains the conditions that follow from it, of any number of objects.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias

from insight.conditions import (
    ObjectCondition,
    Row,
    all_conditions,
    fill_names,
    names_of,
    names_text,
)
from insight.fleet_caches import FleetCaches
from reconciler.listers.caches import BY_DEPLOYMENT
from schemas.deployment import ModelDeploymentStatus
from schemas.reasons import PLACEMENT, reason_of
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup
from store import keys

Tone: TypeAlias = Literal["bad", "warning"]

_MOST_NAMES: Final = 100
_MOST_CHARACTERS: Final = 600
# Conditions of a deployment, in the order in which clients notice them.
_ORDER: Final = ("Available", "Placed", "ModelResolved", "Progressing", "Preempted")
# Reasons of a deployment that only say that a replica, or a Mac, has one.
_OF_REPLICAS: Final = frozenset({"ReplicaNotReady", "CrashLooping", "Stalled"})
_OF_PLACES: Final = frozenset({"Unschedulable", "Stalled"})
_AWAY: Final = "LeaseLost"
# A replica that was just placed: alone it is no problem.
_JUST_PLACED: Final = "WaitingForAgent"
# What may be wrong with the Mac of a replica, by the replica's reason.
_NODE_CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("AgentAway", "NodeLost", "RankSilent", _JUST_PLACED), (_AWAY,)),
    **dict.fromkeys(
        ("EngineSilent", "EngineStuck", "LoadStuck"),
        ("MemoryStranded", "MemoryShort", "ProcessUndying"),
    ),
    **dict.fromkeys(("NoSpace", "DiskFailed"), ("DiskAlmostFull",)),
    **dict.fromkeys(("ProbeFailed", "GoldenFailed"), ("MetalWrong", "WrongSums")),
    "RankStuck": ("WrongSums", "TooSlow", "RdmaDown", "RdmaExhausted"),
    "CannotStart": ("MetalAborted", "MetalHangs", "MetalMissing", "DiskAlmostFull"),
}
_NODE_AWAY: Final = frozenset({"NodeNotReady", "NotReady"})
"""Refusals of a Mac whose agent is away."""
# Refusals because of the model itself, which hold for Macs that refuse for another reason, too.
_OF_MODEL: Final = ("Model", "Adapter", "Architecture", "ContextTooLong", "KvCache", "Draft")
# Refusals of Macs that the manifest leaves out: another reason says what keeps the others from the replica.
_OF_SELECTION: Final = frozenset(
    {"ChipMismatch", "NotInGroup", "NotInPool", "SelectorMismatch", "TooFewGpuCores"}
)
_COMMAND: Final = re.compile(r"`(fleetctl [^`]+)`")
_BLANK: Final = re.compile(r"\b[A-Z]{3,}\b")
"""A word of a command that a person fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to mend, and what it explains."""

    kind: str
    name: str
    """The object that is broken; of several Macs with the same problem, the first."""
    reason: str
    title: str
    """Twelve words at most."""
    cause: str
    remedy: str
    command: str
    """The command that mends it, or that shows more."""
    tone: Tone
    """`bad` where clients are refused."""
    since: datetime | None
    affected: tuple[str, ...]
    """Other objects that suffer from it, as Kind/name."""
    conditions: tuple[str, ...]
    """The conditions that it explains, as Kind/name/Type."""

    @property
    def row(self) -> Row:
        """The problem as a row of the view `problems`."""
        since = None if self.since is None else self.since.isoformat()
        name = f"{self.kind}/{self.name}/{self.reason}"
        return {**asdict(self), "name": name, "object": self.name, "since": since}

    def concerns(self, kind: str, name: str) -> bool:
        """Return whether an object is broken by it, or suffers from it."""
        return (kind, name) == (self.kind, self.name) or f"{kind}/{name}" in self.affected


_LEADERLESS: Final = Problem(
    kind="Reconciler",
    name="leader",
    reason="NoLeader",
    title="No reconciler leads: nothing is placed or replaced",
    cause="No reconciler holds the leader's lease. Models that run go on.",
    remedy="Start one: `fleetctl up` on one machine, or `fleet-reconciler` on any.",
    command="fleetctl doctor",
    tone="warning",
    since=None,
    affected=(),
    conditions=(),
)


class _Cause(NamedTuple):
    """The thing to mend, before it is known what else follows from it."""

    kind: str
    name: str
    reason: str
    table: str
    """The kind in whose table the reason is."""
    text: str
    names: Mapping[str, str]
    """Names for the commands of its remedy."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of the problem: Macs with the same reason are one."""
        return self.kind, "" if self.kind == "Node" else self.name, self.reason


def find_problems(caches: FleetCaches, measured: Iterable[ObjectCondition] = ()) -> list[Problem]:
    """Return the problems of a fleet; those for which clients are refused come first.

    `measured`: conditions that no status has, because the caller measures them.
    """
    return _Diagnosis(caches, measured).problems()


class _Diagnosis:
    """The conditions that are problems, by object, and their causes."""

    def __init__(self, caches: FleetCaches, measured: Iterable[ObjectCondition]) -> None:
        self._caches = caches
        self._found: dict[tuple[str, str], list[ObjectCondition]] = defaultdict(list)
        for condition in (*all_conditions(caches), *measured):
            if condition.is_problem:
                self._found[condition.kind, condition.name].append(condition)
        for conditions in self._found.values():
            conditions.sort(key=_urgency)

    def problems(self) -> list[Problem]:
        """Return all problems."""
        causes: dict[tuple[str, str, str], _Cause] = {}
        explained: dict[tuple[str, str, str], list[ObjectCondition]] = defaultdict(list)
        # The first Mac by name stands for all with its problem.
        for kind, name in sorted(self._found, key=lambda pair: (pair[0] != "Node", *pair)):
            for condition in self._found[kind, name]:
                cause = self._cause_of(condition)
                if cause is not None:
                    causes.setdefault(cause.key, cause)
                    explained[cause.key].append(condition)
        problems = [self._problem(cause, explained[key]) for key, cause in causes.items()]
        if not any(self._caches.leader.items.values()) and self._caches.objects.specs.items:
            problems.append(_LEADERLESS)
        return sorted(problems, key=lambda one: (one.tone, one.kind, one.name, one.reason))

    def _cause_of(self, condition: ObjectCondition) -> _Cause | None:
        """Return what has to be mended for a condition; None if it is no problem alone."""
        kind, name, _ = condition
        match kind:
            case "Node":
                return self._of_node(name, _AWAY) or self._of_node(name, condition.condition.reason)
            case "ModelDeployment":
                return self._of_deployment(name)
            case "Replica":
                replica = self._caches.objects.specs.items.get(keys.spec_key(kind, name))
                if isinstance(replica, Replica):
                    return self._of_deployment(replica.spec.deployment)
            case "ShardGroup":
                group = self._caches.objects.specs.items.get(keys.spec_key(kind, name))
                members = group.spec.members if isinstance(group, ShardGroup) else ()
                away = (self._of_node(member.node, _AWAY) for member in members)
                if cause := next(filter(None, away), None):
                    return cause
            case _:
                pass
        return self._own(self._found[kind, name][0])

    def _own(self, condition: ObjectCondition) -> _Cause:
        kind, name, said = condition
        text = re.sub(r"^\d+ of \d+ replicas ready; ", "", said.message)
        return _Cause(kind, name, said.reason, kind, text, names_of(self._caches, kind, name))

    def _of_node(self, node: str, reason: str) -> _Cause | None:
        """Return the problem of a Mac; None if it has not this one."""
        for condition in self._found.get(("Node", node), ()):
            if condition.condition.reason == reason:
                return self._own(condition)
        return None

    def _of_deployment(self, name: str) -> _Cause | None:
        own = self._found.get(("ModelDeployment", name), [])
        first = own[0].condition if own else None
        replicas = self._caches.objects.specs.by_index(BY_DEPLOYMENT, name).values()
        pairs = [
            (replica, condition)
            for replica in replicas
            if isinstance(replica, Replica)
            for condition in self._found.get(("Replica", replica.name), ())
        ]
        failing = [pair for pair in pairs if pair[1].condition.type == "Ready"]
        is_placed = first is None or first.type not in ("Available", "Placed")
        if failing and (is_placed or (first is not None and first.reason in _OF_REPLICAS)):
            return self._of_replicas(name, failing, is_alone=first is None)
        if first is not None and first.reason in _OF_PLACES:
            return self._of_refusals(name) or self._own(own[0])
        return self._own(own[0]) if own else self._of_replicas(name, pairs, is_alone=True)

    def _of_replicas(
        self, deployment: str, pairs: Sequence[tuple[Replica, ObjectCondition]], *, is_alone: bool
    ) -> _Cause | None:
        """Return the cause of replicas that fail: their Mac, or the first one's engine."""
        for replica, (_, _, condition) in pairs:
            for reason in _NODE_CAUSES.get(condition.reason, ()):
                for rank in replica.spec.ranks:
                    if cause := self._of_node(rank.node, reason):
                        return cause
        told = [pair for pair in pairs if pair[1].condition.reason != _JUST_PLACED]
        if not told and is_alone:
            return None
        replica, (_, _, condition) = (told or pairs)[0]
        where = ", ".join(rank.node for rank in replica.spec.ranks)
        text = f"{replica.name} on {where}: {condition.message or condition.reason}"
        others = sum(pair[1].condition.reason == condition.reason for pair in pairs) - 1
        if others > 0:
            text += f" ({others} more {'replica does' if others == 1 else 'replicas do'} the same)"
        names = names_of(self._caches, "Replica", replica.name)
        return _Cause("ModelDeployment", deployment, condition.reason, "Replica", text, names)

    def _of_refusals(self, name: str) -> _Cause | None:
        """Return why most of the selected Macs refuse the replica, or the model's fault; None if no Mac was asked."""
        status = self._caches.objects.statuses.items.get(keys.status_key("ModelDeployment", name))
        refusals = status.refusals if isinstance(status, ModelDeploymentStatus) else ()
        if not refusals:
            return None
        counts = Counter(refusal.reason for refusal in refusals)
        reason = max(
            counts,
            key=lambda one: (one.startswith(_OF_MODEL), one not in _OF_SELECTION, counts[one]),
        )
        count = counts[reason]
        first = next(refusal for refusal in refusals if refusal.reason == reason)
        if reason in _NODE_AWAY and (cause := self._of_node(first.node, _AWAY)):
            return cause
        text = f"{first.node}: {first.message or reason}"
        if count > 1:
            text += f" ({count - 1} more {'Mac says' if count == 2 else 'Macs say'} the same)"
        names = {**names_of(self._caches, "ModelDeployment", name), "NODE": first.node}
        return _Cause("ModelDeployment", name, reason, PLACEMENT, text, names)

    def _problem(self, cause: _Cause, conditions: Sequence[ObjectCondition]) -> Problem:
        documented = reason_of(cause.table, cause.reason)
        cure, phrase = (
            ("", cause.reason) if documented is None else (documented.cure, documented.title)
        )
        objects = list(dict.fromkeys((one.kind, one.name) for one in conditions))
        silent = [
            name for kind, name in objects if kind == "ModelDeployment" and self._is_silent(name)
        ]
        macs = {
            one.name
            for one in conditions
            if (one.kind, one.condition.reason) == ("Node", cause.reason)
        }
        subject = f"{len(macs)} Macs" if len(macs) > 1 else cause.name
        suffering = ""
        if cause.kind == "ModelDeployment":
            subject += " does not answer" if cause.name in silent else ""
        elif silent:
            verb = "does" if len(silent) == 1 else "do"
            suffering = f"{names_text(silent, 3)} {verb} not answer"
        text = cause.text or ("" if documented is None else documented.meaning.rstrip("."))
        remedy = fill_names(cure, cause.names)
        commands = (
            text
            for text in _COMMAND.findall(remedy)
            if not _BLANK.search(text) and any(name in text for name in cause.names.values())
        )
        times = [
            one.condition.last_transition_time
            for one in conditions
            if one.condition.last_transition_time is not None
        ]
        return Problem(
            kind=cause.kind,
            name=cause.name,
            reason=cause.reason,
            title=f"{subject}: {phrase}",
            cause=_bounded("; ".join(filter(None, (text, suffering)))),
            remedy=remedy,
            command=next(commands, _details_command(cause)),
            tone="bad" if silent else "warning",
            since=min(times, default=None),
            affected=tuple(
                f"{kind}/{name}"
                for kind, name in objects
                if (kind, name) != (cause.kind, cause.name)
            )[:_MOST_NAMES],
            conditions=tuple(one.id for one in conditions[:_MOST_NAMES]),
        )

    def _is_silent(self, name: str) -> bool:
        """Return whether a deployment wants replicas and has none that is ready."""
        status = self._caches.objects.statuses.items.get(keys.status_key("ModelDeployment", name))
        if not isinstance(status, ModelDeploymentStatus):
            return False
        return status.desired_replicas > 0 and status.ready_replicas == 0


def _urgency(found: ObjectCondition) -> tuple[int, str]:
    """Return the sort key of the conditions of one object: what clients notice comes first."""
    type_ = found.condition.type
    return _ORDER.index(type_) if type_ in _ORDER else len(_ORDER), type_


def _details_command(cause: _Cause) -> str:
    """Return the command that shows more of a problem."""
    if cause.table == PLACEMENT:
        return f"fleetctl explain placement {cause.name}"
    kind = "md" if cause.kind == "ModelDeployment" else cause.kind.lower()
    return f"fleetctl describe {kind}/{cause.name}"


def _bounded(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
