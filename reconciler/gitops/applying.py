"""Has a commit applied as `fleetctl apply` would, and says what others had changed. Decides nothing about when."""

from collections.abc import Sequence
from dataclasses import dataclass

from machinery.clock import Clock
from manifests import apply as manifests_apply
from manifests.apply import Applied, ApplyOptions
from manifests.errors import ApplyError, ManifestErrors
from manifests.ownership import Clash
from manifests.plan import Change, Created
from manifests.tree import key_of
from reconciler.gitops.due import Held, manager_of, set_name
from reconciler.gitops.verdict import Problem
from schemas.gitsource import Drift, GitSource
from schemas.meta import ApiObject, ObjectKey
from store.codec import UndecodableError
from store.port import Transport

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a commit."""

    objects: tuple[ApiObject, ...] = ()
    """What it says, as it is in the store."""
    created: tuple[ObjectKey, ...] = ()
    configured: tuple[ObjectKey, ...] = ()
    pruned: tuple[ObjectKey, ...] = ()
    drift: tuple[Drift, ...] = ()
    """What others had changed: put back by now, or as it is, as driftPolicy says."""
    problem: Problem | None = None


async def carry_out(
    transport: Transport, clock: Clock, source: GitSource, held: Held, *, is_new: bool
) -> Result:
    """Apply a commit; of one that was applied before, only what others changed since.

    Raises:
        StoreError: the store did not answer; FencedError: somebody else leads.

    """
    try:
        drift: tuple[Drift, ...] = ()
        if not is_new:
            seen = await _drifted(transport, clock, source, held)
            if source.spec.drift_policy == "Warn" or seen is None:
                return seen or Result()
            drift = seen.drift
        done = await manifests_apply.apply(transport, held.loaded, clock, _options(source))
    except ManifestErrors as errors:
        return Result(problem=Problem(reason="Refused", message=errors.show(_SHOWN), stalls=True))
    except (ApplyError, UndecodableError) as error:
        return Result(problem=Problem(reason="ApplyFailed", message=str(error), stalls=False))
    kept = _of_clashes(done.kept) if source.spec.drift_policy == "Warn" else ()
    return _result(done, drift or kept)


async def _drifted(
    transport: Transport, clock: Clock, source: GitSource, held: Held
) -> Result | None:
    """Return what others changed, with the objects as they are; None if others' manifests stand against it."""
    options = _options(source, force=False)
    prospect = await manifests_apply.look(transport, held.loaded, clock, options)
    drift = _drift_of(prospect.changes)
    return Result(objects=tuple(change.obj for change in prospect.changes), drift=drift)


def _options(source: GitSource, *, force: bool | None = None) -> ApplyOptions:
    spec = source.spec
    puts_back = spec.drift_policy == "Correct"
    return ApplyOptions(
        manager=manager_of(source.name),
        force=force if force is not None else spec.force or ("drift" if puts_back else False),
        apply_set=set_name(source.name),
        prune=spec.prune,
    )


def _result(done: Applied, drift: tuple[Drift, ...]) -> Result:
    def those(result: str) -> tuple[ObjectKey, ...]:
        return tuple(key_of(one.obj) for one in done.outcomes if one.result == result)

    return Result(
        objects=tuple(one.obj for one in done.outcomes),
        created=those("created"),
        configured=those("configured"),
        pruned=done.pruned,
        drift=drift,
    )


def _drift_of(changes: Sequence[Change]) -> tuple[Drift, ...]:
    gone = [
        Drift(kind=change.obj.kind, name=change.obj.name, fields=())
        for change in changes
        if isinstance(change, Created)
    ]
    clashes = [clash for change in changes for clash in change.kept]
    return (*_of_clashes(clashes), *gone)


def _of_clashes(clashes: Sequence[Clash]) -> tuple[Drift, ...]:
    """Return the fields by their objects, in the order of the manifests."""
    by_key: dict[ObjectKey, list[Clash]] = {}
    for clash in clashes:
        by_key.setdefault(clash.key, []).append(clash)
    return tuple(
        Drift(
            kind=key.kind,
            name=key.name,
            fields=tuple(one.path for one in found),
            managers=tuple(dict.fromkeys(one.owner for one in found if one.owner)),
        )
        for key, found in by_key.items()
    )
