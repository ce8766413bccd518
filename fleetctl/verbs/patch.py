"""`fleetctl patch`: changes fields of objects with a merge patch or a JSON patch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import result_options
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import patches, targets, writer
from fleetctl.objects.patches import PatchError, apply_merge_patch
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter
from machinery.clock import SystemClock
from manifests import sources
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject
from manifests.trees import Tree
from manifests.yaml import nodes, parser
from schemas.meta import ApiObject
from store.port import Transport

_HELP = """Change fields of objects; all other fields stay the same.

\b
  fleetctl patch md qwen -p '{"spec": {"concurrency": 8}}'
  fleetctl patch md/qwen -p 'spec: {priority: null}'
  fleetctl patch np/studio --patch-file studio-patch.yaml
  fleetctl patch md/qwen --type=json -p '[{"op": "add", "path": "/spec/servedNames/-", "value": "fast"}]'

\b
--type merge (RFC 7386): the patch sets its fields; null removes a field; lists are replaced as a whole.
--type json (RFC 6902): a list of operations; if a "test" fails, nothing is changed.

A patch is JSON or YAML. With metadata.resourceVersion, it applies only to that version of the object.
"""


@click.command(help=_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option("-p", "--patch", "text", help="The patch, as JSON or YAML.")
@click.option("--patch-file", help="File with the patch; - for standard input.")
@click.option(
    "--type",
    "form",
    type=click.Choice(["merge", "json", "strategic"]),
    default="merge",
    show_default=True,
    help="Type of the patch. strategic, which Kubernetes has, is not supported.",
)
@arguments.selector_option
@arguments.all_option
@arguments.files_option
@arguments.recursive_option
@result_options
@store_options
def patch(words: tuple[str, ...], text: str | None, **options: Any) -> None:
    """Change fields of objects; all other fields stay the same."""
    if options["form"] == "strategic":
        raise click.UsageError(
            "--type=strategic is not supported. Use --type=merge, which replaces lists as a whole, or --type=json to "
            "change one item of a list"
        )
    if (text is None) == (options["patch_file"] is None):
        raise click.UsageError("give the patch with -p or --patch-file")
    chosen = targets.parse_selections(words, options, verb="patch", is_all=options["is_all"])
    source, wanted = _read(text, options["patch_file"])
    if options["form"] == "merge" and not isinstance(wanted, dict):
        hint = "; --type=json takes a list of operations" if isinstance(wanted, list) else ""
        raise FleetctlError(f"{source}: a merge patch is a mapping, such as spec: {{...}}{hint}")
    verb = PatchVerb(manager="fleetctl-patch", done="patched")
    run(patch_all(chosen, PatchRequest(wanted, options["form"]), options, verb))


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchVerb:
    """The names under which a verb patches."""

    manager: str
    """The field manager that owns the changed fields."""
    done: str
    """The end of its status line."""


class PatchRequest:
    """A patch that is applied to each object."""

    def __init__(self, wanted: Tree, form: str, how: str = "as patched") -> None:
        self._wanted = wanted
        self._form = form
        self._how = how

    def of(self, now: ApiObject) -> LoadedObject:
        """Return the patched object. Pure.

        Raises:
            FleetctlError: an operation cannot be applied, or the result is invalid.

        """
        label = targets.object_ref(now)
        before = writer.patchable_tree(now)
        try:
            after = (
                apply_merge_patch(before, self._wanted)
                if self._form == "merge"
                else patches.apply_json_patch(before, self._wanted)
            )
            return writer.load_patched(now, after, f"{label}, {self._how}")
        except PatchError as error:
            raise FleetctlError(f"{label}: {error}") from None
        except ManifestErrors as errors:
            raise FleetctlError(f"nothing was changed:\n{errors}") from None

    def edit(self, now: ApiObject) -> ApiObject | None:
        """Return the object to write; None if the patch changes nothing. Raises as `of`."""
        return writer.merge_onto(now, self.of(now).obj)


def _read(text: str | None, file: str | None) -> tuple[str, Tree]:
    """Return the name of the patch in errors, and the patch."""
    if file is not None:
        [(source, found)] = sources.read_all([file], recursive=False, stdin=sys.stdin.buffer)
        if isinstance(found, ManifestError):
            raise FleetctlError(str(found))
        text = found
    else:
        source = "--patch"
    parsed = parser.parse(text or "", source)
    if parsed.problems:
        raise FleetctlError(str(ManifestErrors(parsed.problems)))
    if len(parsed.documents) != 1:
        count = f"{len(parsed.documents)} documents" if parsed.documents else "no document"
        raise FleetctlError(f"{source}: holds {count}; give one document")
    return source, nodes.plain_value(parsed.documents[0])


async def patch_all(
    chosen: Sequence[Selection], patch: PatchRequest, options: dict[str, Any], verb: PatchVerb
) -> None:
    """Patch all of the objects, or none if one of them cannot be patched; print a line for each.

    Raises:
        FleetctlError: an operation cannot be applied, or a result is invalid.

    """
    clock, results = SystemClock(), ResultPrinter.of(options)
    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
        for obj in found:
            patch.edit(obj)  # check all before the first write
        if results.dry_run != "client":
            await _check(transport, [patch.of(obj) for obj in found])
        for obj in found:
            written = await writer.write_edit(
                transport, clock, obj, patch.edit, manager=verb.manager, is_dry=results.is_dry
            )
            results.print_object(
                written.obj, verb.done if written.is_changed else f"{verb.done} (no change)"
            )


async def _check(transport: Transport, loaded: Sequence[LoadedObject]) -> None:
    try:
        await writer.check_objects(transport, loaded)
    except ManifestErrors as errors:
        unplaced = ManifestErrors(writer.without_positions(errors.problems))
        raise FleetctlError(f"nothing was changed:\n{unplaced}") from None
