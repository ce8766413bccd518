"""The output formats of `-o`: tables, documents, names, JSONPath templates and custom columns. Pure."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NamedTuple, TypeAlias

import click

from fleetctl.cli.documents import list_tree, tree_text
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.table_context import TableContext
from fleetctl.output import printers
from fleetctl.output.printers import TableOptions
from store import object_trees
from store.object_trees import Tree

TABLES = ("table", "wide")
_PLAIN_FORMATS = (*TABLES, "yaml", "json", "name")
_TEMPLATE_FORMATS = ("jsonpath", "custom-columns")
_MISSING = "<none>"

HELP = "wide, yaml, json, name, jsonpath=TEMPLATE or custom-columns=TITLE:PATH,..."


class LineFormat(NamedTuple):
    """A format with columns, and one line for each object."""

    titles: Callable[[str], tuple[str, ...]]
    """The titles for a kind."""
    rows: Callable[[Sequence[Tree], TableContext], list[tuple[str, ...]]]
    essence: Callable[[Tree, TableContext], str]
    """The part of an object that counts as a change for -w."""


class DocumentFormat(NamedTuple):
    """A format for all objects at once."""

    text: Callable[[Tree], str]
    """The text of one object, or of a list."""
    before_each: str = ""
    """The separator before each object when they are printed one by one."""


class NameFormat(NamedTuple):
    """`kind/name`, one line each."""

    def text(self, trees: Sequence[Tree]) -> str:
        return "".join(f"{tree['kind'].lower()}/{object_trees.name_of(tree)}\n" for tree in trees)


Format: TypeAlias = LineFormat | DocumentFormat | NameFormat


def parse(text: str, options: TableOptions, *, has_managed_fields: bool) -> Format:
    """Return the format of a value of `-o`.

    Raises:
        click.UsageError: the format is unknown, or its value is missing.
        FleetctlError: its template is invalid.

    """
    word, equals, value = text.partition("=")
    if word in _TEMPLATE_FORMATS:
        if not value:
            raise click.UsageError(f"-o {word} needs a value: -o {word}=...")
        return parse_template(word, value)
    if word not in _PLAIN_FORMATS or equals:
        near = get_close_matches(word, (*_PLAIN_FORMATS, *_TEMPLATE_FORMATS), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? Available" if near else "available"
        raise click.UsageError(f"unknown output format {text!r}; {hint}: {HELP}")
    if word in TABLES:
        return LineFormat(
            titles=lambda kind: printers.titles(kind, options),
            rows=lambda trees, context: printers.rows(trees, context, options),
            essence=lambda tree, context: printers.stable_text(tree, context, options),
        )
    if word == "name":
        return NameFormat()
    return _tree_format(is_yaml=word == "yaml", has_managed_fields=has_managed_fields)


def as_list(trees: Sequence[Tree], *, is_one: bool) -> Tree:
    """Return the objects as one tree: a List, or the object itself if one was requested by name."""
    if is_one and len(trees) == 1:
        return trees[0]
    return list_tree(trees)


def _tree_format(*, is_yaml: bool, has_managed_fields: bool) -> DocumentFormat:
    def text(tree: Tree) -> str:
        shown = tree if has_managed_fields else _without_managed_fields(tree)
        return tree_text(shown, "yaml" if is_yaml else "json")

    return DocumentFormat(text=text, before_each="---\n" if is_yaml else "")


def _without_managed_fields(tree: Tree) -> Tree:
    """Return the object, or each item of a list, without managedFields."""
    if tree.get("kind") != "List":
        return object_trees.without_managed_fields(tree)
    items = [object_trees.without_managed_fields(item) for item in tree["items"]]
    return {**tree, "items": items}


def parse_template(word: str, value: str) -> Format:
    """Return the format of `-o WORD=VALUE`.

    Raises:
        FleetctlError: the template is invalid.

    """
    from fleetctl.objects import jsonpath  # noqa: PLC0415 - most formats do not need it

    if word != "jsonpath":
        return _custom_columns(value)
    if "{" not in value:
        raise FleetctlError(
            f"-o {word}: {value.strip()!r} has no braces, so it holds no path; write {{{value.strip()}}}"
        )
    return DocumentFormat(text=jsonpath.parse(value).text)


def _custom_columns(text: str) -> LineFormat:
    """Return the columns of `NAME:.metadata.name,NODE:.spec.node`."""
    from fleetctl.objects import jsonpath  # noqa: PLC0415 - most formats do not need it

    pairs = [part.partition(":") for part in text.split(",")]
    for title, _, path in pairs:
        if not title or not path:
            raise FleetctlError(
                f"-o custom-columns: {title or text!r} needs a title and a path; write TITLE:PATH separated by "
                "commas, such as NAME:.metadata.name,NODE:.spec.node"
            )
    parsed = [jsonpath.parse_path(path) for _, _, path in pairs]

    def row(tree: Tree) -> tuple[str, ...]:
        return tuple(
            ",".join(map(jsonpath.format_value, path.find(tree))) or _MISSING for path in parsed
        )

    return LineFormat(
        titles=lambda _: tuple(title for title, _, _ in pairs),
        rows=lambda trees, _: [row(tree) for tree in trees],
        essence=lambda tree, _: "\0".join(row(tree)),
    )
