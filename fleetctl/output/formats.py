"""`-o`: what it says, and objects printed that way. What has a template is `fleetctl.output.formats`'. Pure.

`-o jsonpath=` and `-o custom-columns=`: the user's own formats. Pure but for files with them.
"""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import jsonpath
from fleetctl.output import printers
from fleetctl.output.printers import TableContext, TableOptions
from store import object_trees
from store.object_trees import Tree

TABLES = ("table", "wide")
_PLAIN_FORMATS = (*TABLES, "yaml", "json", "name")
_TEMPLATE_FORMATS = ("jsonpath", "jsonpath-file", "custom-columns", "custom-columns-file")

HELP = (
    "wide, yaml, json, name, jsonpath=TEMPLATE, jsonpath-file=FILE, custom-columns=TITLE:PATH,... or "
    "custom-columns-file=FILE."
)


class LineFormat(NamedTuple):
    """A format with a line for each object, in columns."""

    titles: Callable[[str], tuple[str, ...]]
    """For a kind."""
    rows: Callable[[Sequence[Tree], TableContext], list[tuple[str, ...]]]
    essence: Callable[[Tree, TableContext], str]
    """What of an object makes it news."""


class DocumentFormat(NamedTuple):
    """A format for all objects at once."""

    text: Callable[[Tree], str]
    """For one object, or a list of them."""
    before_each: str = ""
    """What comes before each object of many that arrive one by one."""


class NameFormat(NamedTuple):
    """`kind/name`, a line each."""

    def text(self, trees: Sequence[Tree]) -> str:
        return "".join(f"{tree['kind'].lower()}/{object_trees.name_of(tree)}\n" for tree in trees)


Format: TypeAlias = LineFormat | DocumentFormat | NameFormat


def parse(text: str, look: TableOptions, *, has_managed_fields: bool) -> Format:
    """Return the format that `-o` says.

    Raises:
        click.UsageError: there is none of that name, or it lacks its value.
        FleetctlError: its value is no template, or its file cannot be read.

    """
    word, equals, value = text.partition("=")
    if word in _TEMPLATE_FORMATS:
        if not value:
            raise click.UsageError(f"-o {word} needs a value: -o {word}=...")

        return parse_template(word, value)
    if word not in _PLAIN_FORMATS or equals:
        near = get_close_matches(word, (*_PLAIN_FORMATS, *_TEMPLATE_FORMATS), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise click.UsageError(f"there is no output format {text!r}; {hint}There are: {HELP}")
    if word in TABLES:
        return _table_format(look)
    if word == "name":
        return NameFormat()
    return _tree_format(is_yaml=word == "yaml", has_managed_fields=has_managed_fields)


def as_list(trees: Sequence[Tree], *, is_one: bool) -> Tree:
    """Return the objects as one tree; `is_one` says that one was asked for, which then is no list."""
    if is_one and len(trees) == 1:
        return trees[0]
    return {"apiVersion": "v1", "kind": "List", "items": list(trees)}


def _table_format(look: TableOptions) -> LineFormat:
    return LineFormat(
        titles=lambda kind: printers.titles(kind, look),
        rows=lambda trees, moment: printers.rows(trees, moment, look),
        essence=lambda tree, moment: printers.stable_text(tree, moment, look),
    )


def _tree_format(*, is_yaml: bool, has_managed_fields: bool) -> DocumentFormat:
    def text(tree: Tree) -> str:
        return _dump(_without_managed_fields(tree, has_managed_fields), is_yaml=is_yaml)

    return DocumentFormat(text=text, before_each="---\n" if is_yaml else "")


def _without_managed_fields(tree: Tree, has_managed_fields: bool) -> Tree:
    """Return the tree, or each of its items, without who wrote which field, unless that was asked for."""
    if has_managed_fields:
        return tree
    if tree.get("kind") != "List":
        return object_trees.without_managed_fields(tree)
    return {**tree, "items": [object_trees.without_managed_fields(item) for item in tree["items"]]}


def _dump(tree: Any, *, is_yaml: bool) -> str:
    if is_yaml:
        from manifests.yaml.core_schema import dump  # noqa: PLC0415 - only for YAML

        return dump(tree)
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


_MISSING = "<none>"


def parse_template(word: str, value: str) -> Format:
    """Return the format that `-o WORD=VALUE` says.

    Raises:
        FleetctlError: the value is no template, or names a file that cannot be read or holds none.

    """
    is_file = word.endswith("-file")
    text = _read_template(word, value) if is_file else value
    if not word.startswith("jsonpath"):
        return _columns_from_file(text, value) if is_file else _custom_columns(text)
    if "{" not in text:
        raise FleetctlError(
            f"-o {word}: {text.strip()!r} has no braces, and so no path; write {{{text.strip()}}}"
        )
    return DocumentFormat(text=jsonpath.parse(text).text)


def _custom_columns(text: str) -> LineFormat:
    """Return the columns of `NAME:.metadata.name,NODE:.spec.node`."""
    pairs = [part.partition(":") for part in text.split(",")]
    for title, _, path in pairs:
        if not title or not path:
            raise FleetctlError(
                f"-o custom-columns: {title or text!r} needs a title and a path; write TITLE:PATH with commas "
                "between several, such as NAME:.metadata.name,NODE:.spec.node"
            )
    return _column_format([title for title, _, _ in pairs], [path for _, _, path in pairs])


def _columns_from_file(text: str, file: str) -> LineFormat:
    """Return the columns of a file: a line of titles, below each its path."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise FleetctlError(
            f"{file}: expected a line with titles and a line with as many paths below them, such as "
            "`NAME NODE` and `.metadata.name .spec.node`"
        )
    return _column_format(lines[0], lines[1])


def _column_format(titles: Sequence[str], paths: Sequence[str]) -> LineFormat:
    parsed = [jsonpath.parse_path(path) for path in paths]

    def row(tree: Tree) -> tuple[str, ...]:
        return tuple(
            ",".join(map(jsonpath.format_value, path.find(tree))) or _MISSING for path in parsed
        )

    def rows(trees: Sequence[Tree], _: TableContext) -> list[tuple[str, ...]]:
        return [row(tree) for tree in trees]

    return LineFormat(
        titles=lambda _: tuple(titles),
        rows=rows,
        essence=lambda tree, _: "\0".join(row(tree)),
    )


def _read_template(word: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetctlError(f"-o {word}={file}: the file cannot be read: {error}") from error
