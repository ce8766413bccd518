"""The state and status of one GitSource: what the leader remembers, when it is due, its conditions. Pure.

Conditions follow kstatus, as in Flux: Ready, Reconciling (in progress or retried), Stalled (a person or a commit must
fix it).
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from machinery.backoff import Backoff
from manifests.load import LoadedObject
from schemas import duration
from schemas.gitsource import (
    DIFF_REQUESTED,
    SYNC_REQUESTED,
    Drift,
    GitCommit,
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
# The condition by which each kind is healthy.
_HEALTHY_CONDITION = {
    "ModelDeployment": "Available",
    "ModelRoute": "Accepted",
    "NodePool": "Ready",
    "ShardGroup": "Ready",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProblem:
    """The reason why the newest commit is not applied, or not healthy."""

    reason: str
    message: str
    stalls: bool
    """True if it stays until a person or a commit fixes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """The result of reconciling a source."""

    observed: str = ""
    """Newest revision that was fetched; empty if there is none."""
    observed_commit: GitCommit | None = None
    applied_commit: GitCommit | None = None
    applied: str = ""
    """Revision that is applied completely; empty if none was applied now."""
    inventory: tuple[InventoryEntry, ...] | None = None
    """Objects of the revision; None if nothing was applied."""
    drift: tuple[Drift, ...] = ()
    unread_claims: tuple[str, ...] = ()
    """Sources of the repository that may claim objects which are to be pruned, but have not read the commit yet."""
    problem: SourceProblem | None = None
    waiting: SourceProblem | None = None
    """Reason to wait: for other sources, or for the health of applied objects."""
    is_suspended: bool = False
    sync: str = ""
    """The `fleetctl sync` request that was carried out."""


def compute_status(source: GitSource, found: SourceResult, now: datetime) -> GitSourceStatus:
    """Return the source's status: the result, and the parts of the old status that still hold."""
    old = source.status or GitSourceStatus()
    applied = found.applied or old.applied_revision
    is_new = applied != old.applied_revision
    inventory = old.inventory if found.inventory is None else found.inventory
    status = GitSourceStatus(
        observed_generation=source.metadata.generation,
        observed_revision=found.observed or old.observed_revision,
        observed_commit=found.observed_commit if found.observed else old.observed_commit,
        applied_revision=applied,
        applied_commit=found.applied_commit if found.applied else old.applied_commit,
        applied_at=now if is_new else old.applied_at,
        inventory=inventory,
        drift=found.drift,
        last_sync=found.sync or old.last_sync,
        preview=old.preview if is_preview_current(source) else None,
        conditions=old.conditions,
    )
    conditions: Sequence[Condition] = old.conditions
    for type_, truth, reason, message in _conditions(source, status, found):
        condition = Condition(
            type=type_,
            status=truth,
            reason=reason,
            message=_cut(message),
            observed_generation=source.metadata.generation,
            last_transition_time=now,
        )
        conditions = with_condition(conditions, condition)
    return status.model_copy(update={"conditions": tuple(conditions)})


def _conditions(
    source: GitSource, status: GitSourceStatus, found: SourceResult
) -> list[tuple[str, ConditionStatus, str, str]]:
    problem, waiting = found.problem, found.waiting
    if found.is_suspended:
        message = f"spec.suspend is set; `fleetctl resume gitsource/{source.name}` continues"
        before = find_condition(status.conditions, "Ready")
        ready = before.status if before is not None else ConditionStatus.UNKNOWN
        return [
            ("Ready", ready, "Suspended", message),
            ("Reconciling", ConditionStatus.FALSE, "Suspended", ""),
            ("Stalled", ConditionStatus.FALSE, "Suspended", ""),
        ]
    if problem is None and waiting is None:
        return [
            ("Ready", ConditionStatus.TRUE, "Applied", _applied_message(status, found)),
            ("Reconciling", ConditionStatus.FALSE, "Applied", ""),
            ("Stalled", ConditionStatus.FALSE, "Applied", ""),
        ]
    why = problem or waiting
    assert why is not None
    message = why.message
    if problem is not None and status.applied_revision:
        end = "" if message.endswith((".", "?", "!")) else "."
        message = f"{message}{end} {status.applied_revision} stays applied"
    # It is not known whether there is a newer commit: neither true nor false.
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


def _applied_message(status: GitSourceStatus, found: SourceResult) -> str:
    count = len(status.inventory)
    text = f"{status.applied_revision} is applied: {count} object{'' if count == 1 else 's'}"
    if found.unread_claims:
        others = ", ".join(f"gitsource/{name}" for name in found.unread_claims)
        text += f"; pruning waits until the same repository is read for {others}"
    if not status.drift:
        return text
    return f"{text}; others changed {join_first([drift_text(drift) for drift in status.drift])}"


def drift_text(drift: Drift) -> str:
    """Return `modeldeployment/qwen spec.replicas (fleetctl-scale)`."""
    name = f"{drift.kind.lower()}/{drift.name}"
    if not drift.fields:
        return f"{name}, which was deleted"
    managers = f" ({', '.join(drift.managers)})" if drift.managers else ""
    return f"{name} {', '.join(drift.fields)}{managers}"


def join_first(texts: Sequence[str]) -> str:
    """Join the first texts, and name the number of further ones."""
    rest = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def failing_health_checks(
    checks: Iterable[HealthCheck], objects: dict[ObjectKey, ApiObject | None]
) -> tuple[str, ...]:
    """Describe the objects that are not healthy yet."""
    return tuple(
        f"{check.kind.lower()}/{check.name} {why}"
        for check in checks
        if (why := _health_problem(check.kind, objects.get(ObjectKey(check.kind, check.name))))
    )


def _health_problem(kind: str, obj: ApiObject | None) -> str:
    """Describe why an object is not healthy; empty if it is."""
    if obj is None:
        return "does not exist"
    type_ = _HEALTHY_CONDITION[kind]
    status = getattr(obj, "status", None)
    condition = None if status is None else find_condition(status.conditions, type_)
    # A condition of an older generation does not count.
    if condition is None or condition.observed_generation < obj.metadata.generation:
        return f"is not {type_} yet"
    if condition.status is ConditionStatus.TRUE:
        return ""
    return (
        f"is not {type_}: {condition.reason}{f', {condition.message}' if condition.message else ''}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def dependency_cycle(name: str, sources: Mapping[str, GitSource]) -> tuple[str, ...]:
    """Return a path along dependsOn from a source back to itself; empty if there is none."""
    paths: list[tuple[str, ...]] = [(name,)]
    visited: set[str] = set()
    while paths:
        path = paths.pop()
        here = sources.get(path[-1])
        for after in here.spec.depends_on if here is not None else ():
            if after == name:
                return (*path, name)
            if after not in visited:
                visited.add(after)
                paths.append((*path, after))
    return ()


_BACKOFF = Backoff(first_s=2.0, limit_s=300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCommit:
    """A commit whose manifests were read and are valid."""

    revision: str
    """The commit with its branch or tag: `main@9f1c...`."""
    commit: str
    info: GitCommit | None = None
    """Author and subject."""
    loaded: tuple[LoadedObject, ...]


@dataclass(slots=True, kw_only=True)
class SourceState:
    """The leader's memory of one source; lost with the leadership, and computed again by the next leader."""

    uid: str
    generation: int
    fetched_at: float | None = None
    failures: int = 0
    """Number of failed fetches in a row."""
    sync: str = ""
    observed: str = ""
    asked_at: float = -inf
    """Begin of the last fetch whose result is here."""
    needed_at: float = -inf
    """A fetch that began earlier is too old for another source of the repository."""
    newest: str = ""
    """Newest commit that was fetched, even if it is broken."""
    newest_at: float = -inf
    """End of the fetch that found it first."""
    unread_claims: tuple[str, ...] = ()
    """Sources whose manifests must be read before objects are pruned."""
    is_prune_due: bool = False
    """True if pruning waited for them."""
    newest_info: GitCommit | None = None
    """Author and subject of the newest commit."""
    loaded_commit: LoadedCommit | None = None
    """Newest valid commit."""
    problem: SourceProblem | None = None
    """Problem of the newest commit."""
    settled: tuple[str, frozenset[tuple[ObjectKey, int]]] | None = None
    """Applied commit and the versions of its objects: while they hold, there is nothing to apply."""
    drift: tuple[Drift, ...] = ()
    unhealthy_since: float | None = None


def current_state(state: SourceState | None, source: GitSource) -> SourceState:
    """Return the state of a source, a new one if its spec changed."""
    meta = source.metadata
    if state is not None and (state.uid, state.generation) == (meta.uid, meta.generation):
        return state
    return SourceState(uid=meta.uid, generation=meta.generation)


def is_as_new(state: SourceState, other: SourceState) -> bool:
    """Return whether a source was read when the newest commit of another one was there."""
    loaded_commit = state.loaded_commit
    is_same = loaded_commit is not None and loaded_commit.commit == other.newest
    return is_same or state.asked_at >= other.newest_at


def claims_are_known(state: SourceState | None, other: SourceState) -> bool:
    """Return whether the manifests of a source are known as of the newest commit of another one."""
    if state is None or not is_as_new(state, other):
        return False
    problem = state.problem
    return problem is None or (problem.stalls and problem.reason != "BrokenManifests")


def requested_preview(source: GitSource) -> str:
    """Return the last requested preview; empty if there is none."""
    return source.metadata.annotations.get(DIFF_REQUESTED, "")


def is_preview_current(source: GitSource) -> bool:
    """Return whether the status has the preview that is requested."""
    preview = source.status.preview if source.status is not None else None
    return preview is not None and preview.request == requested_preview(source)


def requested_sync(source: GitSource) -> str:
    """Return the last requested `fleetctl sync`; empty if there was none."""
    return source.metadata.annotations.get(SYNC_REQUESTED, "")


def is_fetch_due(state: SourceState, source: GitSource, now: float) -> bool:
    """Return whether to fetch now."""
    done = source.status.last_sync if source.status is not None else ""
    if state.fetched_at is None or requested_sync(source) not in (done, state.sync):
        return True
    if state.asked_at < state.needed_at:
        return True
    return now >= state.fetched_at + wait_s(state, source)


def wait_s(state: SourceState, source: GitSource) -> float:
    """Return the seconds from one fetch to the next."""
    interval_s = float(duration.parse(source.spec.interval))
    if state.problem is None or state.problem.stalls or not state.failures:
        return interval_s
    # Derived, not drawn: sources of one server spread out, and each question gets the same answer.
    jitter = random.Random(f"{state.uid}/{state.failures}").random()
    return min(interval_s, _BACKOFF.delay_s(state.failures, jitter=jitter))


def requeue_after_s(state: SourceState, source: GitSource, now: float) -> float:
    """Return the seconds until the source is due though nothing changes."""
    assert state.fetched_at is not None
    due = [state.fetched_at + wait_s(state, source)]
    if state.unhealthy_since is not None:
        ends = state.unhealthy_since + duration.parse(source.spec.health_timeout)
        due.extend([ends] if ends > now else [])
    return max(0.05, min(due) - now)


def revision_of(reference: GitReference, commit: str) -> str:
    """Return a commit with the branch or tag that it was found under."""
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
    """Return the apply set of a source; the prefix keeps it apart from sets of `fleetctl apply --applyset`."""
    return f"gitsource.{source}"
