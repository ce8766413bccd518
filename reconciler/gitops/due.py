"""When a source is looked at, and what the leader remembers of it meanwhile. Pure but for the memory itself."""

from dataclasses import dataclass

from manifests.load import Loaded
from reconciler.gitops.verdict import Problem
from schemas import duration
from schemas.gitsource import SYNC_REQUESTED, Drift, GitReference, GitSource
from schemas.meta import ObjectKey

_FIRST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A commit whose manifests were read and are good."""

    revision: str
    """As people read it: `main@9f1c...`."""
    commit: str
    loaded: tuple[Loaded, ...]


@dataclass(slots=True, kw_only=True)
class Memory:
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
    held: Held | None = None
    """The newest commit that is good."""
    problem: Problem | None = None
    """What is wrong with the newest."""
    settled: tuple[str, frozenset[tuple[ObjectKey, int]]] | None = None
    """What was applied, and the versions that it has since: while they are those, there is nothing to apply."""
    drift: tuple[Drift, ...] = ()
    unwell_since: float | None = None


def remembered(memory: Memory | None, source: GitSource) -> Memory:
    """Return the memory of a source, a new one if its spec is another: then what was known counts no more."""
    meta = source.metadata
    if memory is not None and (memory.uid, memory.generation) == (meta.uid, meta.generation):
        return memory
    return Memory(uid=meta.uid, generation=meta.generation)


def sync_of(source: GitSource) -> str:
    """Return which `fleetctl sync` is asked for; empty if none was ever."""
    return source.metadata.annotations.get(SYNC_REQUESTED, "")


def is_fetch_due(memory: Memory, source: GitSource, now: float) -> bool:
    """Return whether to look for a new commit."""
    done = source.status.last_sync if source.status is not None else ""
    if memory.fetched_at is None or sync_of(source) not in (done, memory.sync):
        return True
    return now >= memory.fetched_at + wait_s(memory, source)


def wait_s(memory: Memory, source: GitSource) -> float:
    """Return the seconds from one look for a new commit to the next."""
    interval_s = float(duration.parse(source.spec.interval))
    if memory.problem is None or memory.problem.stalls or not memory.failures:
        return interval_s
    return min(interval_s, _FIRST_RETRY_S * 2.0 ** min(memory.failures - 1, 16))


def next_look_s(memory: Memory, source: GitSource, now: float) -> float:
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


def short(revision: str) -> str:
    """Return a revision with a hash of seven digits, for events."""
    head, at, commit = revision.rpartition("@")
    return f"{head}{at}{commit[:7]}"


def set_name(source: str) -> str:
    """Return the apply set of a source; no name that `fleetctl apply --applyset` is given looks so by chance."""
    return f"gitsource.{source}"


def manager_of(source: str) -> str:
    return f"gitsource/{source}"


def source_of(manager: str) -> str | None:
    """Return the source that a manager is; None if it is none."""
    head, _, name = manager.partition("/")
    return name if head == "gitsource" and name else None
