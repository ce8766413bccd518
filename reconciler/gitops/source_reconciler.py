"""What became of GitSources, as events for people.

One look at one source: fetch if it is due, apply what is to be applied, say what came of it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machinery.clock import Clock
from machinery.control_loop import Requeue
from manifests.errors import ManifestErrors
from manifests.load import Document, read_objects
from reconciler.gitops import applier, fetch_messages, source_status
from reconciler.gitops.applier import CommitResult
from reconciler.gitops.fetch_messages import FetchRequest
from reconciler.gitops.fetcher import FetchResult, fetch
from reconciler.gitops.source_status import (
    LoadedCommit,
    SourceProblem,
    SourceResult,
    SourceState,
    drift_text,
    join_first,
    short_revision,
)
from schemas import duration, kinds
from schemas.event import ObjectReference
from schemas.gitsource import GitSource, GitSourceStatus, InventoryEntry
from schemas.meta import ApiObject, ConditionStatus, ObjectKey, find_condition, is_true
from store import keys, objects
from store.errors import NotFoundError
from store.events import EventRecorder
from store.mutate import mutate_status
from store.port import Transport


async def record_applied(
    recorder: EventRecorder, source: GitSource, revision: str, result: CommitResult, *, is_new: bool
) -> None:
    """Record what was written."""
    about = _about(source)
    if is_new:
        counts = (("created", result.created), ("configured", result.configured))
        done = [
            f"{len(which)} {word}" for word, which in (*counts, ("pruned", result.pruned)) if which
        ]
        message = (
            f"{short_revision(revision)} is applied: {', '.join(done) or 'nothing had to change'}"
        )
        await recorder.record(about, "Applied", message)
        return
    names = [f"{kind.lower()}/{name}" for kind, name in (*result.created, *result.configured)]
    if result.drift and source.spec.drift_policy == "Correct":
        message = f"put back as {short_revision(revision)} says: {join_first([drift_text(one) for one in result.drift])}"
        await recorder.record(about, "DriftCorrected", message, type_="Warning")
    elif names:
        await recorder.record(
            about, "DriftCorrected", f"put back: {join_first(names)}", type_="Warning"
        )
    if result.pruned:
        gone = [f"{kind.lower()}/{name}" for kind, name in result.pruned]
        await recorder.record(about, "Pruned", f"deleted: {join_first(gone)}")


async def record_status(
    recorder: EventRecorder, source: GitSource, old: GitSourceStatus | None, new: GitSourceStatus
) -> None:
    """Record what of a status is news that people should not miss."""
    if old is not None and old.drift != new.drift and new.drift:
        message = join_first([drift_text(one) for one in new.drift])
        await recorder.record(_about(source), "Drifted", message, type_="Warning")
    before = None if old is None else find_condition(old.conditions, "Ready")
    ready = find_condition(new.conditions, "Ready")
    if ready is None or ready.status is ConditionStatus.TRUE or ready.reason in _QUIET:
        return
    if before is None or (before.reason, before.message) != (ready.reason, ready.message):
        await recorder.record(_about(source), ready.reason, ready.message, type_="Warning")


# Not what went wrong, but what is waited for.
_QUIET = ("Suspended", "WaitingForHealth", "DependencyNotReady")


def _about(source: GitSource) -> ObjectReference:
    return ObjectReference(kind="GitSource", name=source.name, uid=source.metadata.uid)


log = logging.getLogger(__name__)

_SHOWN = 5
_DEPENDENCY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GitFolders:
    """Folders on this machine."""

    cache: Path
    """Where what was fetched is kept."""
    credentials: Path
    """Where the files lie that specs name."""


class GitSourceReconciler:
    """Looks at sources, for as long as this process leads; `transport` is fenced by the leadership."""

    def __init__(
        self, transport: Transport, clock: Clock, recorder: EventRecorder, places: GitFolders
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._recorder = recorder
        self._places = places
        self._memories: dict[str, SourceState] = {}
        self.concerns: dict[str, frozenset[str]] = {}
        """For each source the keys of the store that it is to be looked at for when they change."""

    async def look(self, name: str, version_of: Callable[[str], int]) -> Requeue | None:
        """Look at a source; `version_of` says at which version the cache has an object.

        Raises:
            StoreError: the store did not answer; FencedError: somebody else leads.

        """
        source = await objects.get(self._transport, GitSource, name)
        if source is None:
            self._memories.pop(name, None)
            self.concerns.pop(name, None)
            count = await applier.release(self._transport, self._clock, name)
            if count:
                log.info("objects of a source that is gone are nobody's", extra={"source": name})
            return None
        memory = source_status.current_state(self._memories.get(name), source)
        self._memories[name] = memory
        self._listen(source)
        if source.spec.suspend:
            await self._say(source, SourceResult(is_suspended=True))
            return None
        waiting = await self._dependencies(source)
        if waiting is not None:
            await self._say(
                source, SourceResult(waiting=waiting, problem=waiting if waiting.stalls else None)
            )
            return Requeue(_DEPENDENCY_S)
        if source_status.is_fetch_due(memory, source, self._clock.monotonic()):
            await self._fetch(source, memory)
        await self._apply(source, memory, version_of)
        return Requeue(source_status.requeue_after_s(memory, source, self._clock.monotonic()))

    def _listen(self, source: GitSource) -> None:
        inventory = source.status.inventory if source.status is not None else ()
        self.concerns[source.name] = frozenset(
            (
                *(keys.spec_key(one.kind, one.name) for one in inventory),
                *(keys.status_key(one.kind, one.name) for one in source.spec.health_checks),
                *(keys.status_key("GitSource", one) for one in source.spec.depends_on),
            )
        )

    async def _dependencies(self, source: GitSource) -> SourceProblem | None:
        """Return what has to be Ready first, and is not."""
        if not source.spec.depends_on:
            return None
        every = {one.name: one for one in await objects.list_all(self._transport, GitSource)}
        circle = source_status.dependency_cycle(source.name, every)
        if circle:
            message = f"spec.dependsOn goes in a circle: {' -> '.join(circle)}; break it"
            return SourceProblem(reason="DependencyCircle", message=message, stalls=True)
        for name in source.spec.depends_on:
            one = every.get(name)
            status = one.status if one is not None else None
            if status is None or not is_true(status.conditions, "Ready"):
                what = "is not Ready" if one is not None else "is not there"
                message = f"waits for gitsource/{name}, which {what}"
                return SourceProblem(reason="DependencyNotReady", message=message, stalls=False)
        return None

    async def _fetch(self, source: GitSource, memory: SourceState) -> None:
        """Ask for the newest commit, and remember it, or why there is none."""
        sync = source_status.requested_sync(source)
        held = memory.held
        known = held.commit if held is not None and held.commit == memory.newest else None
        found = await fetch(self._ask(source, known=known), self._clock)
        if found.answer.failure is not None and held is None:
            await self._recall(source, memory)
        memory.fetched_at, memory.sync = self._clock.monotonic(), sync
        failure, commit = found.answer.failure, found.answer.revision
        if commit:
            memory.newest = commit
            memory.observed = source_status.revision_of(source.spec.reference, commit)
        if failure is not None:
            is_passing = failure.passes
            memory.failures += 1
            memory.problem = SourceProblem(
                reason=failure.reason, message=failure.message, stalls=not is_passing
            )
            log.info("no commit", extra={"source": source.name, "reason": failure.reason})
            return
        memory.failures, memory.problem = 0, None
        if known is None or commit != known:
            await self._hold(source, memory, found)

    async def _recall(self, source: GitSource, memory: SourceState) -> None:
        """Read what was applied before out of the cache: it is kept as it is while its source is away."""
        status = source.status
        if status is None or status.observed_generation != source.metadata.generation:
            return
        commit = source_status.commit_in(status.applied_revision)
        if not commit:
            return
        found = await fetch(self._ask(source, known=None, offline=commit), self._clock)
        if found.answer.failure is None:
            await self._hold(source, memory, found)

    async def _hold(self, source: GitSource, memory: SourceState, found: FetchResult) -> None:
        documents = [Document(source=one.source, root=one.root) for one in found.documents]
        commit = found.answer.revision
        try:
            # A thread: ten thousand objects are a second's work, and the leader has leases to renew.
            loaded = tuple(await asyncio.to_thread(read_objects, documents))
        except ManifestErrors as errors:
            memory.problem = SourceProblem(
                reason="BrokenManifests", message=errors.show(_SHOWN), stalls=True
            )
            return
        revision = source_status.revision_of(source.spec.reference, commit)
        memory.held = LoadedCommit(revision=revision, commit=commit, loaded=loaded)

    def _ask(self, source: GitSource, *, known: str | None, offline: str = "") -> FetchRequest:
        spec = source.spec
        reference = spec.reference
        folder = f"{source.name}-{source.metadata.uid or 'x'}"
        return FetchRequest(
            repository=spec.repository,
            branch=reference.branch if not offline else None,
            tag=reference.tag if not offline else None,
            commit=offline or reference.commit,
            path=spec.path,
            cache=str(self._places.cache / folder),
            credentials=self._credentials(source),
            known=known,
            offline=bool(offline),
            timeout_s=float(duration.parse(spec.timeout)),
        )

    def _credentials(self, source: GitSource) -> fetch_messages.FetchCredentials:
        who = source.spec.credentials
        if who is None:
            return fetch_messages.FetchCredentials()

        def whole(name: str | None) -> str | None:
            return None if name is None else str(self._places.credentials / name)

        return fetch_messages.FetchCredentials(
            username=who.username,
            password_file=whole(who.password_file),
            ssh_key_file=whole(who.ssh_key_file),
            known_hosts_file=whole(who.known_hosts_file),
            ca_file=whole(who.ca_file),
        )

    async def _apply(
        self, source: GitSource, memory: SourceState, version_of: Callable[[str], int]
    ) -> None:
        """Apply what is held, unless it is applied and nobody changed it since; say what came of it."""
        held, problem = memory.held, memory.problem
        if held is None:
            await self._say(
                source, SourceResult(observed=memory.observed, problem=problem, sync=memory.sync)
            )
            return
        if not _is_settled(memory, held, version_of):
            result = await self._carry_out(source, memory, held)
            problem = problem or result.problem
            if result.problem is not None:
                found = SourceResult(observed=memory.observed, problem=problem, sync=memory.sync)
                await self._say(source, found)
                return
        waiting = await self._unwell(source, memory)
        if waiting is not None and waiting.stalls:
            problem = problem or waiting
        found = SourceResult(
            observed=memory.observed,
            applied=held.revision,
            inventory=_inventory(held),
            drift=memory.drift,
            problem=problem,
            waiting=waiting,
            sync=memory.sync,
        )
        await self._say(source, found)

    async def _carry_out(
        self, source: GitSource, memory: SourceState, held: LoadedCommit
    ) -> applier.CommitResult:
        before = source.status.applied_revision if source.status is not None else ""
        generation = source.status.observed_generation if source.status is not None else 0
        is_new = (before, generation) != (held.revision, source.metadata.generation)
        memory.settled = None
        result = await applier.apply_commit(
            self._transport, self._clock, source, held, is_new=is_new
        )
        if result.problem is not None:
            return result
        memory.settled = (held.commit, _versions(result.objects))
        memory.drift = result.drift if source.spec.drift_policy == "Warn" else ()
        await record_applied(self._recorder, source, held.revision, result, is_new=is_new)
        log.info("applied", extra={"source": source.name, "revision": held.revision})
        return result

    async def _unwell(self, source: GitSource, memory: SourceState) -> SourceProblem | None:
        """Return what of the health checks does not hold."""
        checks = source.spec.health_checks
        there: dict[ObjectKey, ApiObject | None] = {}
        for check in checks:
            kind = kinds.by_name(check.kind)
            assert kind is not None
            found = await objects.get(self._transport, kind.type, check.name)
            there[ObjectKey(check.kind, check.name)] = found
        unwell = source_status.failing_health_checks(checks, there)
        if not unwell:
            memory.unwell_since = None
            return None
        now = self._clock.monotonic()
        if memory.unwell_since is None:
            memory.unwell_since = now
        is_late = now >= memory.unwell_since + duration.parse(source.spec.health_timeout)
        message = source_status.join_first(unwell)
        if is_late:
            message = f"after {source.spec.health_timeout} (spec.healthTimeout): {message}"
            return SourceProblem(reason="HealthCheckFailed", message=message, stalls=True)
        return SourceProblem(reason="WaitingForHealth", message=message, stalls=False)

    async def _say(self, source: GitSource, found: SourceResult) -> None:
        """Write the status, if it is another than the one that is there."""
        new = source_status.compute_status(source, found, self._clock.now())
        if new == source.status:
            return

        def said(now: GitSource) -> GitSourceStatus | None:
            # What was edited meanwhile is looked at anew.
            if now.metadata.generation != source.metadata.generation:
                return None
            return source_status.compute_status(now, found, self._clock.now())

        try:
            await mutate_status(self._transport, self._clock, GitSource, source.name, said)
        except NotFoundError:
            return  # it was deleted, and is looked at for that
        self._listen(source.model_copy(update={"status": new}))
        await record_status(self._recorder, source, source.status, new)


def _is_settled(memory: SourceState, held: LoadedCommit, version_of: Callable[[str], int]) -> bool:
    """Return whether the commit is applied, and its objects are as they were then."""
    if memory.settled is None or memory.settled[0] != held.commit:
        return False
    return all(version_of(keys.spec_key(*key)) == version for key, version in memory.settled[1])


def _versions(found: tuple[ApiObject, ...]) -> frozenset[tuple[ObjectKey, int]]:
    return frozenset(
        (ObjectKey(one.kind, one.name), int(one.metadata.resource_version or 0)) for one in found
    )


def _inventory(held: LoadedCommit) -> tuple[InventoryEntry, ...]:
    keys_of = sorted(item.key for item in held.loaded)
    return tuple(InventoryEntry(kind=key.kind, name=key.name) for key in keys_of)
