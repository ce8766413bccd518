"""`fleetctl label`: labels of objects, by which selectors find them. Restarts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl import apikeys, targets
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.kinds import target_of
from fleetctl.selector import labels as effective
from fleetctl.targets import Choice
from machinery.clock import SystemClock
from schemas import kinds
from schemas.meta import ApiObject, LabelKey, LabelValue

_FORM = "write KEY=VALUE to set a label, KEY- to take one away"
_KEY, _VALUE = TypeAdapter(LabelKey), TypeAdapter(LabelValue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be done to the labels of each object."""

    put: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


_HELP = """Set and remove labels of objects. Nothing is restarted by it.

\b
  fleetctl label node mac-1 rack=7 site=berlin
  fleetctl label md/qwen team-
  fleetctl label nodes --all site=berlin --overwrite
  fleetctl label node mac-1 --list

Labels in a manifest win: applying it makes them exactly what it says.
"""


@click.command(help=_HELP)
@click.argument("words", nargs=-1, required=True, metavar="KIND NAME... KEY=VALUE... KEY-...")
@click.option("--overwrite", is_flag=True, help="Replace the value of a label that is there.")
@click.option("--list", "is_list", is_flag=True, help="Show the labels, and change none.")
@targets.selector_option
@targets.all_option
@store_options
def label(words: tuple[str, ...], is_list: bool, **options: Any) -> None:
    """Set and remove labels of objects. Nothing is restarted by it."""
    what = tuple(takewhile(lambda word: not _is_label(word), words))
    if not what:
        raise click.UsageError("say which objects: KIND NAME..., such as: node mac-1 rack=7")
    if apikeys.names_of(what) is not None:
        raise click.UsageError(
            "API keys carry no labels; `fleetctl get apikeys` lists them by name"
        )
    target = target_of(what)
    wish = _parse(words[len(what) :])
    if is_list == bool(wish.put or wish.removed):
        raise click.UsageError(f"{_FORM}, or ask for --list")
    if not is_list and not target.kind.written_by_users:
        known = ", ".join(kind.plural for kind in kinds.KINDS if kind.written_by_users)
        raise FleetctlError(
            f"{target.kind.plural} are written by the fleet, and so are their labels; label one of {known}"
        )
    chosen = targets.choice(
        target.kind, target.names, labels=options["selector"], is_all=options["is_all"]
    )
    run(_list(chosen, options) if is_list else _label(chosen, wish, options))


def _is_label(word: str) -> bool:
    """Return whether a word speaks of a label, for no name has such characters."""
    return "=" in word or word.endswith("-")


def _parse(words: Sequence[str]) -> Wish:
    put: dict[str, str] = {}
    removed: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if not word.endswith("-"):
                raise click.UsageError(f"{word!r} is no label; {_FORM}")
            key = word.removesuffix("-")
            removed.append(key)
        elif key in put:
            raise click.UsageError(f"{key} is set twice; give it one value")
        else:
            put[key] = value
        _check(word, key, value)
    both = [key for key in removed if key in put]
    if both:
        raise click.UsageError(f"{both[0]} cannot be set and taken away at once")
    return Wish(put=put, removed=tuple(removed))


def _check(word: str, key: str, value: str) -> None:
    for adapter, text, rule in (
        (
            _KEY,
            key,
            "is no key: letters, digits, '-', '_' and '.', if need be after a prefix as in lab/rack",
        ),
        (_VALUE, value, "is no value: 63 letters, digits, '-', '_' and '.' at most"),
    ):
        try:
            adapter.validate_python(text)
        except ValidationError:
            raise click.UsageError(f"{word!r}: {text!r} {rule}") from None


def changed(obj: ApiObject, wish: Wish, *, overwrite: bool) -> dict[str, str]:
    """Return the object's labels as they will be. Pure.

    Raises:
        FleetctlError: a label has another value already, and it is not to be overwritten.

    """
    there = obj.metadata.labels
    for key, value in wish.put.items():
        if there.get(key, value) != value and not overwrite:
            raise FleetctlError(
                f"{targets.label_of(obj)}: {key!r} already has a value ({there[key]}); "
                "give --overwrite to change it"
            )
    kept = {key: value for key, value in there.items() if key not in wish.removed}
    return {**kept, **wish.put}


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


async def _label(chosen: Choice, wish: Wish, options: dict[str, Any]) -> None:
    clock, overwrite = SystemClock(), bool(options["overwrite"])

    def edit(obj: ApiObject) -> ApiObject | None:
        labels = changed(obj, wish, overwrite=overwrite)
        if labels == obj.metadata.labels:
            return None
        metadata = obj.metadata.model_copy(update={"labels": labels})
        return obj.model_copy(update={"metadata": metadata})

    async with opened(options) as transport:
        found = await targets.chosen(transport, chosen)
        for obj in found:
            edit(obj)  # all are asked before one is written
        for obj in found:
            for complaint in complaints(obj, wish):
                click.echo(complaint, err=True)
            done = "labeled" if wish.put else "unlabeled"
            is_news = await targets.change(transport, clock, obj, edit)
            click.echo(f"{targets.label_of(obj)} {done if is_news else 'not labeled'}")


async def _list(chosen: Choice, options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        found = await targets.chosen(transport, chosen)
    for obj in found:
        pad = ""
        if len(found) > 1:
            click.echo(f"{targets.label_of(obj)}:")
            pad = "  "
        for key, value in sorted(effective(obj).items()):
            click.echo(f"{pad}{key}={value}")
