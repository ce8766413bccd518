"""`fleetctl label`: labels of objects, by which selectors find them. Restarts nothing."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import click

from fleetctl import apikeys, keyvalues, targets
from fleetctl.connect import opened, run, store_options
from fleetctl.keyvalues import Wish
from fleetctl.results import Results, result_options
from fleetctl.selector import labels as effective
from fleetctl.targets import Choice
from machinery.clock import SystemClock
from schemas.meta import ApiObject

_HELP = """Set and remove labels of objects. Nothing is restarted by it.

\b
  fleetctl label node mac-1 rack=7 site=berlin
  fleetctl label md/qwen np/studio team-
  fleetctl label nodes --all site=berlin --overwrite
  fleetctl label node mac-1 --list

A label that a manifest does not speak of is left alone when the manifest is applied.
"""


@click.command(help=_HELP)
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
    what = tuple(takewhile(lambda word: not keyvalues.is_keyvalue(word), words))
    if not what and not options["files"]:
        raise click.UsageError("say which objects: KIND NAME..., such as: node mac-1 rack=7")
    if what and apikeys.names_of(what) is not None:
        raise click.UsageError(
            "API keys carry no labels; `fleetctl get apikeys` lists them by name"
        )
    wish = keyvalues.parse(words[len(what) :], "labels")
    if is_list == bool(wish.put or wish.removed):
        raise click.UsageError(f"{keyvalues.form('labels')}, or ask for --list")
    keyvalues.refuse_writing_flags(options, is_list=is_list)
    chosen = targets.choices(what, options, verb="label", is_all=options["is_all"], is_read=is_list)
    run(_list(chosen, options) if is_list else _label(chosen, wish, options))


def complaints(obj: ApiObject, wish: Wish) -> list[str]:
    """Return what cannot be taken away, because it is not there or not ours. Pure."""
    found = []
    for key in wish.removed:
        if key in obj.metadata.labels:
            continue
        if key in effective(obj):
            found.append(
                f"label {key!r} of {targets.label_of(obj)} comes from its agent and stays; "
                "a label of its own would hide it"
            )
        else:
            found.append(f"label {key!r} not found on {targets.label_of(obj)}")
    return found


async def _label(chosen: Sequence[Choice], wish: Wish, options: dict[str, Any]) -> None:
    clock, results = SystemClock(), Results.of(options)

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        return keyvalues.changed(obj, wish, "labels", overwrite=bool(options["overwrite"]))

    async with opened(options) as transport:
        found = await targets.all_chosen(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # all are asked before one is written
        for obj in found:
            for complaint in complaints(obj, wish):
                click.echo(complaint, err=True)
            done = "labeled" if wish.put else "unlabeled"
            written = await targets.write(
                transport, clock, obj, edit, manager="fleetctl-label", is_dry=results.is_dry
            )
            results.say(written.obj, done if written.is_news else "not labeled")


async def _list(chosen: Sequence[Choice], options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        found = await targets.all_chosen(transport, chosen)
    for obj in found:
        pad = ""
        if len(found) > 1:
            click.echo(f"{targets.label_of(obj)}:")
            pad = "  "
        for key, value in sorted(effective(obj).items()):
            click.echo(f"{pad}{key}={value}")
