"""`fleetctl taint`: adds taints to nodes and removes them."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, get_args

import click

from fleetctl.objects import key_values
from fleetctl.objects.change import change_objects, change_options, select_of_kind
from insight import edits
from insight.edits import ObjectEdit
from schemas.node import Node, Taint, TaintEffect
from store.port import Transport

EFFECTS: tuple[TaintEffect, ...] = get_args(TaintEffect)
_USAGE = "write KEY=VALUE:EFFECT or KEY:EFFECT, and KEY:EFFECT- or KEY- to remove one"


def is_taint_arg(word: str) -> bool:
    """Return whether a word is a taint; names of nodes cannot have these characters."""
    return ":" in word or "=" in word or word.endswith("-")


def parse_changes(words: Sequence[str]) -> tuple[list[Taint], list[tuple[str, str]]]:
    """Return the taints to add, and the keys and effects of those to remove; an empty effect means all of the key.

    Raises:
        click.UsageError: a word is not of the form, or two words contradict each other.

    """
    added = [_parse_taint(word) for word in words if not word.endswith("-")]
    removed = [_parse_removal(word) for word in words if word.endswith("-")]
    names = [(taint.key, taint.effect) for taint in added]
    for number, (key, effect) in enumerate(names):
        if (key, effect) in names[:number]:
            raise click.UsageError(
                f"{key}:{effect} is given twice; a key can have each effect once"
            )
        if (key, effect) in removed or (key, "") in removed:
            raise click.UsageError(f"{key}:{effect} cannot be added and removed at once")
    return added, removed


def _parse_taint(word: str) -> Taint:
    key_value, colon, effect = word.partition(":")
    key, _, value = key_value.partition("=")
    if not colon:
        raise click.UsageError(f"{word!r} has no effect; {_USAGE}. {_effects_text()}")
    _check_key_value(word, key, value)
    return Taint(key=key, value=value, effect=_parse_effect(word, effect))


def _parse_removal(word: str) -> tuple[str, str]:
    key, colon, effect = word.removesuffix("-").partition(":")
    # As in kubectl, a value is accepted and ignored: a key has each effect once.
    key, _, value = key.partition("=")
    _check_key_value(word, key, value)
    return key, _parse_effect(word, effect) if colon else ""


def _check_key_value(word: str, key: str, value: str) -> None:
    for is_valid, text, what in (
        (key_values.is_valid_key(key), key, "key"),
        (key_values.is_valid_value(value), value, "value"),
    ):
        if not is_valid:
            raise click.UsageError(f"{word!r}: {text!r} is not a valid {what} of a taint; {_USAGE}")


def _parse_effect(word: str, text: str) -> TaintEffect:
    if text not in EFFECTS:
        near = next(
            (effect for effect in EFFECTS if effect.lower() == re.sub(r"[-_ ]", "", text.lower())),
            "",
        )
        hint = f"Did you mean {near}? " if near else ""
        raise click.UsageError(f"{word!r}: {text!r} is not an effect. {hint}{_effects_text()}")
    return text


def _effects_text() -> str:
    return (
        "The effects are NoSchedule (no new replicas), PreferNoSchedule (only if no other node fits) and "
        "NoExecute (running replicas are moved away, too)"
    )


_HELP = """Keep replicas away from nodes unless their deployment tolerates the taint.

\b
EFFECT is one of
  NoSchedule         no new replicas are placed on the node
  PreferNoSchedule   new replicas are placed on it only if no other node fits
  NoExecute          running replicas are moved away as well
  A minus removes a taint.
\b
  fleetctl taint mac-1 owner=anna:NoSchedule
  fleetctl taint mac-1 owner:NoSchedule-
  fleetctl taint node mac-1 owner=anna:NoSchedule     the same in kubectl's words
  fleetctl taint --all maintenance-

Deployments tolerate taints with spec.placement.tolerations.
"""


@click.command(help=_HELP, short_help="Keep replicas away that do not tolerate a taint.")
@click.option("--overwrite", is_flag=True, help="Replace the value of an existing taint.")
@change_options("NODE... KEY[=VALUE]:EFFECT...", is_of_one_kind=True)
async def taint(
    transport: Transport, words: tuple[str, ...], overwrite: bool, **options: Any
) -> None:
    """Keep replicas away from nodes unless their deployment tolerates the taint."""
    names = list(takewhile(lambda word: not is_taint_arg(word), words))
    taint_words = words[len(names) :]
    if not taint_words:
        raise click.UsageError(
            "which taint? Give KEY=VALUE:EFFECT to add one, KEY:EFFECT- or KEY- to remove one"
        )
    chosen = select_of_kind(names, "nodes", options)
    added, removed = parse_changes(taint_words)
    done = "tainted" if added else "untainted"
    change: ObjectEdit[Node] = ObjectEdit(
        edit=lambda node: edits.with_taints(node, added, removed, overwrite=overwrite),
        manager=edits.TAINT_MANAGER,
        done="modified" if added and removed else done,
        unchanged="unchanged",
    )
    await change_objects(transport, chosen, change, options)
