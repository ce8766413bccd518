"""`fleetctl patch`: changes fields of objects with a merge patch or a JSON patch."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import patches, targets, writer
from fleetctl.objects.change import change_objects, change_options
from fleetctl.objects.patches import PatchError
from insight.edits import ObjectEdit
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
@change_options("[KIND NAME... | KIND/NAME...]")
async def patch(
    transport: Transport, words: tuple[str, ...], text: str | None, **options: Any
) -> None:
    """Change fields of objects; all other fields stay the same."""
    form = options["form"]
    if form == "strategic":
        raise click.UsageError(
            "--type=strategic is not supported. Use --type=merge, which replaces lists as a whole, or --type=json to "
            "change one item of a list"
        )
    if (text is None) == (options["patch_file"] is None):
        raise click.UsageError("give the patch with -p or --patch-file")
    chosen = targets.parse_selections(words, options, verb="patch", is_all=options["is_all"])
    source, wanted = _read(text, options["patch_file"])
    if form == "merge" and not isinstance(wanted, dict):
        hint = "; --type=json takes a list of operations" if isinstance(wanted, list) else ""
        raise FleetctlError(f"{source}: a merge patch is a mapping, such as spec: {{...}}{hint}")

    change: ObjectEdit[ApiObject] = ObjectEdit(
        edit=lambda now: writer.merge_onto(now, patched(now, wanted, form).obj),
        manager="fleetctl-patch",
        done="patched",
        unchanged="patched (no change)",
    )

    async def check(objects: Sequence[ApiObject]) -> None:
        try:
            await writer.check_objects(transport, [patched(obj, wanted, form) for obj in objects])
        except ManifestErrors as errors:
            unplaced = ManifestErrors(writer.without_positions(errors.problems))
            raise FleetctlError(f"nothing was changed:\n{unplaced}") from None

    await change_objects(transport, chosen, change, options, check=check)


def patched(now: ApiObject, patch_: Tree, form: str) -> LoadedObject:
    """Return the object after a patch of the form `merge` or `json`. Pure.

    Raises:
        FleetctlError: an operation cannot be applied, or the result is invalid.

    """
    label = targets.object_ref(now)
    before = writer.patchable_tree(now)
    try:
        if form == "merge":
            after = patches.apply_merge_patch(before, patch_)
        else:
            after = patches.apply_json_patch(before, patch_)
        return writer.load_patched(now, after, f"{label}, as patched")
    except PatchError as error:
        raise FleetctlError(f"{label}: {error}") from None
    except ManifestErrors as errors:
        raise FleetctlError(f"nothing was changed:\n{errors}") from None


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
