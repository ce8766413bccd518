"""`fleetctl patch`: changes some fields of objects; everything else stays as it is."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from fleetctl import rewriting, targets
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.patch import jsonpatch
from fleetctl.patch.jsonpatch import PatchError
from fleetctl.patch.merge import merged
from fleetctl.results import Results, result_options
from fleetctl.targets import Choice
from machinery.clock import SystemClock
from manifests import nodes, sources, yamlio
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Loaded
from manifests.tree import Tree
from schemas.meta import ApiObject
from store.port import Transport

_HELP = """Change some fields of objects; everything else stays as it is.

\b
  fleetctl patch md qwen -p '{"spec": {"concurrency": 8}}'
  fleetctl patch md/qwen -p 'spec: {priority: null}'
  fleetctl patch np/studio --patch-file studio-patch.yaml
  fleetctl patch md/qwen --type=json -p '[{"op": "add", "path": "/spec/servedNames/-", "value": "fast"}]'

\b
--type merge (RFC 7386): fields that are named change, null takes one away, lists are replaced whole.
--type json (RFC 6902): operations one after the other; "test" refuses all of them if it does not hold.

A patch is JSON or YAML. One that names metadata.resourceVersion holds for that version alone.
"""


@click.command(help=_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option("-p", "--patch", "text", help="The patch, as JSON or YAML.")
@click.option("--patch-file", help="A file that holds the patch; - for standard input.")
@click.option(
    "--type",
    "form",
    type=click.Choice(["merge", "json", "strategic"]),
    default="merge",
    show_default=True,
    help="How the patch is written; strategic is Kubernetes' own, and refused.",
)
@targets.files_option
@targets.recursive_option
@result_options
@store_options
def patch(words: tuple[str, ...], text: str | None, **options: Any) -> None:
    """Change some fields of objects; everything else stays as it is."""
    if options["form"] == "strategic":
        raise click.UsageError(
            "--type=strategic: there is none here, for lists are replaced whole. Use --type=merge, or --type=json "
            "for one item of a list"
        )
    if (text is None) == (options["patch_file"] is None):
        raise click.UsageError("give the patch with -p or --patch-file")
    chosen = targets.choices(words, {**options, "selector": ""}, verb="patch", is_all=None)
    source, wanted = _read(text, options["patch_file"])
    if options["form"] == "merge" and not isinstance(wanted, dict):
        hint = "; --type=json takes a list of operations" if isinstance(wanted, list) else ""
        raise FleetctlError(f"{source}: a merge patch is a mapping, such as spec: {{...}}{hint}")
    run(_patch(chosen, Patch(wanted, options["form"]), options))


class Patch:
    """What is asked for, of each object."""

    def __init__(self, wanted: Tree, form: str) -> None:
        self._wanted = wanted
        self._form = form

    def of(self, now: ApiObject) -> Loaded:
        """Return the object as the patch has it. Pure.

        Raises:
            FleetctlError: an operation cannot be done, or what it says is not valid.

        """
        label = targets.label_of(now)
        before = rewriting.shown(now)
        try:
            after = (
                merged(before, self._wanted)
                if self._form == "merge"
                else jsonpatch.patched(before, self._wanted)
            )
            return rewriting.read(now, after, f"{label}, as patched")
        except PatchError as error:
            raise FleetctlError(f"{label}: {error}") from None
        except ManifestErrors as errors:
            raise FleetctlError(f"nothing was changed:\n{errors}") from None

    def edit(self, now: ApiObject) -> ApiObject | None:
        """Return the object to write; None if the patch changes nothing. `of` has the errors."""
        return rewriting.onto(now, self.of(now).obj)


def _read(text: str | None, file: str | None) -> tuple[str, Tree]:
    """Return the patch, and what errors call it."""
    if file is not None:
        [(source, found)] = sources.read_all([file], recursive=False, stdin=sys.stdin.buffer)
        if isinstance(found, ManifestError):
            raise FleetctlError(str(found))
        text = found
    else:
        source = "--patch"
    parsed = yamlio.parse(text or "", source)
    if parsed.problems:
        raise FleetctlError(str(ManifestErrors(parsed.problems)))
    if len(parsed.documents) != 1:
        count = f"{len(parsed.documents)} documents" if parsed.documents else "no document"
        raise FleetctlError(f"{source}: holds {count}; a patch is one")
    return source, nodes.plain(parsed.documents[0])


async def _patch(chosen: Sequence[Choice], patch: Patch, options: dict[str, Any]) -> None:
    clock, results = SystemClock(), Results.of(options)
    async with opened(options) as transport:
        found = await targets.all_chosen(transport, chosen)
        for obj in found:
            patch.edit(obj)  # all are asked before one is written
        if results.dry_run != "client":
            await _check(transport, [patch.of(obj) for obj in found])
        for obj in found:
            written = await targets.write(
                transport, clock, obj, patch.edit, manager="fleetctl-patch", is_dry=results.is_dry
            )
            results.say(written.obj, "patched" if written.is_news else "patched (no change)")


async def _check(transport: Transport, loaded: Sequence[Loaded]) -> None:
    try:
        await rewriting.check(transport, loaded)
    except ManifestErrors as errors:
        unplaced = ManifestErrors(rewriting.unplaced(errors.problems))
        raise FleetctlError(f"nothing was changed:\n{unplaced}") from None
