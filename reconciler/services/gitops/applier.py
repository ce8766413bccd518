"""Applies a commit as `fleetctl apply` does and reports drift; releases the objects of a removed source."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from machinery.clock import Clock
from manifests import apply as manifests_apply
from manifests import apply_sets
from manifests.apply import ApplyOptions, ApplyResult
from manifests.change_log import AuditedTransport, ChangeAuthor
from manifests.errors import ApplyError, ManifestErrors
from manifests.ownership import FieldConflict, show_value
from manifests.plan import Change, CreatedObject
from manifests.trees import key_of
from reconciler.services.gitops.source_status import (
    LoadedCommit,
    SourceProblem,
    apply_set_name,
)
from schemas import kinds
from schemas.gitsource import Drift, DriftedField, GitSource, manager_of, source_of_manager
from schemas.meta import ApiObject, ObjectKey
from schemas.records import ApplySet
from store import codec, keys
from store.codec import UndecodableError
from store.errors import NotFoundError
from store.mutate import mutate
from store.port import Transport

# Of one object in a status; the fields that differ are all named.
_MOST_VALUES: Final = 20


async def orphans(transport: Transport) -> list[str]:
    """Return the sources that have an apply set."""
    items = (await transport.list(keys.APPLY_SET_PREFIX)).items
    found = (source_of_manager(codec.decode(ApplySet, item).manager) for item in items)
    return sorted({name for name in found if name is not None})


async def release(transport: Transport, clock: Clock, source: str) -> int:
    """Release the objects of a source without deleting them; return their number.

    Raises:
        StoreError: the store did not answer; call it again to continue.

    """
    apply_set = await apply_sets.read_set(transport, apply_set_name(source))
    if apply_set.manager != manager_of(source):
        return 0
    return await _pass_on(transport, clock, source, apply_set.members, "")


async def hand_over(
    transport: Transport, clock: Clock, source: str, claims: Mapping[ObjectKey, str]
) -> None:
    """Hand objects of a source over to other sources as they are; `claims` has the new source of each.

    Raises:
        StoreError: the store did not answer; call it again to continue.

    """
    for claimant in sorted(set(claims.values())):
        moved = [key for key, name in claims.items() if name == claimant]
        add = partial(apply_sets.add_members, objects=moved)
        await apply_sets.change_set(
            transport, clock, apply_set_name(claimant), manager_of(claimant), add
        )
        await _pass_on(transport, clock, source, moved, claimant)


async def _pass_on(
    transport: Transport, clock: Clock, source: str, moved: Collection[ObjectKey], claimant: str
) -> int:
    """Make objects of a source those of another one, or of none if `claimant` is empty; return their number."""
    name, manager = apply_set_name(source), manager_of(source)

    def passed_on(obj: ApiObject) -> ApiObject | None:
        if apply_sets.apply_set_of(obj) != name:
            return None
        heir = manager_of(claimant)
        entries = tuple(
            e.model_copy(update={"manager": heir}) if e.manager == manager else e
            for e in obj.metadata.managed_fields
            if e.manager != (heir if claimant else manager)
        )
        metadata = obj.metadata.model_copy(update={"managed_fields": entries})
        owned = obj.model_copy(update={"metadata": metadata})
        return apply_sets.assign_to_set(owned, apply_set_name(claimant) if claimant else "")

    count = 0
    for key in moved:
        kind = kinds.by_name(key.kind)
        if kind is None:
            continue
        try:
            await mutate(transport, clock, kind.type, key.name, passed_on)
        except NotFoundError:
            continue
        count += 1

    def without_moved(old: apply_sets.Members) -> apply_sets.Members:
        return {key: uid for key, uid in old.items() if key not in moved}

    await apply_sets.change_set(transport, clock, name, manager, without_moved)
    return count


_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """The result of applying a commit."""

    objects: tuple[ApiObject, ...] = ()
    """The objects of the commit as they are in the store."""
    created: tuple[ObjectKey, ...] = ()
    configured: tuple[ObjectKey, ...] = ()
    pruned: tuple[ObjectKey, ...] = ()
    drift: tuple[Drift, ...] = ()
    """Changes by other managers: corrected or only reported, by spec.driftPolicy."""
    problem: SourceProblem | None = None


async def apply_commit(
    transport: Transport,
    clock: Clock,
    source: GitSource,
    loaded_commit: LoadedCommit,
    *,
    is_new: bool,
    prune: bool,
) -> CommitResult:
    """Apply a commit; for a commit that is applied already, correct or report drift.

    Raises:
        StoreError: the store did not answer; FencedError: another process leads.

    """
    try:
        drift: tuple[Drift, ...] = ()
        if not is_new:
            result = await _drifted(transport, clock, source, loaded_commit)
            if source.spec.drift_policy == "Warn":
                return result
            drift = result.drift
        author = ChangeAuthor(
            user=manager_of(source.name),
            manager="reconciler",
            reason=f"commit {loaded_commit.revision}",
        )
        done = await manifests_apply.apply(
            AuditedTransport(transport, clock, author),
            loaded_commit.loaded,
            clock,
            replace(apply_options(source), prune=prune),
        )
    except ManifestErrors as errors:
        return CommitResult(
            problem=SourceProblem(reason="Refused", message=errors.show(_SHOWN), stalls=True)
        )
    except (ApplyError, UndecodableError) as error:
        return CommitResult(
            problem=SourceProblem(reason="ApplyFailed", message=str(error), stalls=False)
        )
    drifts = _of_clashes(done.kept_by_others) if source.spec.drift_policy == "Warn" else ()
    return _result(done, drift or drifts)


async def _drifted(
    transport: Transport, clock: Clock, source: GitSource, loaded_commit: LoadedCommit
) -> CommitResult:
    """Return the objects as they are, and the changes of other managers."""
    options = apply_options(source, force=False)
    prospect = await manifests_apply.preview(transport, loaded_commit.loaded, clock, options)
    drift = _drift_of(prospect.changes)
    return CommitResult(objects=tuple(change.obj for change in prospect.changes), drift=drift)


def apply_options(source: GitSource, *, force: bool | None = None) -> ApplyOptions:
    """Return the options with which a source applies its commits."""
    spec = source.spec
    corrects_drift = spec.drift_policy == "Correct"
    return ApplyOptions(
        manager=manager_of(source.name),
        force=force if force is not None else spec.force or ("drift" if corrects_drift else False),
        apply_set=apply_set_name(source.name),
        prune=spec.prune,
    )


def _result(done: ApplyResult, drift: tuple[Drift, ...]) -> CommitResult:
    def keys_with(result: str) -> tuple[ObjectKey, ...]:
        return tuple(key_of(outcome.obj) for outcome in done.outcomes if outcome.result == result)

    return CommitResult(
        objects=tuple(outcome.obj for outcome in done.outcomes),
        created=keys_with("created"),
        configured=keys_with("configured"),
        pruned=done.pruned,
        drift=drift,
    )


def _drift_of(changes: Sequence[Change]) -> tuple[Drift, ...]:
    gone = [
        Drift(kind=change.obj.kind, name=change.obj.name, fields=())
        for change in changes
        if isinstance(change, CreatedObject)
    ]
    clashes = [clash for change in changes for clash in change.kept_by_others]
    return (*_of_clashes(clashes), *gone)


def _of_clashes(clashes: Sequence[FieldConflict]) -> tuple[Drift, ...]:
    """Group clashing fields by object, in the order of the manifests."""
    by_key: dict[ObjectKey, list[FieldConflict]] = {}
    for clash in clashes:
        by_key.setdefault(clash.key, []).append(clash)
    return tuple(
        Drift(
            kind=key.kind,
            name=key.name,
            fields=tuple(conflict.path for conflict in found),
            managers=tuple(dict.fromkeys(conflict.owner for conflict in found if conflict.owner)),
            values=tuple(_field_of(conflict) for conflict in found[:_MOST_VALUES]),
        )
        for key, found in by_key.items()
    )


def _field_of(clash: FieldConflict) -> DriftedField:
    wanted, actual = show_value(clash.ours), show_value(clash.theirs)
    return DriftedField(path=clash.path, wanted=wanted, actual=actual)
