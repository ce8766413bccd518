"""Carrying out an apply: look, check everything, write. Decides nothing: `plan` and `validate` do.

Nothing is written unless everything is valid. Every write names the version that was read; a conflict
or a lost answer means to look again, never to write again blindly.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.garbage import collector_held
from manifests import applyset, plan, prune
from manifests.applied import Applied, ApplyOptions, Outcome, PruneError, Result
from manifests.applyset import Inventory, Members
from manifests.errors import ApplyError, ManifestError, ManifestErrors, names
from manifests.load import Loaded
from manifests.observe import Observed, observe
from manifests.plan import Change, Configured, Created, Unchanged, Write
from manifests.prune import Surplus
from manifests.tree import key_of
from manifests.validate import Known, validate
from schemas.meta import ApiObject, ObjectKey
from store import codec
from store.errors import ConflictError, FencedError, StoreError, UnavailableError
from store.port import Transport

__all__ = [
    "Applied",
    "ApplyOptions",
    "Outcome",
    "Prospect",
    "PruneError",
    "apply",
    "look",
    "prepare",
]

_ATTEMPTS = 5
_IN_FLIGHT = 4
# Long enough for etcd to elect another leader between the second attempt and the last.
_BACKOFF = Backoff(first_s=0.2, limit_s=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What an apply would do, as things are in the store."""

    changes: tuple[Change, ...]
    surplus: Surplus
    """What of the set the manifests say no more."""
    members: Members
    """What the set holds."""


_DEFAULT = ApplyOptions()


async def prepare(
    transport: Transport,
    loaded: Sequence[Loaded],
    clock: Clock,
    options: ApplyOptions = _DEFAULT,
) -> list[Change]:
    """Return what an apply would write; writes nothing. `look` has the errors."""
    return list((await look(transport, loaded, clock, options)).changes)


async def look(
    transport: Transport,
    loaded: Sequence[Loaded],
    clock: Clock,
    options: ApplyOptions = _DEFAULT,
) -> Prospect:
    """Return what an apply would do; writes nothing.

    Raises:
        ManifestErrors: everything that stands against it.
        StoreError: the store could not be read.
        UndecodableError: an object there cannot be read by this process.

    """
    held = Inventory(name="", members={})
    if options.apply_set:
        held = await applyset.read(transport, options.apply_set)
        _refuse_another_managers(held, options)
    declared = [item.key for item in loaded]
    seen = await observe(transport, [*declared, *held.members])
    only = options.prune_kinds if options.prune else ()
    extra = prune.surplus(held.members, declared, seen.objects, name=options.apply_set, only=only)
    changes = _checked(loaded, seen, clock, options, extra)
    return Prospect(changes=tuple(changes), surplus=extra, members=held.members)


async def apply(
    transport: Transport,
    loaded: Sequence[Loaded],
    clock: Clock,
    options: ApplyOptions = _DEFAULT,
) -> Applied:
    """Write what is declared, then delete what the set's manifests say no more.

    Raises:
        ManifestErrors: something is not valid, or others say something else; nothing was written.
        PruneError: everything was written, but something could not be deleted.
        ApplyError: writing stopped on its way; it says what was written.
        StoreError: the store did not answer, before anything was written or when pruning; applying again is safe.
            FencedError: a guard that the transport adds does not hold any more.

    """
    prospect = await look(transport, loaded, clock, options)
    changes, doomed = prospect.changes, prospect.surplus.doomed
    kept = tuple(clash for change in changes for clash in change.kept)
    if options.server_dry_run:
        would = {key_of(c.obj): Outcome(obj=c.obj, result=_result(c)) for c in changes}
        outcomes = tuple(would[item.key] for item in loaded)
        return Applied(outcomes=outcomes, pruned=tuple(map(key_of, doomed)), kept=kept)
    name, manager = options.apply_set, options.manager
    keys = [item.key for item in loaded]
    if name:
        await applyset.change(
            transport, clock, name, manager, lambda old: applyset.united(old, keys)
        )
    run = _Run(transport, loaded, clock, options, prospect.surplus)
    await run.write(changes)
    outcomes = tuple(run.outcomes[key] for key in keys)
    pruned, failed = await prune.carry_out(transport, clock, doomed, name=name, manager=manager)
    if name:
        gone = {*prospect.surplus.gone, *map(key_of, doomed)} - failed.keys()
        uids = {key_of(one.obj): one.obj.metadata.uid for one in outcomes}
        await applyset.change(
            transport, clock, name, manager, lambda old: _narrowed(old, gone, uids)
        )
    applied = Applied(outcomes=outcomes, pruned=tuple(pruned), kept=kept)
    if failed:
        raise PruneError(failed, applied)
    return applied


def _narrowed(old: Members, gone: Collection[ObjectKey], uids: Members) -> Members:
    return {**{key: uid for key, uid in old.items() if key not in gone}, **uids}


def _refuse_another_managers(held: Inventory, options: ApplyOptions) -> None:
    if held.manager in ("", options.manager) or options.how.takes_over:
        return
    message = f"is applied by {held.manager}, and not by {options.manager}"
    hint = "Give another name with --applyset, or take it over with --force-conflicts"
    raise ManifestErrors(
        [ManifestError(source=f"apply set {held.name}", message=message, hint=hint)]
    )


def _checked(
    loaded: Sequence[Loaded],
    seen: Observed,
    clock: Clock,
    options: ApplyOptions,
    extra: Surplus,
) -> list[Change]:
    known = _without(seen.known, extra)
    problems = [*validate(loaded, known), *plan.refusals(loaded, seen.objects, options.how)]
    if problems:
        raise ManifestErrors(problems)
    with collector_held():
        return plan.plan_changes(loaded, seen.objects, now=clock.now(), how=options.how)


def _without(known: Known, extra: Surplus) -> Known:
    """Return what there will be when what is to go is gone."""
    gone = {kind: {o.name for o in extra.doomed if o.kind == kind} for kind in plan.ORDER}
    return replace(
        known,
        node_pools=known.node_pools - gone["NodePool"],
        shard_groups=known.shard_groups - gone["ShardGroup"],
        model_deployments=known.model_deployments - gone["ModelDeployment"],
        model_routes=tuple(r for r in known.model_routes if r.name not in gone["ModelRoute"]),
    )


class _Run:
    """One apply on its way: what was written so far, and what went wrong."""

    def __init__(
        self,
        transport: Transport,
        loaded: Sequence[Loaded],
        clock: Clock,
        options: ApplyOptions,
        extra: Surplus,
    ) -> None:
        self.outcomes: dict[ObjectKey, Outcome] = {}
        self._transport = transport
        self._loaded = loaded
        self._clock = clock
        self._options = options
        self._extra = extra
        self._failures: list[StoreError | ManifestErrors | codec.UndecodableError] = []

    async def write(self, changes: Sequence[Change]) -> None:
        """Write wave after wave; stop before the next one when something went wrong."""
        for change in changes:
            if isinstance(change, Unchanged):
                self._note(change.obj, "unchanged")
        for wave in plan.waves(changes):
            slots = asyncio.Semaphore(_IN_FLIGHT)
            async with asyncio.TaskGroup() as group:
                for batch in wave:
                    group.create_task(self._in_turn(slots, batch))
            fenced = next((f for f in self._failures if isinstance(f, FencedError)), None)
            if fenced is not None:
                raise fenced
            if self._failures:
                raise self._error(changes) from self._failures[0]

    async def _in_turn(self, slots: asyncio.Semaphore, batch: Sequence[Write]) -> None:
        """Write a batch when its turn comes; what fails is kept, so that the others can end well."""
        async with slots:
            if self._failures:
                return
            try:
                await self._write(batch)
            except (StoreError, ManifestErrors, codec.UndecodableError) as error:
                self._failures.append(error)

    async def _write(self, batch: Sequence[Write]) -> None:
        pending = batch
        for attempt in range(1, _ATTEMPTS + 1):
            failure = await self._commit(pending)
            if failure is None:
                return
            if isinstance(failure, UnavailableError):
                await self._clock.sleep(_BACKOFF.delay_s(attempt))
            before, pending = pending, await self._look_again(pending, failure)
            if not pending:
                return
            if attempt == _ATTEMPTS:
                raise _given_up(failure, before, pending) from failure

    async def _commit(self, writes: Sequence[Write]) -> ConflictError | UnavailableError | None:
        """Write all in one transaction; return why it may not have happened."""
        guards = [codec.unchanged(write.obj) for write in writes]
        try:
            puts = [codec.put_spec(write.obj) for write in writes]
            revision = await self._transport.commit(guards, puts)
        except FencedError:
            raise
        except (ConflictError, UnavailableError) as error:
            return error
        for write in writes:
            self._note(codec.with_version(write.obj, revision), _result(write))
        return None

    async def _look_again(
        self, pending: Sequence[Write], failure: ConflictError | UnavailableError
    ) -> Sequence[Write]:
        """Return what is still to be written, against what the store has now.

        What the store has as declared counts as written: by us, if the answer was lost.
        """
        try:
            seen = await observe(self._transport, [item.key for item in self._loaded])
        except UnavailableError:
            return pending  # guards keep the old plan from overwriting anything
        wanted = {key_of(write.obj): write for write in pending}
        again: list[Write] = []
        for change in _checked(self._loaded, seen, self._clock, self._options, self._extra):
            earlier = wanted.get(key_of(change.obj))
            if earlier is None:
                continue
            if not isinstance(change, Unchanged):
                again.append(change)
            else:
                lost = isinstance(failure, UnavailableError)
                self._note(change.obj, _result(earlier if lost else change))
        return again

    def _note(self, obj: ApiObject, result: Result) -> None:
        self.outcomes[key_of(obj)] = Outcome(obj=obj, result=result)

    def _error(self, changes: Sequence[Change]) -> ApplyError | ManifestErrors:
        due = [key_of(change.obj) for change in changes if not isinstance(change, Unchanged)]
        written = [key for key in due if key in self.outcomes]
        first = self._failures[0]
        if isinstance(first, ManifestErrors) and not written:
            return first
        missing = [key for key in due if key not in self.outcomes]
        return ApplyError(str(first), written=written, missing=missing)


def _result(change: Change) -> Result:
    match change:
        case Created():
            return "created"
        case Configured():
            return "configured"
        case Unchanged():
            return "unchanged"
        case _:
            assert_never(change)


def _given_up(
    failure: ConflictError | UnavailableError, before: Sequence[Write], after: Sequence[Write]
) -> StoreError:
    if isinstance(failure, UnavailableError):
        return UnavailableError(f"the store did not answer: {failure}", ambiguous=failure.ambiguous)
    versions = {key_of(w.obj): w.obj.metadata.resource_version for w in before}
    moved = [
        key_of(w.obj) for w in after if versions[key_of(w.obj)] != w.obj.metadata.resource_version
    ]
    what = names(moved) or "what is to be written"
    return ConflictError(f"{what} was changed by others {_ATTEMPTS} times in a row")
