"""What is said of a GitSource: its status, computed from what was found. Pure.

Conditions as kstatus has them, so that people who know Flux read them at once: Ready, Reconciling (something is being
done or tried again), Stalled (a person, or a commit, has to do something).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from schemas.gitsource import (
    Drift,
    GitSource,
    GitSourceStatus,
    HealthCheck,
    InventoryEntry,
)
from schemas.meta import (
    ApiObject,
    Condition,
    ObjectKey,
    Truth,
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
class Problem:
    """Why the newest commit is not applied, or not well."""

    reason: str
    message: str
    stalls: bool
    """Whether it stays until a person or a commit mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a look at a source found."""

    observed: str = ""
    """The newest revision that was seen; empty if none was, this time."""
    applied: str = ""
    """The revision whose manifests are all in the store; empty if nothing became of it this time."""
    inventory: tuple[InventoryEntry, ...] | None = None
    """What came from it; None, if nothing was applied."""
    drift: tuple[Drift, ...] = ()
    problem: Problem | None = None
    waiting: Problem | None = None
    """What is waited for: other sources, or the health of what was applied."""
    is_suspended: bool = False
    sync: str = ""
    """The `fleetctl sync` that this look carried out."""


def status_of(source: GitSource, found: Verdict, now: datetime) -> GitSourceStatus:
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
    for type_, truth, reason, message in _said(source, status, found):
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


def _said(
    source: GitSource, status: GitSourceStatus, found: Verdict
) -> list[tuple[str, Truth, str, str]]:
    problem, waiting = found.problem, found.waiting
    if found.is_suspended:
        message = f"spec.suspend is set; fleetctl resume gitsource/{source.name} goes on"
        before = find_condition(status.conditions, "Ready")
        ready = before.status if before is not None else Truth.UNKNOWN
        return [
            ("Ready", ready, "Suspended", message),
            ("Reconciling", Truth.FALSE, "Suspended", ""),
            ("Stalled", Truth.FALSE, "Suspended", ""),
        ]
    if problem is None and waiting is None:
        return [
            ("Ready", Truth.TRUE, "Applied", _applied(status)),
            ("Reconciling", Truth.FALSE, "Applied", ""),
            ("Stalled", Truth.FALSE, "Applied", ""),
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
        ("Ready", Truth.UNKNOWN if is_unknown else Truth.FALSE, why.reason, message),
        ("Reconciling", Truth.FALSE if stalls else Truth.TRUE, why.reason, ""),
        ("Stalled", Truth.TRUE if stalls else Truth.FALSE, why.reason, message if stalls else ""),
    ]


def _applied(status: GitSourceStatus) -> str:
    count = len(status.inventory)
    text = f"{status.applied_revision} is applied: {count} object{'' if count == 1 else 's'}"
    if not status.drift:
        return text
    return f"{text}; others changed {listed([drift_text(one) for one in status.drift])}"


def drift_text(drift: Drift) -> str:
    """Return `modeldeployment/qwen spec.replicas (fleetctl-scale)`."""
    name = f"{drift.kind.lower()}/{drift.name}"
    if not drift.fields:
        return f"{name}, which is gone"
    who = f" ({', '.join(drift.managers)})" if drift.managers else ""
    return f"{name} {', '.join(drift.fields)}{who}"


def listed(texts: Sequence[str]) -> str:
    """Return the first few, and how many there are besides."""
    rest = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def not_well(
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
    if found.status is Truth.TRUE:
        return ""
    return f"is not {type_}: {found.reason}{f', {found.message}' if found.message else ''}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def circle(name: str, sources: Mapping[str, GitSource]) -> tuple[str, ...]:
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
