"""`fleetctl label` and `fleetctl annotate`: set and remove labels and annotations. Neither restarts anything."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import click

from fleetctl.fleets import api_keys
from fleetctl.objects import key_values, targets, writer
from fleetctl.objects.change import change_objects, change_options
from fleetctl.objects.key_values import MetadataField
from fleetctl.objects.selectors import selectable_labels
from insight.edits import ObjectEdit
from schemas.meta import ApiObject
from store.port import Transport

_LABEL_HELP = """Set and remove labels of objects. Nothing is restarted.

\b
  fleetctl label node mac-1 rack=7 site=berlin
  fleetctl label md/qwen np/studio team-
  fleetctl label nodes --all site=berlin --overwrite

A later apply keeps labels that the manifest does not mention.
"""
_ANNOTATE_HELP = """Set and remove annotations of objects: notes for people and tools. Nothing is restarted.

\b
  fleetctl annotate md qwen kubernetes.io/change-cause="longer context"
  fleetctl annotate md/qwen np/studio owner-
  fleetctl annotate nodes --all bought=2026 --overwrite

`fleetctl rollout history` shows kubernetes.io/change-cause with the next revision; the change after it removes it.
"""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and flags of both verbs."""
    for decorator in (
        change_options("KIND NAME... KEY=VALUE... KEY-..."),
        click.option("--overwrite", is_flag=True, help="Replace existing values."),
    ):
        command = decorator(command)
    return command


@click.command(help=_LABEL_HELP)
@_options
async def label(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Set and remove labels of objects. Nothing is restarted."""
    names = takewhile(lambda word: not key_values.is_key_value(word), words)
    if words and api_keys.parse_names(tuple(names)) is not None:
        raise click.UsageError("API keys have no labels; `fleetctl get apikeys` lists them")
    await _change_metadata(transport, "labels", words, options)


@click.command(help=_ANNOTATE_HELP, short_help="Set and remove annotations of objects.")
@_options
async def annotate(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Set and remove annotations of objects: notes for people and tools."""
    await _change_metadata(transport, "annotations", words, options)


async def _change_metadata(
    transport: Transport, field: MetadataField, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    verb = "label" if field == "labels" else "annotate"
    what = tuple(takewhile(lambda word: not key_values.is_key_value(word), words))
    if not what and not options["files"]:
        example = "node mac-1 rack=7" if verb == "label" else "md qwen owner=anna"
        raise click.UsageError(f"which objects? Give KIND NAME..., such as: {example}")
    change = key_values.parse(words[len(what) :], field)
    if not (change.put or change.removed):
        raise click.UsageError(key_values.usage(field))
    chosen = targets.parse_selections(what, options, verb=verb, is_all=options["is_all"])

    def edit(obj: ApiObject) -> ApiObject | None:
        changed = key_values.with_change(obj, change, field, overwrite=options["overwrite"])
        if changed is not None:
            writer.refuse_fleet_annotations(
                obj, obj.metadata.annotations, changed.metadata.annotations
            )
        return changed

    done = "labeled" if change.put else "unlabeled"
    object_edit = ObjectEdit(
        edit=edit,
        manager=f"fleetctl-{verb}",
        done=done if verb == "label" else "annotated",
        unchanged="not labeled" if verb == "label" else "not annotated",
    )

    async def edit_of(_: Transport, obj: ApiObject) -> ObjectEdit[ApiObject]:
        for key in change.removed:
            if key in key_values.values_of(obj, field):
                continue
            if field == "labels" and key in selectable_labels(obj):
                note = (
                    f"label {key!r} of {targets.object_ref(obj)} is reported by its agent and cannot be removed; "
                    "set a label with the same key to override it"
                )
            else:
                note = f"{field.removesuffix('s')} {key!r} not found on {targets.object_ref(obj)}"
            click.echo(note, err=True)
        return object_edit

    await change_objects(transport, chosen, edit_of, options)
