"""One look at one source: fetch if it is due, apply what is to be applied, say what came of it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machinery.clock import Clock
from machinery.loop import Again
from manifests.errors import ManifestErrors
from manifests.load import Document, read_objects
from reconciler.gitops import applying, asking, due, release, telling, verdict
from reconciler.gitops.asking import Ask
from reconciler.gitops.due import Held, Memory
from reconciler.gitops.fetcher import Fetched, fetch
from reconciler.gitops.verdict import Problem, Verdict
from schemas import duration, kinds
from schemas.gitsource import GitSource, GitSourceStatus, InventoryEntry
from schemas.meta import ApiObject, ObjectKey, is_true
from store import keys, objects
from store.errors import NotFoundError
from store.events import EventRecorder
from store.mutate import mutate_status
from store.port import Transport

log = logging.getLogger(__name__)

_SHOWN = 5
_DEPENDENCY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders on this machine."""

    cache: Path
    """Where what was fetched is kept."""
    credentials: Path
    """Where the files lie that specs name."""


class Sources:
    """Looks at sources, for as long as this process leads; `transport` is fenced by the leadership."""

    def __init__(
        self, transport: Transport, clock: Clock, recorder: EventRecorder, places: Places
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._recorder = recorder
        self._places = places
        self._memories: dict[str, Memory] = {}
        self.concerns: dict[str, frozenset[str]] = {}
        """For each source the keys of the store that it is to be looked at for when they change."""

    async def look(self, name: str, version_of: Callable[[str], int]) -> Again | None:
        """Look at a source; `version_of` says at which version the cache has an object.

        Raises:
            StoreError: the store did not answer; FencedError: somebody else leads.

        """
        source = await objects.get(self._transport, GitSource, name)
        if source is None:
            self._memories.pop(name, None)
            self.concerns.pop(name, None)
            count = await release.release(self._transport, self._clock, name)
            if count:
                log.info("objects of a source that is gone are nobody's", extra={"source": name})
            return None
        memory = due.remembered(self._memories.get(name), source)
        self._memories[name] = memory
        self._listen(source)
        if source.spec.suspend:
            await self._say(source, Verdict(is_suspended=True))
            return None
        waiting = await self._dependencies(source)
        if waiting is not None:
            await self._say(
                source, Verdict(waiting=waiting, problem=waiting if waiting.stalls else None)
            )
            return Again(_DEPENDENCY_S)
        if due.is_fetch_due(memory, source, self._clock.monotonic()):
            await self._fetch(source, memory)
        await self._apply(source, memory, version_of)
        return Again(due.next_look_s(memory, source, self._clock.monotonic()))

    def _listen(self, source: GitSource) -> None:
        inventory = source.status.inventory if source.status is not None else ()
        self.concerns[source.name] = frozenset(
            (
                *(keys.spec_key(one.kind, one.name) for one in inventory),
                *(keys.status_key(one.kind, one.name) for one in source.spec.health_checks),
                *(keys.status_key("GitSource", one) for one in source.spec.depends_on),
            )
        )

    async def _dependencies(self, source: GitSource) -> Problem | None:
        """Return what has to be Ready first, and is not."""
        if not source.spec.depends_on:
            return None
        every = {one.name: one for one in await objects.list_all(self._transport, GitSource)}
        circle = verdict.circle(source.name, every)
        if circle:
            message = f"spec.dependsOn goes in a circle: {' -> '.join(circle)}; break it"
            return Problem(reason="DependencyCircle", message=message, stalls=True)
        for name in source.spec.depends_on:
            one = every.get(name)
            status = one.status if one is not None else None
            if status is None or not is_true(status.conditions, "Ready"):
                what = "is not Ready" if one is not None else "is not there"
                message = f"waits for gitsource/{name}, which {what}"
                return Problem(reason="DependencyNotReady", message=message, stalls=False)
        return None

    async def _fetch(self, source: GitSource, memory: Memory) -> None:
        """Ask for the newest commit, and remember it, or why there is none."""
        sync = due.sync_of(source)
        held = memory.held
        known = held.commit if held is not None and held.commit == memory.newest else None
        found = await fetch(self._ask(source, known=known), self._clock)
        if found.answer.failure is not None and held is None:
            await self._recall(source, memory)
        memory.fetched_at, memory.sync = self._clock.monotonic(), sync
        failure, commit = found.answer.failure, found.answer.revision
        if commit:
            memory.newest = commit
            memory.observed = due.revision_of(source.spec.reference, commit)
        if failure is not None:
            is_passing = failure.passes
            memory.failures += 1
            memory.problem = Problem(
                reason=failure.reason, message=failure.message, stalls=not is_passing
            )
            log.info("no commit", extra={"source": source.name, "reason": failure.reason})
            return
        memory.failures, memory.problem = 0, None
        if known is None or commit != known:
            await self._hold(source, memory, found)

    async def _recall(self, source: GitSource, memory: Memory) -> None:
        """Read what was applied before out of the cache: it is kept as it is while its source is away."""
        status = source.status
        if status is None or status.observed_generation != source.metadata.generation:
            return
        commit = due.commit_in(status.applied_revision)
        if not commit:
            return
        found = await fetch(self._ask(source, known=None, offline=commit), self._clock)
        if found.answer.failure is None:
            await self._hold(source, memory, found)

    async def _hold(self, source: GitSource, memory: Memory, found: Fetched) -> None:
        documents = [Document(source=one.source, root=one.root) for one in found.documents]
        commit = found.answer.revision
        try:
            # A thread: ten thousand objects are a second's work, and the leader has leases to renew.
            loaded = tuple(await asyncio.to_thread(read_objects, documents))
        except ManifestErrors as errors:
            memory.problem = Problem(
                reason="BrokenManifests", message=errors.show(_SHOWN), stalls=True
            )
            return
        revision = due.revision_of(source.spec.reference, commit)
        memory.held = Held(revision=revision, commit=commit, loaded=loaded)

    def _ask(self, source: GitSource, *, known: str | None, offline: str = "") -> Ask:
        spec = source.spec
        reference = spec.reference
        folder = f"{source.name}-{source.metadata.uid or 'x'}"
        return Ask(
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

    def _credentials(self, source: GitSource) -> asking.Credentials:
        who = source.spec.credentials
        if who is None:
            return asking.Credentials()

        def whole(name: str | None) -> str | None:
            return None if name is None else str(self._places.credentials / name)

        return asking.Credentials(
            username=who.username,
            password_file=whole(who.password_file),
            ssh_key_file=whole(who.ssh_key_file),
            known_hosts_file=whole(who.known_hosts_file),
            ca_file=whole(who.ca_file),
        )

    async def _apply(
        self, source: GitSource, memory: Memory, version_of: Callable[[str], int]
    ) -> None:
        """Apply what is held, unless it is applied and nobody changed it since; say what came of it."""
        held, problem = memory.held, memory.problem
        if held is None:
            await self._say(
                source, Verdict(observed=memory.observed, problem=problem, sync=memory.sync)
            )
            return
        if not _is_settled(memory, held, version_of):
            result = await self._carry_out(source, memory, held)
            problem = problem or result.problem
            if result.problem is not None:
                found = Verdict(observed=memory.observed, problem=problem, sync=memory.sync)
                await self._say(source, found)
                return
        waiting = await self._unwell(source, memory)
        if waiting is not None and waiting.stalls:
            problem = problem or waiting
        found = Verdict(
            observed=memory.observed,
            applied=held.revision,
            inventory=_inventory(held),
            drift=memory.drift,
            problem=problem,
            waiting=waiting,
            sync=memory.sync,
        )
        await self._say(source, found)

    async def _carry_out(self, source: GitSource, memory: Memory, held: Held) -> applying.Result:
        before = source.status.applied_revision if source.status is not None else ""
        generation = source.status.observed_generation if source.status is not None else 0
        is_new = (before, generation) != (held.revision, source.metadata.generation)
        memory.settled = None
        result = await applying.carry_out(self._transport, self._clock, source, held, is_new=is_new)
        if result.problem is not None:
            return result
        memory.settled = (held.commit, _versions(result.objects))
        memory.drift = result.drift if source.spec.drift_policy == "Warn" else ()
        await telling.tell_applied(self._recorder, source, held.revision, result, is_new=is_new)
        log.info("applied", extra={"source": source.name, "revision": held.revision})
        return result

    async def _unwell(self, source: GitSource, memory: Memory) -> Problem | None:
        """Return what of the health checks does not hold."""
        checks = source.spec.health_checks
        there: dict[ObjectKey, ApiObject | None] = {}
        for check in checks:
            kind = kinds.by_name(check.kind)
            assert kind is not None
            found = await objects.get(self._transport, kind.type, check.name)
            there[ObjectKey(check.kind, check.name)] = found
        unwell = verdict.not_well(checks, there)
        if not unwell:
            memory.unwell_since = None
            return None
        now = self._clock.monotonic()
        if memory.unwell_since is None:
            memory.unwell_since = now
        is_late = now >= memory.unwell_since + duration.parse(source.spec.health_timeout)
        message = verdict.listed(unwell)
        if is_late:
            message = f"after {source.spec.health_timeout} (spec.healthTimeout): {message}"
            return Problem(reason="HealthCheckFailed", message=message, stalls=True)
        return Problem(reason="WaitingForHealth", message=message, stalls=False)

    async def _say(self, source: GitSource, found: Verdict) -> None:
        """Write the status, if it is another than the one that is there."""
        new = verdict.status_of(source, found, self._clock.now())
        if new == source.status:
            return

        def said(now: GitSource) -> GitSourceStatus | None:
            # What was edited meanwhile is looked at anew.
            if now.metadata.generation != source.metadata.generation:
                return None
            return verdict.status_of(now, found, self._clock.now())

        try:
            await mutate_status(self._transport, self._clock, GitSource, source.name, said)
        except NotFoundError:
            return  # it was deleted, and is looked at for that
        self._listen(source.model_copy(update={"status": new}))
        await telling.tell_status(self._recorder, source, source.status, new)


def _is_settled(memory: Memory, held: Held, version_of: Callable[[str], int]) -> bool:
    """Return whether the commit is applied, and its objects are as they were then."""
    if memory.settled is None or memory.settled[0] != held.commit:
        return False
    return all(version_of(keys.spec_key(*key)) == version for key, version in memory.settled[1])


def _versions(found: tuple[ApiObject, ...]) -> frozenset[tuple[ObjectKey, int]]:
    return frozenset(
        (ObjectKey(one.kind, one.name), int(one.metadata.resource_version or 0)) for one in found
    )


def _inventory(held: Held) -> tuple[InventoryEntry, ...]:
    keys_of = sorted(item.key for item in held.loaded)
    return tuple(InventoryEntry(kind=key.kind, name=key.name) for key in keys_of)
