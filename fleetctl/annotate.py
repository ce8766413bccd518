"""`fleetctl annotate`: notes on objects, for people and tools. Nothing selects on them, nothing restarts."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import click

from fleetctl import keyvalues, rewriting, targets
from fleetctl.connect import opened, run, store_options
from fleetctl.keyvalues import Wish
from fleetctl.results import Results, result_options
from fleetctl.targets import Choice
from machinery.clock import SystemClock
from schemas.meta import ApiObject

_HELP = """Set and remove annotations of objects: notes for people and tools. Nothing is restarted by it.

\b
  fleetctl annotate md qwen kubernetes.io/change-cause="longer context"
  fleetctl annotate md/qwen np/studio owner-
  fleetctl annotate nodes --all bought=2026 --overwrite
  fleetctl annotate md qwen --list

`fleetctl rollout history` shows kubernetes.io/change-cause with the revision that follows it.
"""


@click.command(help=_HELP)
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
    what = tuple(takewhile(lambda word: not keyvalues.is_keyvalue(word), words))
    if not what and not options["files"]:
        raise click.UsageError("say which objects: KIND NAME..., such as: md qwen owner=anna")
    wish = keyvalues.parse(words[len(what) :], "annotations")
    if is_list == bool(wish.put or wish.removed):
        raise click.UsageError(f"{keyvalues.form('annotations')}, or ask for --list")
    keyvalues.refuse_writing_flags(options, is_list=is_list)
    chosen = targets.choices(
        what, options, verb="annotate", is_all=options["is_all"], is_read=is_list
    )
    run(_list(chosen, options) if is_list else _annotate(chosen, wish, options))


def annotated(obj: ApiObject, wish: Wish, *, overwrite: bool) -> ApiObject | None:
    """Return the object with the annotations that are asked for; None if it has them. Pure.

    Raises:
        FleetctlError: one is the fleet's, or has another value and is not to be overwritten.

    """
    after = keyvalues.changed(obj, wish, "annotations", overwrite=overwrite)
    if after is not None:
        before = obj.metadata.annotations
        rewriting.refuse_fleet_annotations(obj, before, after.metadata.annotations)
    return after


async def _annotate(chosen: Sequence[Choice], wish: Wish, options: dict[str, Any]) -> None:
    clock, results = SystemClock(), Results.of(options)

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        return annotated(obj, wish, overwrite=bool(options["overwrite"]))

    async with opened(options) as transport:
        found = await targets.all_chosen(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # all are asked before one is written
        for obj in found:
            for key in wish.removed:
                if key not in obj.metadata.annotations:
                    said = f"annotation {key!r} not found on {targets.label_of(obj)}"
                    click.echo(said, err=True)
            written = await targets.write(
                transport, clock, obj, edit, manager="fleetctl-annotate", is_dry=results.is_dry
            )
            results.say(written.obj, "annotated" if written.is_news else "not annotated")


async def _list(chosen: Sequence[Choice], options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        found = await targets.all_chosen(transport, chosen)
    for obj in found:
        pad = ""
        if len(found) > 1:
            click.echo(f"{targets.label_of(obj)}:")
            pad = "  "
        for key, value in sorted(obj.metadata.annotations.items()):
            click.echo(f"{pad}{key}={value}")
