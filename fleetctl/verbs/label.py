"""`fleetctl label`: labels of objects, by which selectors find them. Restarts nothing.

`fleetctl annotate`: notes on objects, for people and tools. Nothing selects on them, nothing restarts.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.fleets import api_keys
from fleetctl.objects import key_values, targets, writer
from fleetctl.objects.key_values import MetadataChange
from fleetctl.objects.selectors import selectable_labels as effective
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter, result_options
from machinery.clock import SystemClock
from schemas.meta import ApiObject

_LABEL_HELP = """Set and remove labels of objects. Nothing is restarted by it.

\b
  fleetctl label node mac-1 rack=7 site=berlin
  fleetctl label md/qwen np/studio team-
  fleetctl label nodes --all site=berlin --overwrite
  fleetctl label node mac-1 --list

A label that a manifest does not speak of is left alone when the manifest is applied.
"""


@click.command(help=_LABEL_HELP)
@click.argument("words", nargs=-1, metavar="KIND NAME... KEY=VALUE... KEY-...")
@click.option("--overwrite", is_flag=True, help="Replace the value of a label that is there.")
@click.option("--list", "is_list", is_flag=True, help="Show the labels, and change none.")
@targets.version_option
@targets.selector_option
@targets.all_option
@targets.files_option
@targets.recursive_option
@result_options
@store_options
def label(words: tuple[str, ...], is_list: bool, **options: Any) -> None:
    """Set and remove labels of objects. Nothing is restarted by it."""
    what = tuple(takewhile(lambda word: not key_values.is_key_value(word), words))
    if not what and not options["files"]:
        raise click.UsageError("say which objects: KIND NAME..., such as: node mac-1 rack=7")
    if what and api_keys.parse_names(what) is not None:
        raise click.UsageError(
            "API keys carry no labels; `fleetctl get apikeys` lists them by name"
        )
    wish = key_values.parse(words[len(what) :], "labels")
    if is_list == bool(wish.put or wish.removed):
        raise click.UsageError(f"{key_values.usage('labels')}, or ask for --list")
    key_values.refuse_writing_flags(options, is_list=is_list)
    chosen = targets.parse_selections(
        what, options, verb="label", is_all=options["is_all"], is_read=is_list
    )
    run(_list_labels(chosen, options) if is_list else _label(chosen, wish, options))


def removal_warnings(obj: ApiObject, wish: MetadataChange) -> list[str]:
    """Return what cannot be taken away, because it is not there or not ours. Pure."""
    found = []
    for key in wish.removed:
        if key in obj.metadata.labels:
            continue
        if key in effective(obj):
            found.append(
                f"label {key!r} of {targets.object_ref(obj)} comes from its agent and stays; "
                "a label of its own would hide it"
            )
        else:
            found.append(f"label {key!r} not found on {targets.object_ref(obj)}")
    return found


async def _label(
    chosen: Sequence[Selection], wish: MetadataChange, options: dict[str, Any]
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        return key_values.with_change(obj, wish, "labels", overwrite=bool(options["overwrite"]))

    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # all are asked before one is written
        for obj in found:
            for complaint in removal_warnings(obj, wish):
                click.echo(complaint, err=True)
            done = "labeled" if wish.put else "unlabeled"
            written = await targets.write_edit(
                transport, clock, obj, edit, manager="fleetctl-label", is_dry=results.is_dry
            )
            results.say(written.obj, done if written.is_news else "not labeled")


async def _list_labels(chosen: Sequence[Selection], options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
    for obj in found:
        pad = ""
        if len(found) > 1:
            click.echo(f"{targets.object_ref(obj)}:")
            pad = "  "
        for key, value in sorted(effective(obj).items()):
            click.echo(f"{pad}{key}={value}")


_ANNOTATE_HELP = """Set and remove annotations of objects: notes for people and tools. Nothing is restarted by it.

\b
  fleetctl annotate md qwen kubernetes.io/change-cause="longer context"
  fleetctl annotate md/qwen np/studio owner-
  fleetctl annotate nodes --all bought=2026 --overwrite
  fleetctl annotate md qwen --list

`fleetctl rollout history` shows kubernetes.io/change-cause with the revision that follows it.
"""


@click.command(help=_ANNOTATE_HELP)
@click.argument("words", nargs=-1, metavar="KIND NAME... KEY=VALUE... KEY-...")
@click.option("--overwrite", is_flag=True, help="Replace the value of an annotation that is there.")
@click.option("--list", "is_list", is_flag=True, help="Show the annotations, and change none.")
@targets.version_option
@targets.selector_option
@targets.all_option
@targets.files_option
@targets.recursive_option
@result_options
@store_options
def annotate(words: tuple[str, ...], is_list: bool, **options: Any) -> None:
    """Set and remove annotations of objects: notes for people and tools."""
    what = tuple(takewhile(lambda word: not key_values.is_key_value(word), words))
    if not what and not options["files"]:
        raise click.UsageError("say which objects: KIND NAME..., such as: md qwen owner=anna")
    wish = key_values.parse(words[len(what) :], "annotations")
    if is_list == bool(wish.put or wish.removed):
        raise click.UsageError(f"{key_values.usage('annotations')}, or ask for --list")
    key_values.refuse_writing_flags(options, is_list=is_list)
    chosen = targets.parse_selections(
        what, options, verb="annotate", is_all=options["is_all"], is_read=is_list
    )
    run(_list_annotations(chosen, options) if is_list else _annotate(chosen, wish, options))


def with_annotations(obj: ApiObject, wish: MetadataChange, *, overwrite: bool) -> ApiObject | None:
    """Return the object with the annotations that are asked for; None if it has them. Pure.

    Raises:
        FleetctlError: one is the fleet's, or has another value and is not to be overwritten.

    """
    after = key_values.with_change(obj, wish, "annotations", overwrite=overwrite)
    if after is not None:
        before = obj.metadata.annotations
        writer.refuse_fleet_annotations(obj, before, after.metadata.annotations)
    return after


async def _annotate(
    chosen: Sequence[Selection], wish: MetadataChange, options: dict[str, Any]
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        return with_annotations(obj, wish, overwrite=bool(options["overwrite"]))

    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # all are asked before one is written
        for obj in found:
            for key in wish.removed:
                if key not in obj.metadata.annotations:
                    said = f"annotation {key!r} not found on {targets.object_ref(obj)}"
                    click.echo(said, err=True)
            written = await targets.write_edit(
                transport, clock, obj, edit, manager="fleetctl-annotate", is_dry=results.is_dry
            )
            results.say(written.obj, "annotated" if written.is_news else "not annotated")


async def _list_annotations(chosen: Sequence[Selection], options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
    for obj in found:
        pad = ""
        if len(found) > 1:
            click.echo(f"{targets.object_ref(obj)}:")
            pad = "  "
        for key, value in sorted(obj.metadata.annotations.items()):
            click.echo(f"{pad}{key}={value}")
