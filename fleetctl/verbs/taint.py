"""`fleetctl taint`: adds taints to nodes and removes them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, get_args

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli import arguments
from fleetctl.cli.arguments import result_options
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import targets, writer
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter
from insight import edits
from machinery.clock import SystemClock
from schemas import kinds
from schemas.meta import LabelKey, LabelValue
from schemas.node import Node, Taint, TaintEffect

EFFECTS: tuple[TaintEffect, ...] = get_args(TaintEffect)
_USAGE = "write KEY=VALUE:EFFECT or KEY:EFFECT, and KEY:EFFECT- or KEY- to remove one"
_KEY, _VALUE = TypeAdapter(LabelKey), TypeAdapter(LabelValue)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaintRemoval:
    """A taint to remove; without an effect, all taints of the key."""

    key: str
    effect: str = ""

    @property
    def text(self) -> str:
        return f"{self.key}:{self.effect}" if self.effect else self.key

    def means(self, taint: Taint) -> bool:
        return taint.key == self.key and self.effect in ("", taint.effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaintChange:
    """Taints to add and to remove."""

    added: tuple[Taint, ...]
    removed: tuple[TaintRemoval, ...]

    @property
    def done(self) -> str:
        """The past participle that kubectl prints."""
        if self.added and self.removed:
            return "modified"
        return "tainted" if self.added else "untainted"


def is_taint_arg(word: str) -> bool:
    """Return whether a word is a taint; names of nodes cannot have these characters."""
    return ":" in word or "=" in word or word.endswith("-")


def parse_changes(words: Sequence[str]) -> TaintChange:
    """Return the change that the words describe.

    Raises:
        click.UsageError: a word is not of the form, or two words contradict each other.

    """
    added = [_parse_taint(word) for word in words if not word.endswith("-")]
    removed = [_parse_removal(word) for word in words if word.endswith("-")]
    for number, taint in enumerate(added):
        if any(_is_same_taint(taint, other) for other in added[:number]):
            raise click.UsageError(
                f"{taint.key}:{taint.effect} is given twice; a key can have each effect once"
            )
        if any(one.means(taint) for one in removed):
            raise click.UsageError(
                f"{taint.key}:{taint.effect} cannot be added and removed at once"
            )
    return TaintChange(added=tuple(added), removed=tuple(removed))


def updated_taints(
    node: str, taints: Sequence[Taint], change: TaintChange, *, overwrite: bool
) -> tuple[Taint, ...]:
    """Return the node's taints after the change.

    Raises:
        FleetctlError: a taint to add exists with another value, or a taint to remove does not exist.

    """
    for removal in change.removed:
        if not any(removal.means(taint) for taint in taints):
            existing = ", ".join(_taint_text(taint) for taint in taints) or "none"
            raise FleetctlError(
                f'taint "{removal.text}" not found on node/{node}, which has {existing}'
            )
    clash = [old for old in taints for new in change.added if _is_same_taint(old, new)]
    if clash and not overwrite:
        raise FleetctlError(
            f"node/{node} already has {', '.join(_taint_text(old) for old in clash)}; change the value with --overwrite"
        )
    kept = [taint for taint in taints if not any(one.means(taint) for one in change.removed)]
    fresh = {(taint.key, taint.effect): taint for taint in change.added}
    replaced = [fresh.pop((taint.key, taint.effect), taint) for taint in kept]
    return (*replaced, *fresh.values())


def _parse_taint(word: str) -> Taint:
    key_value, colon, effect = word.partition(":")
    key, _, value = key_value.partition("=")
    if not colon:
        raise click.UsageError(f"{word!r} has no effect; {_USAGE}. {_effects_text()}")
    _check_key_value(word, key, value)
    return Taint(key=key, value=value, effect=_parse_effect(word, effect))


def _parse_removal(word: str) -> TaintRemoval:
    key, colon, effect = word.removesuffix("-").partition(":")
    # As in kubectl, a value is accepted and ignored: a key has each effect once.
    key, _, value = key.partition("=")
    _check_key_value(word, key, value)
    return TaintRemoval(key=key, effect=_parse_effect(word, effect) if colon else "")


def _check_key_value(word: str, key: str, value: str) -> None:
    for adapter, text, what in ((_KEY, key, "key"), (_VALUE, value, "value")):
        try:
            adapter.validate_python(text)
        except ValidationError:
            raise click.UsageError(
                f"{word!r}: {text!r} is not a valid {what} of a taint; {_USAGE}"
            ) from None


def _parse_effect(word: str, text: str) -> TaintEffect:
    if text not in EFFECTS:
        near = next(
            (one for one in EFFECTS if one.lower() == re.sub(r"[-_ ]", "", text.lower())), ""
        )
        hint = f"Did you mean {near}? " if near else ""
        raise click.UsageError(f"{word!r}: {text!r} is not an effect. {hint}{_effects_text()}")
    return text


def _effects_text() -> str:
    return (
        "The effects are NoSchedule (no new replicas), PreferNoSchedule (only if no other node fits) and "
        "NoExecute (running replicas are moved away, too)"
    )


def _is_same_taint(one: Taint, other: Taint) -> bool:
    return (one.key, one.effect) == (other.key, other.effect)


def _taint_text(taint: Taint) -> str:
    return f"{taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"


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
@click.argument("words", nargs=-1, required=True, metavar="NODE... KEY[=VALUE]:EFFECT...")
@click.option("--overwrite", is_flag=True, help="Replace the value of an existing taint.")
@arguments.selector_option
@arguments.all_option
@result_options
@store_options
def taint(words: tuple[str, ...], overwrite: bool, **options: Any) -> None:
    """Keep replicas away from nodes unless their deployment tolerates the taint."""
    names = list(takewhile(lambda word: not is_taint_arg(word), words))
    taint_words = words[len(names) :]
    # kubectl's own form names the kind: `taint nodes mac-1 key=value:Effect`.
    if names and (found := kinds.by_alias(names[0])) and found.name == "Node":
        names = names[1:]
    if not taint_words:
        raise click.UsageError(
            "which taint? Give KEY=VALUE:EFFECT to add one, KEY:EFFECT- or KEY- to remove one"
        )
    chosen = targets.selection(
        kind_of("nodes"),
        targets.parse_node_names(names),
        labels=options["selector"],
        is_all=options["is_all"],
    )
    run(_taint(chosen, parse_changes(taint_words), options, overwrite=overwrite))


async def _taint(
    chosen: Selection, change: TaintChange, options: dict[str, Any], *, overwrite: bool
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)

    def edit(node: Node) -> Node | None:
        taints = updated_taints(node.name, node.spec.taints, change, overwrite=overwrite)
        return edits.with_spec(node, taints=taints)

    async with open_store(options) as transport:
        nodes = await targets.read_nodes(transport, chosen)
        for node in nodes:
            edit(node)  # check all before the first write
        for node in nodes:
            written = await writer.write_edit(
                transport, clock, node, edit, manager=edits.TAINT_MANAGER, is_dry=results.is_dry
            )
            results.print_object(written.obj, change.done if written.is_changed else "unchanged")
