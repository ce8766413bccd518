"""`-o`: what it says, and objects printed that way. What has a template is `fleetctl.templates`'. Pure."""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

import click

from fleetctl import documents, printers
from fleetctl.documents import Tree
from fleetctl.printers import Look, Moment

TABLES = ("table", "wide")
_WORDS = (*TABLES, "yaml", "json", "name")
_WITH_VALUE = ("jsonpath", "jsonpath-file", "custom-columns", "custom-columns-file")

HELP = (
    "wide, yaml, json, name, jsonpath=TEMPLATE, jsonpath-file=FILE, custom-columns=TITLE:PATH,... or "
    "custom-columns-file=FILE."
)


class Lines(NamedTuple):
    """A format with a line for each object, in columns."""

    titles: Callable[[str], tuple[str, ...]]
    """For a kind."""
    rows: Callable[[Sequence[Tree], Moment], list[tuple[str, ...]]]
    essence: Callable[[Tree, Moment], str]
    """What of an object makes it news."""


class Whole(NamedTuple):
    """A format for all objects at once."""

    text: Callable[[Tree], str]
    """For one object, or a list of them."""
    before_each: str = ""
    """What comes before each object of many that arrive one by one."""


class Names(NamedTuple):
    """`kind/name`, a line each."""

    def text(self, trees: Sequence[Tree]) -> str:
        return "".join(f"{tree['kind'].lower()}/{documents.name_of(tree)}\n" for tree in trees)


Format: TypeAlias = Lines | Whole | Names


def parse(text: str, look: Look, *, has_managed_fields: bool) -> Format:
    """Return the format that `-o` says.

    Raises:
        click.UsageError: there is none of that name, or it lacks its value.
        FleetctlError: its value is no template, or its file cannot be read.

    """
    word, equals, value = text.partition("=")
    if word in _WITH_VALUE:
        if not value:
            raise click.UsageError(f"-o {word} needs a value: -o {word}=...")
        from fleetctl import templates  # noqa: PLC0415 - with it comes all of JSONPath

        return templates.parse(word, value)
    if word not in _WORDS or equals:
        near = get_close_matches(word, (*_WORDS, *_WITH_VALUE), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise click.UsageError(f"there is no output format {text!r}; {hint}There are: {HELP}")
    if word in TABLES:
        return _table(look)
    if word == "name":
        return Names()
    return _trees(is_yaml=word == "yaml", has_managed_fields=has_managed_fields)


def listed(trees: Sequence[Tree], *, is_one: bool) -> Tree:
    """Return the objects as one tree; `is_one` says that one was asked for, which then is no list."""
    if is_one and len(trees) == 1:
        return trees[0]
    return {"apiVersion": "v1", "kind": "List", "items": list(trees)}


def _table(look: Look) -> Lines:
    return Lines(
        titles=lambda kind: printers.titles(kind, look),
        rows=lambda trees, moment: printers.rows(trees, moment, look),
        essence=lambda tree, moment: printers.timeless(tree, moment, look),
    )


def _trees(*, is_yaml: bool, has_managed_fields: bool) -> Whole:
    def text(tree: Tree) -> str:
        return _dumped(_shown(tree, has_managed_fields), is_yaml=is_yaml)

    return Whole(text=text, before_each="---\n" if is_yaml else "")


def _shown(tree: Tree, has_managed_fields: bool) -> Tree:
    """Return the tree, or each of its items, without who wrote which field, unless that was asked for."""
    if has_managed_fields:
        return tree
    if tree.get("kind") != "List":
        return documents.shown(tree)
    return {**tree, "items": [documents.shown(item) for item in tree["items"]]}


def _dumped(tree: Any, *, is_yaml: bool) -> str:
    if is_yaml:
        from manifests.emit import dump  # noqa: PLC0415 - only who asks for YAML waits for it

        return dump(tree)
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
