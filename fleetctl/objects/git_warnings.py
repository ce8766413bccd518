"""Warnings about objects that a GitSource keeps: a change by hand lasts only until the source restores its manifests."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import click

from manifests import ownership
from manifests.errors import join_names
from manifests.trees import key_of
from schemas.gitsource import GitSource, source_of_manager
from schemas.meta import ApiObject, ObjectKey
from store import objects
from store.port import Transport

_SHOWN = 3


async def warn_of_fields(
    transport: Transport, obj: ApiObject, fields: Mapping[str, Sequence[str]]
) -> None:
    """Print a warning for each GitSource whose fields a command changed; `fields` are by the source's name."""
    for name, paths in fields.items():
        source = await objects.get(transport, GitSource, name)
        if source is None:
            continue
        rest = len(paths) - _SHOWN
        shown = ", ".join(paths[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        what = f"{shown} of {obj.kind.lower()}/{obj.name}"
        click.echo(f"warning: {what} is kept by gitsource/{name}{_effect(source)}", err=True)


async def warn_of_objects(transport: Transport, applied: Iterable[ApiObject]) -> None:
    """Print a warning for each GitSource that keeps some of the objects that were applied by hand."""
    for source, keys in await _keepers(transport, applied):
        name, what = source.name, _kept_names(keys)
        click.echo(f"warning: {what} kept by gitsource/{name}{_effect(source)}", err=True)


async def warn_of_deletions(
    transport: Transport, deleted: Iterable[ApiObject], *, going: Collection[ObjectKey]
) -> None:
    """Print a warning for each GitSource that creates some of the deleted objects again.

    A source that is itself among `going`, the objects that the command deletes, creates nothing.
    """
    for source, keys in await _keepers(transport, deleted):
        if key_of(source) not in going:
            head = f"warning: {_kept_names(keys)} kept by gitsource/{source.name}"
            click.echo(f"{head}{_effect_of_deletion(source, len(keys))}", err=True)


async def _keepers(
    transport: Transport, found: Iterable[ApiObject]
) -> list[tuple[GitSource, list[ObjectKey]]]:
    """Return the GitSources that exist and keep some of the objects, with the keys of those objects."""
    kept: dict[str, list[ObjectKey]] = {}
    for obj in found:
        for entry in ownership.git_entries(obj.metadata.managed_fields):
            kept.setdefault(source_of_manager(entry.manager) or "", []).append(key_of(obj))
    sources = [await objects.get(transport, GitSource, name) for name in kept]
    return [(source, kept[source.name]) for source in sources if source is not None]


def _kept_names(keys: Sequence[ObjectKey]) -> str:
    one = f"{keys[0].kind.lower()}/{keys[0].name} is"
    return one if len(keys) == 1 else f"{join_names(keys)} are"


def _effect(source: GitSource) -> str:
    """Return what the source does about a change by hand, and what to do instead."""
    instead = f"commit the change to {source.spec.repository} instead"
    if source.spec.suspend:
        return f", which is suspended: `fleetctl resume gs/{source.name}` restores its manifest"
    if source.spec.drift_policy == "Warn":
        return f", which reports the change as drift; {instead}"
    return (
        f", which restores its manifest; {instead}, or first run: fleetctl suspend gs/{source.name}"
    )


def _effect_of_deletion(source: GitSource, count: int) -> str:
    """Return what the source does about deleted objects, and what to do instead."""
    it, its_manifest = ("it", "its manifest") if count == 1 else ("them", "their manifests")
    resume = f"fleetctl resume gs/{source.name}"
    if source.spec.suspend:
        return f", which is suspended: `{resume}` creates {it} again"
    instead = f"remove {its_manifest} from {source.spec.repository} first"
    if source.spec.drift_policy == "Warn":
        return f", which reports the deletion as drift until a new commit creates {it} again; {instead}"
    return f", which creates {it} again; {instead}, or run: fleetctl suspend gs/{source.name}"
