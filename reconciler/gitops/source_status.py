"""What is said of a GitSource: its status, computed from what was found. Pure.

Conditions as kstatus has them, so that people who know Flux read them at once: Ready, Reconciling (something is being
done or tried again), Stalled (a person, or a commit, has to do something).

When a source is looked at, and what the leader remembers of it meanwhile. Pure but for the memory itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from manifests.load import LoadedObject
from schemas import duration
from schemas.gitsource import (
    SYNC_REQUESTED,
    Drift,
    GitReference,
    GitSource,
    GitSourceStatus,
    HealthCheck,
    InventoryEntry,
)
from schemas.meta import (
    ApiObject,
    Condition,
    ConditionStatus,
    ObjectKey,
    find_condition,
    with_condition,
)

_LONGEST = 2000
_SHOWN = 5
# How each kind says that it is well.
_WELL = {
    "ModelDeployment": "Available",
    "ModelRoute": "Accepted",
    "NodePool": "Ready",
    "ShardGroup": "Ready",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProblem:
    """Why the newest commit is not applied, or not well."""

    reason: str
    message: str
    stalls: bool
    """Whether it stays until a person or a commit mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """What a look at a source found."""

    observed: str = ""
    """The newest revision that was seen; empty if none was, this time."""
    applied: str = ""
    """The revision whose manifests are all in the store; empty if nothing became of it this time."""
    inventory: tuple[InventoryEntry, ...] | None = None
    """What came from it; None, if nothing was applied."""
    drift: tuple[Drift, ...] = ()
    problem: SourceProblem | None = None
    waiting: SourceProblem | None = None
    """What is waited for: other sources, or the health of what was applied."""
    is_suspended: bool = False
    sync: str = ""
    """The `fleetctl sync` that this look carried out."""


def compute_status(source: GitSource, found: SourceResult, now: datetime) -> GitSourceStatus:
    """Return the source's status, with what was so before and still is."""
    old = source.status or GitSourceStatus()
    applied = found.applied or old.applied_revision
    is_news = applied != old.applied_revision
    inventory = old.inventory if found.inventory is None else found.inventory
    status = GitSourceStatus(
        observed_generation=source.metadata.generation,
        observed_revision=found.observed or old.observed_revision,
        applied_revision=applied,
        applied_at=now if is_news else old.applied_at,
        inventory=inventory,
        drift=found.drift,
        last_sync=found.sync or old.last_sync,
        conditions=old.conditions,
    )
    conditions: Sequence[Condition] = old.conditions
    for type_, truth, reason, message in _conditions(source, status, found):
        made = Condition(
            type=type_,
            status=truth,
            reason=reason,
            message=_cut(message),
            observed_generation=source.metadata.generation,
            last_transition_time=now,
        )
        conditions = with_condition(conditions, made)
    return status.model_copy(update={"conditions": tuple(conditions)})


def _conditions(
    source: GitSource, status: GitSourceStatus, found: SourceResult
) -> list[tuple[str, ConditionStatus, str, str]]:
    problem, waiting = found.problem, found.waiting
    if found.is_suspended:
        message = f"spec.suspend is set; fleetctl resume gitsource/{source.name} goes on"
        before = find_condition(status.conditions, "Ready")
        ready = before.status if before is not None else ConditionStatus.UNKNOWN
        return [
            ("Ready", ready, "Suspended", message),
            ("Reconciling", ConditionStatus.FALSE, "Suspended", ""),
            ("Stalled", ConditionStatus.FALSE, "Suspended", ""),
        ]
    if problem is None and waiting is None:
        return [
            ("Ready", ConditionStatus.TRUE, "Applied", _applied_message(status)),
            ("Reconciling", ConditionStatus.FALSE, "Applied", ""),
            ("Stalled", ConditionStatus.FALSE, "Applied", ""),
        ]
    why = problem or waiting
    assert why is not None
    message = why.message
    if problem is not None and status.applied_revision:
        end = "" if message.endswith((".", "?", "!")) else "."
        message = f"{message}{end} {status.applied_revision} stays applied"
    # Nobody knows whether there is something newer: that is neither yes nor no.
    is_unknown = problem is not None and not problem.stalls and bool(status.applied_revision)
    stalls = problem is not None and problem.stalls
    return [
        (
            "Ready",
            ConditionStatus.UNKNOWN if is_unknown else ConditionStatus.FALSE,
            why.reason,
            message,
        ),
        ("Reconciling", ConditionStatus.FALSE if stalls else ConditionStatus.TRUE, why.reason, ""),
        (
            "Stalled",
            ConditionStatus.TRUE if stalls else ConditionStatus.FALSE,
            why.reason,
            message if stalls else "",
        ),
    ]


def _applied_message(status: GitSourceStatus) -> str:
    count = len(status.inventory)
    text = f"{status.applied_revision} is applied: {count} object{'' if count == 1 else 's'}"
    if not status.drift:
        return text
    return f"{text}; others changed {join_first([drift_text(one) for one in status.drift])}"


def drift_text(drift: Drift) -> str:
    """Return `modeldeployment/qwen spec.replicas (fleetctl-scale)`."""
    name = f"{drift.kind.lower()}/{drift.name}"
    if not drift.fields:
        return f"{name}, which is gone"
    who = f" ({', '.join(drift.managers)})" if drift.managers else ""
    return f"{name} {', '.join(drift.fields)}{who}"


def join_first(texts: Sequence[str]) -> str:
    """Return the first few, and how many there are besides."""
    rest = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def failing_health_checks(
    checks: Iterable[HealthCheck], there: dict[ObjectKey, ApiObject | None]
) -> tuple[str, ...]:
    """Return what is not well yet, in words."""
    return tuple(
        f"{check.kind.lower()}/{check.name} {why}"
        for check in checks
        if (why := _ailment(check.kind, there.get(ObjectKey(check.kind, check.name))))
    )


def _ailment(kind: str, obj: ApiObject | None) -> str:
    """Return what is wrong with an object; empty if it is well."""
    if obj is None:
        return "is not there"
    type_ = _WELL[kind]
    status = getattr(obj, "status", None)
    found = None if status is None else find_condition(status.conditions, type_)
    # A word about an older spec says nothing about this one.
    if found is None or found.observed_generation < obj.metadata.generation:
        return f"is not {type_} yet"
    if found.status is ConditionStatus.TRUE:
        return ""
    return f"is not {type_}: {found.reason}{f', {found.message}' if found.message else ''}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def dependency_cycle(name: str, sources: Mapping[str, GitSource]) -> tuple[str, ...]:
    """Return a way along dependsOn from a source back to itself; empty if there is none."""
    ways: list[tuple[str, ...]] = [(name,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        here = sources.get(way[-1])
        for after in here.spec.depends_on if here is not None else ():
            if after == name:
                return (*way, name)
            if after not in seen:
                seen.add(after)
                ways.append((*way, after))
    return ()


_FIRST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCommit:
    """A commit whose manifests were read and are good."""

    revision: str
    """As people read it: `main@9f1c...`."""
    commit: str
    loaded: tuple[LoadedObject, ...]


@dataclass(slots=True, kw_only=True)
class SourceState:
    """What a leader knows of one source besides what the store holds; gone with the lead, and found out anew."""

    uid: str
    generation: int
    fetched_at: float | None = None
    failures: int = 0
    """How often fetching failed in a row."""
    sync: str = ""
    observed: str = ""
    newest: str = ""
    """The newest commit that was looked at, be it broken."""
    held: LoadedCommit | None = None
    """The newest commit that is good."""
    problem: SourceProblem | None = None
    """What is wrong with the newest."""
    settled: tuple[str, frozenset[tuple[ObjectKey, int]]] | None = None
    """What was applied, and the versions that it has since: while they are those, there is nothing to apply."""
    drift: tuple[Drift, ...] = ()
    unwell_since: float | None = None


def current_state(memory: SourceState | None, source: GitSource) -> SourceState:
    """Return the memory of a source, a new one if its spec is another: then what was known counts no more."""
    meta = source.metadata
    if memory is not None and (memory.uid, memory.generation) == (meta.uid, meta.generation):
        return memory
    return SourceState(uid=meta.uid, generation=meta.generation)


def requested_sync(source: GitSource) -> str:
    """Return which `fleetctl sync` is asked for; empty if none was ever."""
    return source.metadata.annotations.get(SYNC_REQUESTED, "")


def is_fetch_due(memory: SourceState, source: GitSource, now: float) -> bool:
    """Return whether to look for a new commit."""
    done = source.status.last_sync if source.status is not None else ""
    if memory.fetched_at is None or requested_sync(source) not in (done, memory.sync):
        return True
    return now >= memory.fetched_at + wait_s(memory, source)


def wait_s(memory: SourceState, source: GitSource) -> float:
    """Return the seconds from one look for a new commit to the next."""
    interval_s = float(duration.parse(source.spec.interval))
    if memory.problem is None or memory.problem.stalls or not memory.failures:
        return interval_s
    return min(interval_s, _FIRST_RETRY_S * 2.0 ** min(memory.failures - 1, 16))


def requeue_after_s(memory: SourceState, source: GitSource, now: float) -> float:
    """Return the seconds until something is due though nothing changes."""
    assert memory.fetched_at is not None
    due = [memory.fetched_at + wait_s(memory, source)]
    if memory.unwell_since is not None:
        ends = memory.unwell_since + duration.parse(source.spec.health_timeout)
        due.extend([ends] if ends > now else [])
    return max(0.05, min(due) - now)


def revision_of(reference: GitReference, commit: str) -> str:
    """Return a commit as people read it: with the branch or tag that it was found under."""
    name = reference.branch or reference.tag
    return f"{name}@{commit}" if name else commit


def commit_in(revision: str) -> str:
    """Return the commit of a revision."""
    return revision.rpartition("@")[2]


def short_revision(revision: str) -> str:
    """Return a revision with a hash of seven digits, for events."""
    head, at, commit = revision.rpartition("@")
    return f"{head}{at}{commit[:7]}"


def apply_set_name(source: str) -> str:
    """Return the apply set of a source; no name that `fleetctl apply --applyset` is given looks so by chance."""
    return f"gitsource.{source}"


def manager_of(source: str) -> str:
    return f"gitsource/{source}"


def source_of_manager(manager: str) -> str | None:
    """Return the source that a manager is; None if it is none."""
    head, _, name = manager.partition("/")
    return name if head == "gitsource" and name else None
