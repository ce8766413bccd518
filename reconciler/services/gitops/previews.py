"""Previews: what the newest commit of a source would change in the live objects. Writes nothing.

A preview is stored in the status of the source, so its size is limited.
"""

import asyncio
from typing import Literal

from machinery.clock import Clock
from machinery.gc_pause import pause_collection
from manifests import apply as manifests_apply
from manifests import diff
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject, read_objects
from manifests.plan import CreatedObject, change_text
from manifests.trees import key_of
from reconciler.services.gitops import applier, source_status
from reconciler.services.gitops.fetcher import FetchResult
from schemas.gitsource import GitSource, PreviewedChange, SourcePreview
from schemas.meta import ApiObject
from store.codec import UndecodableError
from store.port import Transport

# A quarter of what etcd takes in one request.
_TOTAL = 256 * 2**10
_MOST_CHANGES = 500
_DIFF = 8 * 2**10
_SHOWN = 5
_LONGEST = 2000


async def compute(
    transport: Transport, clock: Clock, source: GitSource, found: FetchResult, *, request: str
) -> SourcePreview:
    """Return the changes that applying a fetched commit would make.

    Raises:
        StoreError: the store did not answer.

    """
    answer = found.answer
    commit = answer.revision
    revision = source_status.revision_of(source.spec.reference, commit) if commit else ""
    empty = SourcePreview(request=request, revision=revision)
    if answer.failure is not None:
        return _refused(empty, answer.failure.message)
    try:
        # In threads: ten thousand objects take seconds, and the leader must renew its leases.
        loaded = await asyncio.to_thread(_loaded, found)
        options = applier.apply_options(source)
        prospect = await manifests_apply.preview(transport, loaded, clock, options)
        changes = await asyncio.to_thread(_changes, prospect)
    except (ManifestErrors, UndecodableError) as error:
        text = error.show(_SHOWN) if isinstance(error, ManifestErrors) else str(error)
        return _refused(empty, text)
    previewed_changes = _bounded(changes)
    return empty.model_copy(
        update={"changes": previewed_changes, "omitted": len(changes) - len(previewed_changes)}
    )


def _refused(preview: SourcePreview, problem: str) -> SourcePreview:
    return preview.model_copy(update={"problem": problem[:_LONGEST]})


def _loaded(found: FetchResult) -> list[LoadedObject]:
    with pause_collection():
        return read_objects(found.documents)


def _changes(prospect: manifests_apply.ApplyPreview) -> list[PreviewedChange]:
    changes = [
        _change(change.obj, "created" if isinstance(change, CreatedObject) else "configured", text)
        for change in prospect.changes
        if (text := change_text(change))
    ]
    pruned = [_change(obj, "pruned", diff.diff_text(obj, None)) for obj in prospect.surplus.doomed]
    return [*changes, *pruned]


def _change(
    obj: ApiObject, action: Literal["created", "configured", "pruned"], text: str
) -> PreviewedChange:
    cut = text if len(text) <= _DIFF else f"{text[:_DIFF].rpartition(chr(10))[0]}\n... cut\n"
    kind, name = key_of(obj)
    return PreviewedChange(kind=kind, name=name, action=action, diff=cut)


def _bounded(changes: list[PreviewedChange]) -> tuple[PreviewedChange, ...]:
    total = 0
    previewed_changes: list[PreviewedChange] = []
    for change in changes[:_MOST_CHANGES]:
        total += len(change.diff.encode())
        if total > _TOTAL:
            break
        previewed_changes.append(change)
    return tuple(previewed_changes)
