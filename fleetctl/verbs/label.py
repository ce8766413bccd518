"""`fleetctl label` and `fleetctl annotate`: set, remove and list labels and annotations. Neither restarts anything."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import result_options
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.fleets import api_keys
from fleetctl.objects import key_values, targets, writer
from fleetctl.objects.key_values import MetadataChange, MetadataField
from fleetctl.objects.selectors import selectable_labels
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter
from machinery.clock import SystemClock
from schemas.meta import ApiObject

_LABEL_HELP = """Set and remove labels of objects. Nothing is restarted.

\b
  fleetctl label node mac-1 rack=7 site=berlin
  fleetctl label md/qwen np/studio team-
  fleetctl label nodes --all site=berlin --overwrite
  fleetctl label node mac-1 --list

A later apply keeps labels that the manifest does not mention.
"""
_ANNOTATE_HELP = """Set and remove annotations of objects: notes for people and tools. Nothing is restarted.

\b
  fleetctl annotate md qwen kubernetes.io/change-cause="longer context"
  fleetctl annotate md/qwen np/studio owner-
  fleetctl annotate nodes --all bought=2026 --overwrite
  fleetctl annotate md qwen --list

`fleetctl rollout history` shows kubernetes.io/change-cause with the next revision; the change after it removes it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataVerb:
    """The differences between the two verbs."""

    name: str
    field: MetadataField
    example: str
    shown: Callable[[ApiObject], Mapping[str, str]]
    """The labels or annotations that --list prints."""
    change: Callable[[ApiObject, MetadataChange, bool], ApiObject | None]
    """Return the changed object, or None if nothing changes; the flag is --overwrite."""
    removal_notes: Callable[[ApiObject, MetadataChange], list[str]]

    def done(self, change: MetadataChange) -> str:
        if self.name == "annotate":
            return "annotated"
        return "labeled" if change.put else "unlabeled"


def _metadata_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and flags of both verbs."""
    decorators = (
        click.argument("words", nargs=-1, metavar="KIND NAME... KEY=VALUE... KEY-..."),
        click.option("--overwrite", is_flag=True, help="Replace existing values."),
        click.option("--list", "is_list", is_flag=True, help="List, and change nothing."),
        arguments.version_option,
        arguments.selector_option,
        arguments.all_option,
        arguments.files_option,
        arguments.recursive_option,
        result_options,
        store_options,
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command(help=_LABEL_HELP)
@_metadata_options
def label(words: tuple[str, ...], **options: Any) -> None:
    """Set and remove labels of objects. Nothing is restarted."""
    names = takewhile(lambda word: not key_values.is_key_value(word), words)
    if words and api_keys.parse_names(tuple(names)) is not None:
        raise click.UsageError("API keys have no labels; `fleetctl get apikeys` lists them")
    _run_verb(_LABEL, words, options)


@click.command(help=_ANNOTATE_HELP, short_help="Set and remove annotations of objects.")
@_metadata_options
def annotate(words: tuple[str, ...], **options: Any) -> None:
    """Set and remove annotations of objects: notes for people and tools."""
    _run_verb(_ANNOTATE, words, options)


def _run_verb(verb: MetadataVerb, words: tuple[str, ...], options: dict[str, Any]) -> None:
    is_list: bool = options["is_list"]
    what = tuple(takewhile(lambda word: not key_values.is_key_value(word), words))
    if not what and not options["files"]:
        raise click.UsageError(f"which objects? Give KIND NAME..., such as: {verb.example}")
    change = key_values.parse(words[len(what) :], verb.field)
    if is_list == bool(change.put or change.removed):
        raise click.UsageError(f"{key_values.usage(verb.field)}, or use --list")
    key_values.refuse_writing_flags(options, is_list=is_list)
    chosen = targets.parse_selections(
        what, options, verb=verb.name, is_all=options["is_all"], is_read=is_list
    )
    run(_list(verb, chosen, options) if is_list else _write(verb, chosen, change, options))


async def _write(
    verb: MetadataVerb, chosen: Sequence[Selection], change: MetadataChange, options: dict[str, Any]
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        return verb.change(obj, change, bool(options["overwrite"]))

    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # check all before the first write
        for obj in found:
            for note in verb.removal_notes(obj, change):
                click.echo(note, err=True)
            written = await writer.write_edit(
                transport, clock, obj, edit, manager=f"fleetctl-{verb.name}", is_dry=results.is_dry
            )
            unchanged = "not annotated" if verb.name == "annotate" else "not labeled"
            results.print_object(
                written.obj, verb.done(change) if written.is_changed else unchanged
            )


async def _list(verb: MetadataVerb, chosen: Sequence[Selection], options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
    for obj in found:
        indent = ""
        if len(found) > 1:
            click.echo(f"{targets.object_ref(obj)}:")
            indent = "  "
        for key, value in sorted(verb.shown(obj).items()):
            click.echo(f"{indent}{key}={value}")


def with_labels(obj: ApiObject, change: MetadataChange, overwrite: bool) -> ApiObject | None:
    """Return the object with the labels changed; None if nothing changes. Pure.

    Raises:
        FleetctlError: a label has another value, and `overwrite` is false.

    """
    return key_values.with_change(obj, change, "labels", overwrite=overwrite)


def label_removal_notes(obj: ApiObject, change: MetadataChange) -> list[str]:
    """Return notes about labels that cannot be removed: they do not exist, or are derived. Pure."""
    found = []
    for key in change.removed:
        if key in obj.metadata.labels:
            continue
        if key in selectable_labels(obj):
            found.append(
                f"label {key!r} of {targets.object_ref(obj)} is reported by its agent and cannot be removed; "
                "set a label with the same key to override it"
            )
        else:
            found.append(f"label {key!r} not found on {targets.object_ref(obj)}")
    return found


def with_annotations(obj: ApiObject, change: MetadataChange, overwrite: bool) -> ApiObject | None:
    """Return the object with the annotations changed; None if nothing changes. Pure.

    Raises:
        FleetctlError: an annotation is the fleet's, or has another value and `overwrite` is false.

    """
    after = key_values.with_change(obj, change, "annotations", overwrite=overwrite)
    if after is not None:
        before = obj.metadata.annotations
        writer.refuse_fleet_annotations(obj, before, after.metadata.annotations)
    return after


def annotation_removal_notes(obj: ApiObject, change: MetadataChange) -> list[str]:
    """Return notes about annotations that cannot be removed because they do not exist. Pure."""
    return [
        f"annotation {key!r} not found on {targets.object_ref(obj)}"
        for key in change.removed
        if key not in obj.metadata.annotations
    ]


_LABEL = MetadataVerb(
    name="label",
    field="labels",
    example="node mac-1 rack=7",
    shown=selectable_labels,
    change=with_labels,
    removal_notes=label_removal_notes,
)
_ANNOTATE = MetadataVerb(
    name="annotate",
    field="annotations",
    example="md qwen owner=anna",
    shown=lambda obj: obj.metadata.annotations,
    change=with_annotations,
    removal_notes=annotation_removal_notes,
)
