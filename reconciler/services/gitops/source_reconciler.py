"""Reconciles one GitSource: fetches if it is due, applies the commit, writes status and events."""

import asyncio
import logging
from collections.abc import Callable

from machinery.clock import Clock
from machinery.control_loop import Requeue
from manifests import apply_sets
from manifests.errors import ManifestErrors
from manifests.load import read_objects
from reconciler.services.gitops import applier, credentials, previews, source_status
from reconciler.services.gitops.applier import CommitResult
from reconciler.services.gitops.credentials import GitSettings
from reconciler.services.gitops.fetch_messages import (
    FetchCredentials,
    FetchFailure,
    FetchRequest,
    FetchResponse,
)
from reconciler.services.gitops.fetcher import FetchResult, fetch
from reconciler.services.gitops.source_status import (
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
from schemas.gitsource import GitSource, GitSourceStatus, InventoryEntry, repository_address
from schemas.meta import ApiObject, ConditionStatus, ObjectKey, find_condition, is_true
from store import keys, objects
from store.errors import NotFoundError
from store.events import EventRecorder
from store.mutate import mutate_status
from store.port import Transport


async def record_applied(
    recorder: EventRecorder, source: GitSource, revision: str, result: CommitResult, *, is_new: bool
) -> None:
    """Record what was applied: a new revision, or corrections of an applied one."""
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
        message = f"corrected to {short_revision(revision)}: {join_first([drift_text(drift) for drift in result.drift])}"
        await recorder.record(about, "DriftCorrected", message, type_="Warning")
    elif names:
        await recorder.record(
            about, "DriftCorrected", f"corrected: {join_first(names)}", type_="Warning"
        )
    if result.pruned:
        gone = [f"{kind.lower()}/{name}" for kind, name in result.pruned]
        await recorder.record(about, "Pruned", f"deleted: {join_first(gone)}")


async def record_status(
    recorder: EventRecorder, source: GitSource, old: GitSourceStatus | None, new: GitSourceStatus
) -> None:
    """Record the changes of a status that people should notice."""
    if old is not None and old.drift != new.drift and new.drift:
        message = join_first([drift_text(drift) for drift in new.drift])
        await recorder.record(_about(source), "Drifted", message, type_="Warning")
    before = None if old is None else find_condition(old.conditions, "Ready")
    ready = find_condition(new.conditions, "Ready")
    if ready is None or ready.status is ConditionStatus.TRUE or ready.reason in _NO_FAILURES:
        return
    if before is None or (before.reason, before.message) != (ready.reason, ready.message):
        await recorder.record(_about(source), ready.reason, ready.message, type_="Warning")


# Reasons of Ready that are no failures.
_NO_FAILURES = ("Suspended", "WaitingForHealth", "DependencyNotReady")


def _about(source: GitSource) -> ObjectReference:
    return ObjectReference(kind="GitSource", name=source.name, uid=source.metadata.uid)


log = logging.getLogger(__name__)

_SHOWN = 5
_DEPENDENCY_S = 30.0


class GitSourceReconciler:
    """Reconciles sources while this process leads; `transport` is fenced by the leadership."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        recorder: EventRecorder,
        git: GitSettings,
        enqueue: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._enqueue = enqueue
        self._clock = clock
        self._recorder = recorder
        self._git = git
        self._states: dict[str, SourceState] = {}
        self.watched_keys: dict[str, frozenset[str]] = {}
        """Keys of the store by source: a change of one of them queues the source."""

    async def reconcile(self, name: str, version_of: Callable[[str], int]) -> Requeue | None:
        """Reconcile a source; `version_of` returns the cached version of a key.

        Raises:
            StoreError: the store did not answer; FencedError: another process leads.

        """
        source = await objects.get(self._transport, GitSource, name)
        if source is None:
            self._states.pop(name, None)
            self.watched_keys.pop(name, None)
            count = await applier.release(self._transport, self._clock, name)
            if count:
                log.info("released the objects of a removed source", extra={"source": name})
            return None
        state = source_status.current_state(self._states.get(name), source)
        self._states[name] = state
        self._watch_keys(source)
        source = await self._answer_preview(source)
        if source.spec.suspend:
            await self._write_status(source, SourceResult(is_suspended=True))
            return None
        # Before it waits for others: they may wait for its claims.
        if source_status.is_fetch_due(state, source, self._clock.monotonic()):
            await self._fetch(source, state)
        await self._hand_over(source, state, version_of)
        waiting = await self._dependencies(source)
        if waiting is not None:
            await self._write_status(
                source, SourceResult(waiting=waiting, problem=waiting if waiting.stalls else None)
            )
            return Requeue(_DEPENDENCY_S)
        await self._apply(source, state, version_of)
        return Requeue(source_status.requeue_after_s(state, source, self._clock.monotonic()))

    async def _answer_preview(self, source: GitSource) -> GitSource:
        """Write a requested preview into the status; return the source with it."""
        request = source_status.requested_preview(source)
        if not request or source_status.is_preview_current(source):
            return source
        commit = await self._fetch_commit(source)
        preview = await previews.compute(
            self._transport, self._clock, source, commit, request=request
        )

        def with_preview(now: GitSource) -> GitSourceStatus | None:
            return (now.status or GitSourceStatus()).model_copy(update={"preview": preview})

        try:
            await mutate_status(self._transport, self._clock, GitSource, source.name, with_preview)
        except NotFoundError:
            return source  # it was deleted, which queues it
        return source.model_copy(update={"status": with_preview(source)})

    def _watch_keys(self, source: GitSource) -> None:
        """Watch the objects that were applied, and those of a commit that may have been refused."""
        inventory = source.status.inventory if source.status is not None else ()
        state = self._states.get(source.name)
        loaded_commit = state.loaded_commit if state is not None else None
        self.watched_keys[source.name] = frozenset(
            (
                *(keys.spec_key(entry.kind, entry.name) for entry in inventory),
                *(
                    keys.spec_key(*loaded_object.key)
                    for loaded_object in (loaded_commit.loaded if loaded_commit else ())
                ),
                *(keys.status_key(check.kind, check.name) for check in source.spec.health_checks),
                *(keys.status_key("GitSource", one) for one in source.spec.depends_on),
            )
        )

    async def _dependencies(self, source: GitSource) -> SourceProblem | None:
        """Return the problem of the first dependency that is not Ready."""
        if not source.spec.depends_on:
            return None
        sources = {obj.name: obj for obj in await objects.list_all(self._transport, GitSource)}
        cycle = source_status.dependency_cycle(source.name, sources)
        if cycle:
            message = f"spec.dependsOn forms a cycle: {' -> '.join(cycle)}; remove one dependency"
            return SourceProblem(reason="DependencyCircle", message=message, stalls=True)
        for name in source.spec.depends_on:
            git_source = sources.get(name)
            status = git_source.status if git_source is not None else None
            if status is None or not is_true(status.conditions, "Ready"):
                state = "is not Ready" if git_source is not None else "does not exist"
                message = f"waits for gitsource/{name}, which {state}"
                return SourceProblem(reason="DependencyNotReady", message=message, stalls=False)
        return None

    async def _fetch(self, source: GitSource, state: SourceState) -> None:
        """Fetch the newest commit and keep it, or the reason why there is none."""
        sync = source_status.requested_sync(source)
        loaded_commit = state.loaded_commit
        known = (
            loaded_commit.commit
            if loaded_commit is not None and loaded_commit.commit == state.newest
            else None
        )
        began = self._clock.monotonic()
        result = await self._fetch_commit(source, known=known)
        if result.answer.failure is not None and loaded_commit is None:
            await self._load_applied(source, state)
        state.fetched_at, state.sync = self._clock.monotonic(), sync
        failure, commit = result.answer.failure, result.answer.revision
        if commit:
            state.newest_info = (
                result.answer.commit or state.newest_info
                if commit == state.newest
                else result.answer.commit
            )
            if commit != state.newest:
                state.newest, state.newest_at = commit, state.fetched_at
            state.observed = source_status.revision_of(source.spec.reference, commit)
        if failure is not None:
            is_passing = failure.passes
            state.failures += 1
            state.problem = SourceProblem(
                reason=failure.reason, message=failure.message, stalls=not is_passing
            )
            state.asked_at = began
            log.info("no commit", extra={"source": source.name, "reason": failure.reason})
            return
        state.failures, state.problem = 0, None
        if known is None or commit != known:
            await self._load(state, result, state.observed)
        state.asked_at = began  # last: from now on the claims count as known

    async def _hand_over(
        self, source: GitSource, state: SourceState, version_of: Callable[[str], int]
    ) -> None:
        """Hand objects that left the manifests over to the sources of the repository that have them now.

        A source that has not read a commit as new as this one may have them, too: it is fetched, and pruning waits.
        """
        for name, other in self._states.items():
            if source.name in other.unread_claims:
                self._enqueue(name)
        loaded_commit = state.loaded_commit
        if loaded_commit is None or state.problem is not None:
            return
        if _is_settled(state, loaded_commit, version_of):
            return
        if state.unread_claims:
            state.settled, state.is_prune_due, state.unread_claims = None, True, ()
        name = source_status.apply_set_name(source.name)
        members = (await apply_sets.read_set(self._transport, name)).members
        surplus = members.keys() - {item.key for item in loaded_commit.loaded}
        if not surplus:
            return
        siblings = await self._siblings(source)
        state.unread_claims = self._refetch(siblings, state)
        claims: dict[ObjectKey, str] = {}
        for sibling in siblings:
            commit = self._states[sibling].loaded_commit if sibling in self._states else None
            if commit is not None and sibling not in state.unread_claims:
                claims |= {item.key: sibling for item in commit.loaded if item.key in surplus}
        await applier.hand_over(self._transport, self._clock, source.name, claims)
        for sibling in set(claims.values()):
            self._enqueue(sibling)

    async def _siblings(self, source: GitSource) -> list[str]:
        """Return the other sources of the same repository that are not suspended."""
        address = repository_address(source.spec.repository)
        return [
            other.name
            for other in await objects.list_all(self._transport, GitSource)
            if other.name != source.name
            and not other.spec.suspend
            and repository_address(other.spec.repository) == address
        ]

    def _refetch(self, sources: list[str], state: SourceState) -> tuple[str, ...]:
        """Return the sources whose manifests are unknown at this commit; queue those that were read before it."""
        states = {name: self._states.get(name) for name in sources}
        for name, other in states.items():
            if other is not None and not source_status.is_as_new(other, state):
                other.needed_at = state.newest_at
                self._enqueue(name)
        return tuple(
            name
            for name, other in states.items()
            if not source_status.claims_are_known(other, state)
        )

    async def _load_applied(self, source: GitSource, state: SourceState) -> None:
        """Load the applied commit from the cache, so that drift is corrected while the repository is away."""
        status = source.status
        if status is None or status.observed_generation != source.metadata.generation:
            return
        commit = source_status.commit_in(status.applied_revision)
        if not commit:
            return
        result = await self._fetch_commit(source, offline=commit)
        if result.answer.failure is None:
            # It was found under the reference of its time, which the spec may not name any more.
            await self._load(state, result, status.applied_revision)

    async def _load(self, state: SourceState, found: FetchResult, revision: str) -> None:
        try:
            # In a thread: ten thousand objects take a second, and the leader must renew its leases.
            loaded = tuple(await asyncio.to_thread(read_objects, found.documents))
        except ManifestErrors as errors:
            state.problem = SourceProblem(
                reason="BrokenManifests", message=errors.show(_SHOWN), stalls=True
            )
            return
        state.loaded_commit = LoadedCommit(
            revision=revision,
            commit=found.answer.revision,
            info=found.answer.commit,
            loaded=loaded,
        )

    async def _fetch_commit(
        self, source: GitSource, *, known: str | None = None, offline: str = ""
    ) -> FetchResult:
        """Fetch the newest commit, or read the commit `offline` from the cache, which needs no credentials."""
        found = FetchCredentials() if offline else credentials.find(source, self._git)
        host = await credentials.trusted_host(self._transport, source)
        if isinstance(found, FetchFailure):
            return FetchResult(answer=FetchResponse(failure=found), documents=())
        if isinstance(host, FetchFailure):
            return FetchResult(answer=FetchResponse(failure=host), documents=())
        spec = source.spec
        reference = spec.reference
        folder = f"{source.name}-{source.metadata.uid or 'x'}"
        request = FetchRequest(
            repository=spec.repository,
            branch=reference.branch if not offline else None,
            tag=reference.tag if not offline else None,
            commit=offline or reference.commit,
            path=spec.path,
            cache=str(self._git.cache / folder),
            credentials=found,
            trusted_host=host,
            known=known,
            offline=bool(offline),
            timeout_s=float(duration.parse(spec.timeout)),
        )
        return await fetch(request, self._clock)

    async def _apply(
        self, source: GitSource, state: SourceState, version_of: Callable[[str], int]
    ) -> None:
        """Apply the loaded commit, unless it is applied and unchanged; write the status."""
        loaded_commit, problem = state.loaded_commit, state.problem
        if loaded_commit is None:
            await self._write_status(source, _failed(state, problem))
            return
        if not _is_settled(state, loaded_commit, version_of):
            result = await self._apply_commit(source, state, loaded_commit)
            problem = problem or result.problem
            if result.problem is not None:
                if (
                    result.problem.reason == "Refused"
                ):  # perhaps because another source still has an object
                    self._refetch(await self._siblings(source), state)
                await self._write_status(source, _failed(state, problem))
                return
        waiting = await self._failing_checks(source, state)
        if waiting is not None and waiting.stalls:
            problem = problem or waiting
        source_result = SourceResult(
            observed=state.observed,
            observed_commit=state.newest_info,
            applied=loaded_commit.revision,
            applied_commit=loaded_commit.info,
            inventory=_inventory(loaded_commit),
            drift=state.drift,
            unread_claims=state.unread_claims if source.spec.prune else (),
            problem=problem,
            waiting=waiting,
            sync=state.sync,
        )
        await self._write_status(source, source_result)

    async def _apply_commit(
        self, source: GitSource, state: SourceState, loaded_commit: LoadedCommit
    ) -> applier.CommitResult:
        before = source.status.applied_revision if source.status is not None else ""
        generation = source.status.observed_generation if source.status is not None else 0
        is_new = (before, generation) != (loaded_commit.revision, source.metadata.generation)
        state.settled = None
        result = await applier.apply_commit(
            self._transport,
            self._clock,
            source,
            loaded_commit,
            is_new=is_new or state.is_prune_due,
            prune=source.spec.prune and not state.unread_claims,
        )
        if result.problem is not None:
            return result
        state.settled = (loaded_commit.commit, _versions(result.objects))
        state.is_prune_due = False
        state.drift = result.drift if source.spec.drift_policy == "Warn" else ()
        await record_applied(self._recorder, source, loaded_commit.revision, result, is_new=is_new)
        log.info("applied", extra={"source": source.name, "revision": loaded_commit.revision})
        return result

    async def _failing_checks(self, source: GitSource, state: SourceState) -> SourceProblem | None:
        """Return the problem of the health checks that fail; None if all pass."""
        checks = source.spec.health_checks
        checked: dict[ObjectKey, ApiObject | None] = {}
        for check in checks:
            kind = kinds.by_name(check.kind)
            assert kind is not None
            obj = await objects.get(self._transport, kind.type, check.name)
            checked[ObjectKey(check.kind, check.name)] = obj
        failing = source_status.failing_health_checks(checks, checked)
        if not failing:
            state.unhealthy_since = None
            return None
        now = self._clock.monotonic()
        if state.unhealthy_since is None:
            state.unhealthy_since = now
        is_late = now >= state.unhealthy_since + duration.parse(source.spec.health_timeout)
        message = source_status.join_first(failing)
        if is_late:
            message = f"after {source.spec.health_timeout} (spec.healthTimeout): {message}"
            return SourceProblem(reason="HealthCheckFailed", message=message, stalls=True)
        return SourceProblem(reason="WaitingForHealth", message=message, stalls=False)

    async def _write_status(self, source: GitSource, found: SourceResult) -> None:
        """Write the status if it changed."""
        new = source_status.compute_status(source, found, self._clock.now())
        if new == source.status:
            return

        def updated(now: GitSource) -> GitSourceStatus | None:
            # A source that was edited meanwhile is reconciled again.
            if now.metadata.generation != source.metadata.generation:
                return None
            return source_status.compute_status(now, found, self._clock.now())

        try:
            await mutate_status(self._transport, self._clock, GitSource, source.name, updated)
        except NotFoundError:
            return  # it was deleted, which queues it
        self._watch_keys(source.model_copy(update={"status": new}))
        await record_status(self._recorder, source, source.status, new)


def _failed(state: SourceState, problem: SourceProblem | None) -> SourceResult:
    """Return the result of a commit that is not applied."""
    return SourceResult(
        observed=state.observed,
        observed_commit=state.newest_info,
        problem=problem,
        sync=state.sync,
    )


def _is_settled(
    state: SourceState, loaded_commit: LoadedCommit, version_of: Callable[[str], int]
) -> bool:
    """Return whether the commit is applied, and its objects have not changed since."""
    if state.settled is None or state.settled[0] != loaded_commit.commit or state.unread_claims:
        return False
    return all(version_of(keys.spec_key(*key)) == version for key, version in state.settled[1])


def _versions(found: tuple[ApiObject, ...]) -> frozenset[tuple[ObjectKey, int]]:
    return frozenset(
        (
            ObjectKey(api_object.kind, api_object.name),
            int(api_object.metadata.resource_version or 0),
        )
        for api_object in found
    )


def _inventory(loaded_commit: LoadedCommit) -> tuple[InventoryEntry, ...]:
    keys_of = sorted(item.key for item in loaded_commit.loaded)
    return tuple(InventoryEntry(kind=key.kind, name=key.name) for key in keys_of)
