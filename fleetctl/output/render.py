"""Renders the results of `fleetctl get`, and with -w only what changed since the last time. Reads nothing."""

import json
from collections.abc import Sequence
from typing import Any

import click

from fleetctl.objects.query import ObjectQuery, QueryResult, RowsOf
from fleetctl.objects.table_context import TableContext
from fleetctl.output import formats, printers
from fleetctl.output.formats import LineFormat, NameFormat
from fleetctl.output.printers import TableOptions
from store import object_trees
from store.object_trees import Tree


class ObjectRenderer:
    """Renders query results; remembers the printed objects and column widths for -w."""

    def __init__(self, query: ObjectQuery, options: dict[str, Any]) -> None:
        """Make a renderer for the flags.

        Raises:
            click.UsageError: the flags contradict each other; FleetctlError: the format of -o is invalid.

        """
        output = options["output"]
        for name, flag in (("show_labels", "--show-labels"), ("label_columns", "-L")):
            if options[name] and output not in formats.TABLES:
                raise click.UsageError(f"{flag} applies to tables only; remove it, or -o {output}")
        self._query = query
        self._form = formats.parse(
            output,
            _table_options(query, options),
            has_managed_fields=options["show_managed_fields"],
        )
        self._headers = not options["no_headers"]
        self._widths: tuple[int, ...] = ()
        self._printed: dict[str, tuple[str, Tree]] = {}

    @property
    def rows_of(self) -> RowsOf | None:
        """Return the function that makes rows of objects; None for a format without rows."""
        return self._form.rows if isinstance(self._form, LineFormat) else None

    def table(self, rows: Sequence[tuple[str, ...]]) -> str:
        """Return the rows of objects of the query's only kind as text."""
        return self._aligned(rows, self._query.targets[0].kind.name) + "\n"

    def _aligned(self, rows: Sequence[tuple[str, ...]], kind: str) -> str:
        assert isinstance(self._form, LineFormat)
        titles = self._form.titles(kind) if self._headers else ()
        return printers.align_columns(rows, titles)

    def text(self, result: QueryResult) -> str:
        """Return all objects as text."""
        form = self._form
        if isinstance(form, LineFormat):
            tables = [
                self._aligned(form.rows(group.trees, result.context), group.kind.name)
                for group in result.groups
                if group.trees
            ]
            return "\n\n".join(tables) + "\n"
        if isinstance(form, NameFormat):
            return form.text(result.trees)
        return form.text(formats.as_list(result.trees, is_one=self._query.is_one))

    def empty_note(self) -> str:
        """Return the note for an empty result; empty if the format has text for it."""
        if not isinstance(self._form, LineFormat):
            return ""
        plurals = [target.kind.plural for target in self._query.targets]
        last = plurals.pop()
        return f"no {', '.join(plurals)} or {last} found" if plurals else f"no {last} found"

    def changes(self, result: QueryResult) -> str:
        """Return the changes since the last call as text, with deleted objects; record the objects."""
        before = self._printed
        self._printed = now = {
            object_trees.name_of(tree): (self._essence(tree, result.context), tree)
            for tree in result.trees
        }
        fresh = [
            tree
            for name, (essence, tree) in now.items()
            if name not in before or before[name][0] != essence
        ]
        gone = [tree for name, (_, tree) in before.items() if name not in now]
        return self._changes_text([*fresh, *gone], result.context) if fresh or gone else ""

    def _changes_text(self, trees: Sequence[Tree], context: TableContext) -> str:
        form = self._form
        if isinstance(form, NameFormat):
            return form.text(trees)
        if not isinstance(form, LineFormat):
            return "".join(form.before_each + form.text(tree) for tree in trees)
        rows, titles = form.rows(trees, context), form.titles(self._query.targets[0].kind.name)
        above = titles if self._headers and not self._widths else ()
        # Never narrower than earlier lines; titles count even if they are not printed.
        self._widths = printers.widths(rows, titles, self._widths)
        return printers.align_columns(rows, above, least=self._widths) + "\n"

    def _essence(self, tree: Tree, context: TableContext) -> str:
        """Return the part of an object that counts as a change; for tables the cells without times."""
        if isinstance(self._form, LineFormat):
            return self._form.essence(tree, context)
        return json.dumps(tree)


def _table_options(query: ObjectQuery, options: dict[str, Any]) -> TableOptions:
    keys = [key.strip() for text in options["label_columns"] for key in text.split(",")]
    return TableOptions(
        is_wide=options["output"] == "wide",
        has_labels=options["show_labels"],
        label_columns=tuple(key for key in keys if key),
        has_kind=query.has_several_kinds,
    )
