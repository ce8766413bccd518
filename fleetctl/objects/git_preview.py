"""Previews of GitSources: asks the leading reconciler what the newest commit of a source would change, and waits."""

import secrets
from dataclasses import dataclass

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.objects import targets
from fleetctl.objects.targets import Selection
from fleetctl.objects.waits import poll
from machinery.clock import Clock, SystemClock
from manifests.trees import Tree
from schemas.gitsource import DIFF_REQUESTED, GitSource, SourcePreview
from store import objects
from store.errors import NotFoundError, UnavailableError
from store.mutate import mutate
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPreview:
    """The preview of one source."""

    source: str
    preview: SourcePreview


async def request_all(
    transport: Transport, chosen: Selection, limit_s: float
) -> list[NamedPreview]:
    """Return the previews of the chosen GitSources.

    Raises:
        click.UsageError: the selection is of another kind.
        FleetctlError: no reconciler answers in time, or a source is gone.

    """
    if chosen.kind.name != "GitSource":
        raise click.UsageError(
            f"{chosen.kind.plural} have no repository; write gs/NAME, or give manifests with -f"
        )
    clock = SystemClock()
    deadline = clock.monotonic() + limit_s
    names = [obj.name for obj in await targets.read_selected(transport, chosen)]
    with ProgressLine() as progress:
        named_previews = []
        for name in names:
            progress.show(f"gitsource/{name}: waiting for the reconciler to fetch")
            preview = await _request(transport, clock, name, deadline)
            named_previews.append(NamedPreview(source=name, preview=preview))
    return named_previews


def preview_tree(found: NamedPreview) -> dict[str, Tree]:
    """Return the preview of a source as a tree; the reconciler reports differences as text, not by field."""
    preview = found.preview
    return {
        "source": found.source,
        "revision": preview.revision,
        "problem": preview.problem,
        "omitted": preview.omitted,
        "changes": [
            {"kind": change.kind, "name": change.name, "change": change.action, "diff": change.diff}
            for change in preview.changes
        ],
    }


async def _request(transport: Transport, clock: Clock, name: str, deadline: float) -> SourcePreview:
    """Request a preview and return it; the request is removed afterwards, and the reconciler removes the preview."""
    request = secrets.token_hex(4)

    async def look() -> SourcePreview | None:
        source = await objects.get(transport, GitSource, name)
        if source is None:
            raise FleetctlError(f"gitsource/{name} is gone: it was deleted meanwhile")
        preview = source.status.preview if source.status is not None else None
        return preview if preview is not None and preview.request == request else None

    await mutate(transport, clock, GitSource, name, lambda now: _with_request(now, request))
    try:
        preview = await poll(look, clock, deadline - clock.monotonic())
    finally:
        await _withdraw(transport, clock, name, request)
    if preview is None:
        raise FleetctlError(
            f"gitsource/{name} was not compared in time: check that a reconciler runs, for example with "
            "`fleetctl doctor`"
        )
    return preview


async def _withdraw(transport: Transport, clock: Clock, name: str, request: str) -> None:
    def without(now: GitSource) -> GitSource | None:
        is_ours = now.metadata.annotations.get(DIFF_REQUESTED) == request
        return _with_request(now, "") if is_ours else None

    try:
        await mutate(transport, clock, GitSource, name, without)
    except (NotFoundError, UnavailableError):
        return  # the next request replaces it


def _with_request(source: GitSource, request: str) -> GitSource:
    notes = {k: v for k, v in source.metadata.annotations.items() if k != DIFF_REQUESTED}
    if request:
        notes[DIFF_REQUESTED] = request
    metadata = source.metadata.model_copy(update={"annotations": notes})
    return source.model_copy(update={"metadata": metadata})
