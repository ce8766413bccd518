"""Execution of an apply: observe, check everything, write, prune. Decisions are made by `plan` and `validate`.

Nothing is written unless everything is valid. Every write names the version that was read. After a conflict or a lost
answer the store is observed again; a write is never repeated blindly.
"""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.gc_pause import pause_collection
from manifests import apply_sets, plan
from manifests.apply_sets import ApplySetInventory, Members, Surplus
from manifests.errors import ApplyError, ManifestError, ManifestErrors, join_names
from manifests.load import LoadedObject
from manifests.observe import ObservedObjects, observe
from manifests.ownership import FieldConflict
from manifests.plan import (
    ApplyOptions,
    Change,
    ConfiguredObject,
    CreatedObject,
    UnchangedObject,
    Write,
)
from manifests.trees import key_of
from manifests.validate import StoreNames, validate
from schemas.meta import ApiObject, ObjectKey
from store import codec
from store.errors import ConflictError, FencedError, StoreError, UnavailableError
from store.port import Transport

ApplyVerb: TypeAlias = Literal["created", "configured", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedObject:
    """The result of an apply for one object."""

    obj: ApiObject
    """The object as it is in the store now."""
    result: ApplyVerb


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """The result of an apply or of a dry run."""

    outcomes: tuple[AppliedObject, ...]
    """The objects, in the order of the manifests."""
    pruned: tuple[ObjectKey, ...] = ()
    """The objects that were deleted or marked for deletion, in this order."""
    kept_by_others: tuple[FieldConflict, ...] = ()
    """Fields that keep another writer's value, although the manifests have a different one."""


class PruneError(ApplyError):
    """Everything was written, but some objects could not be pruned; the set still contains them."""

    def __init__(self, reasons: Mapping[ObjectKey, str], applied: ApplyResult) -> None:
        self.reasons = dict(reasons)
        self.applied = applied
        """The result so far."""
        written = tuple(key_of(outcome.obj) for outcome in applied.outcomes)
        super().__init__("pruning failed", written=written, missing=tuple(reasons))
        details = "; ".join(reasons.values())
        what = f"all objects were written; pruning failed: {details}. Not pruned: {join_names(self.missing)}"
        self.args = (f"{what}. Applying again is safe, and tries again",)


class PlanChangedError(ApplyError):
    """The store changed after the preview that was agreed to; a new preview says what would be written now."""


__all__ = [
    "AppliedObject",
    "ApplyOptions",
    "ApplyPreview",
    "ApplyResult",
    "PlanChangedError",
    "PruneError",
    "apply",
    "compare",
    "prepare",
    "preview",
]

_ATTEMPTS = 5
_IN_FLIGHT = 4
# Long enough for etcd to elect another leader between the second attempt and the last.
_BACKOFF = Backoff(first_s=0.2, limit_s=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPreview:
    """The changes that an apply would make to the current store."""

    changes: tuple[Change, ...]
    surplus: Surplus
    """Objects of the set that the manifests no longer contain."""
    members: Members
    """All objects of the set."""


_DEFAULT = ApplyOptions()


async def prepare(
    transport: Transport,
    loaded: Sequence[LoadedObject],
    clock: Clock,
    options: ApplyOptions = _DEFAULT,
) -> list[Change]:
    """Return the changes that an apply would write; writes nothing. Raises as `preview` does."""
    return list((await preview(transport, loaded, clock, options)).changes)


async def preview(
    transport: Transport,
    loaded: Sequence[LoadedObject],
    clock: Clock,
    options: ApplyOptions = _DEFAULT,
) -> ApplyPreview:
    """Return what an apply would do; writes nothing.

    Raises:
        ManifestErrors: all problems that prevent the apply.
        StoreError: the store could not be read.
        UndecodableError: this process cannot read an object in the store.

    """
    inventory = ApplySetInventory(name="", members={})
    if options.apply_set:
        inventory = await apply_sets.read_set(transport, options.apply_set)
        _refuse_another_managers(inventory, options)
    declared = [item.key for item in loaded]
    observed = await observe(transport, [*declared, *inventory.members])
    absent = {key for key in declared if key not in observed.objects}
    claims = await apply_sets.git_claims(transport, absent) if options.apply_set else {}
    only = options.prune_kinds if options.prune else ()
    surplus = apply_sets.find_surplus(
        inventory.members, declared, observed.objects, name=options.apply_set, only=only
    )
    changes = _checked(loaded, observed, clock, options, surplus, claims)
    return ApplyPreview(changes=tuple(changes), surplus=surplus, members=inventory.members)


def compare(
    loaded: Sequence[LoadedObject], observed: ObservedObjects, clock: Clock
) -> list[Change]:
    """Return what an apply without a set would do to these objects of the store.

    Raises:
        ManifestErrors: all problems that prevent the apply.

    """
    surplus = apply_sets.find_surplus(
        {}, [item.key for item in loaded], observed.objects, name="", only=()
    )
    return _checked(loaded, observed, clock, _DEFAULT, surplus, {})


async def apply(
    transport: Transport,
    loaded: Sequence[LoadedObject],
    clock: Clock,
    options: ApplyOptions = _DEFAULT,
) -> ApplyResult:
    """Write the declared objects, then delete those of the set that the manifests no longer contain.

    Raises:
        ManifestErrors: a manifest is invalid, or conflicts with other writers; nothing was written.
        PruneError: everything was written, but some objects could not be deleted.
        PlanChangedError: the changes are others than those of `options.expected_plan`.
        ApplyError: writing stopped half-way; the error lists what was written.
        StoreError: the store did not answer before the first write, or while pruning; applying again is safe.
            FencedError: a guard that the transport adds no longer holds.

    """
    prospect = await preview(transport, loaded, clock, options)
    changes, doomed = prospect.changes, prospect.surplus.doomed
    if options.expected_plan and options.expected_plan != plan.plan_id(changes):
        due = tuple(key_of(one.obj) for one in changes)
        raise PlanChangedError("the fleet changed after the preview", written=(), missing=due)
    conflicts = tuple(conflict for change in changes for conflict in change.kept_by_others)
    if options.server_dry_run:
        would = {key_of(c.obj): AppliedObject(obj=c.obj, result=_result(c)) for c in changes}
        outcomes = tuple(would[item.key] for item in loaded)
        return ApplyResult(
            outcomes=outcomes, pruned=tuple(map(key_of, doomed)), kept_by_others=conflicts
        )
    name, manager = options.apply_set, options.manager
    keys = [item.key for item in loaded]
    if name:
        await apply_sets.change_set(
            transport, clock, name, manager, lambda old: apply_sets.add_members(old, keys)
        )
    run = _ApplyRun(transport, loaded, clock, options, prospect.surplus)
    await run.write(changes)
    outcomes = tuple(run.outcomes[key] for key in keys)
    pruned, failed = await apply_sets.prune_objects(
        transport, clock, doomed, name=name, manager=manager
    )
    if name:
        gone = {*prospect.surplus.gone, *map(key_of, doomed)} - failed.keys()
        uids = {key_of(outcome.obj): outcome.obj.metadata.uid for outcome in outcomes}
        await apply_sets.change_set(
            transport, clock, name, manager, lambda old: _narrowed(old, gone, uids)
        )
    applied = ApplyResult(outcomes=outcomes, pruned=tuple(pruned), kept_by_others=conflicts)
    if failed:
        raise PruneError(failed, applied)
    return applied


def _narrowed(old: Members, gone: Collection[ObjectKey], uids: Members) -> Members:
    return {**{key: uid for key, uid in old.items() if key not in gone}, **uids}


def _refuse_another_managers(inventory: ApplySetInventory, options: ApplyOptions) -> None:
    if inventory.manager in ("", options.manager) or options.takes_over:
        return
    message = f"is applied by {inventory.manager}, and not by {options.manager}"
    hint = "Choose another name with --applyset, or take the set over with --force-conflicts"
    raise ManifestErrors(
        [ManifestError(source=f"apply set {inventory.name}", message=message, hint=hint)]
    )


def _checked(
    loaded: Sequence[LoadedObject],
    observed: ObservedObjects,
    clock: Clock,
    options: ApplyOptions,
    surplus: Surplus,
    claims: Mapping[ObjectKey, str],
) -> list[Change]:
    known = _without_pruned(observed.known, surplus)
    problems = [
        *validate(loaded, known),
        *plan.find_refusals(loaded, observed.objects, options, claims),
    ]
    if problems:
        raise ManifestErrors(problems)
    with pause_collection():
        return plan.plan_changes(loaded, observed.objects, now=clock.now(), options=options)


def _without_pruned(known: StoreNames, surplus: Surplus) -> StoreNames:
    """Return the names that remain after pruning."""
    gone = {kind: {o.name for o in surplus.doomed if o.kind == kind} for kind in plan.ORDER}
    return replace(
        known,
        node_pools=known.node_pools - gone["NodePool"],
        shard_groups=known.shard_groups - gone["ShardGroup"],
        model_deployments=known.model_deployments - gone["ModelDeployment"],
        model_routes=tuple(r for r in known.model_routes if r.name not in gone["ModelRoute"]),
    )


class _ApplyRun:
    """One apply in progress: the objects written so far, and the failures."""

    def __init__(
        self,
        transport: Transport,
        loaded: Sequence[LoadedObject],
        clock: Clock,
        options: ApplyOptions,
        surplus: Surplus,
    ) -> None:
        self.outcomes: dict[ObjectKey, AppliedObject] = {}
        self._transport = transport
        self._loaded = loaded
        self._clock = clock
        self._options = options
        self._surplus = surplus
        self._failures: list[StoreError | ManifestErrors | codec.UndecodableError] = []

    async def write(self, changes: Sequence[Change]) -> None:
        """Write wave after wave; stop before the next one after a failure."""
        for change in changes:
            if isinstance(change, UnchangedObject):
                self._note(change.obj, "unchanged")
        for wave in plan.plan_waves(changes):
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
        """Write a batch when a slot is free; a failure is recorded, so that the other batches can finish."""
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
            if self._options.expected_plan and isinstance(failure, ConflictError):
                raise failure  # what would be merged now was not agreed to
            if isinstance(failure, UnavailableError):
                await self._clock.sleep(_BACKOFF.delay_s(attempt, jitter=random.random()))
            before, pending = pending, await self._look_again(pending, failure)
            if not pending:
                return
            if attempt == _ATTEMPTS:
                raise _given_up(failure, before, pending) from failure

    async def _commit(self, writes: Sequence[Write]) -> ConflictError | UnavailableError | None:
        """Write all in one transaction; return the error if it may not have been applied."""
        guards = [codec.unchanged_guard(write.obj) for write in writes]
        try:
            revision = await self._transport.commit(guards, [write.put for write in writes])
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
        """Return the writes that are still to be done against the current store.

        An object that is in the store as declared counts as written; by this apply, if an answer was lost.
        """
        try:
            observed = await observe(self._transport, [item.key for item in self._loaded])
        except UnavailableError:
            return pending  # their guards prevent overwriting newer data
        wanted = {key_of(write.obj): write for write in pending}
        again: list[Write] = []
        observed_now = (self._loaded, observed, self._clock, self._options, self._surplus)
        for change in _checked(*observed_now, {}):
            earlier = wanted.get(key_of(change.obj))
            if earlier is None:
                continue
            if not isinstance(change, UnchangedObject):
                again.append(change)
            else:
                lost = isinstance(failure, UnavailableError)
                self._note(change.obj, _result(earlier if lost else change))
        return again

    def _note(self, obj: ApiObject, result: ApplyVerb) -> None:
        self.outcomes[key_of(obj)] = AppliedObject(obj=obj, result=result)

    def _error(self, changes: Sequence[Change]) -> ApplyError | ManifestErrors:
        due = [key_of(change.obj) for change in changes if not isinstance(change, UnchangedObject)]
        written = [key for key in due if key in self.outcomes]
        first = self._failures[0]
        if isinstance(first, ManifestErrors) and not written:
            return first
        missing = [key for key in due if key not in self.outcomes]
        if self._options.expected_plan and isinstance(first, ConflictError):
            why = "the fleet changed after the preview"
            return PlanChangedError(why, written=written, missing=missing)
        return ApplyError(str(first), written=written, missing=missing)


def _result(change: Change) -> ApplyVerb:
    match change:
        case CreatedObject():
            return "created"
        case ConfiguredObject():
            return "configured"
        case UnchangedObject():
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
    what = join_names(moved) or "an object"
    return ConflictError(f"{what} was changed by others {_ATTEMPTS} times in a row")
