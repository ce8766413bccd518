"""What `fleetctl get` prints of what was found; remembers what it printed, for -w. Reads nothing."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from fleetctl.objects.query import ObjectQuery, QueryResult
from fleetctl.output import formats, printers
from fleetctl.output.formats import LineFormat, NameFormat
from fleetctl.output.printers import TableContext, TableOptions
from store import object_trees
from store.object_trees import Tree


class WatchEvent(NamedTuple):
    """What became of one object since it was printed."""

    what: str
    """ADDED, MODIFIED or DELETED."""
    tree: Tree


class ObjectRenderer:
    """How objects are printed; and which of them, and how wide, were printed last."""

    def __init__(self, asked: ObjectQuery, options: dict[str, Any]) -> None:
        """Take the flags.

        Raises:
            click.UsageError: they contradict each other; FleetctlError: -o says no format.

        """
        output = options["output"]
        for name, flag in (("show_labels", "--show-labels"), ("label_columns", "-L")):
            if options[name] and output not in formats.TABLES:
                raise click.UsageError(f"{flag} is for tables; leave it out with -o {output}")
        self._asked = asked
        self._form = formats.parse(
            output,
            _table_options(asked, options),
            has_managed_fields=options["show_managed_fields"],
        )
        self._headers = not options["no_headers"]
        self._has_events = options["output_watch_events"]
        self._widths: tuple[int, ...] = ()
        self._printed: dict[str, tuple[str, Tree]] = {}

    def all(self, seen: QueryResult) -> str:
        """Return everything that was found."""
        form = self._form
        if isinstance(form, LineFormat):
            tables = [
                printers.align_columns(
                    form.rows(group.trees, seen.moment),
                    form.titles(group.kind.name) if self._headers else (),
                )
                for group in seen.groups
                if group.trees
            ]
            return "\n\n".join(tables) + "\n"
        if isinstance(form, NameFormat):
            return form.text(seen.trees)
        return form.text(formats.as_list(seen.trees, is_one=self._asked.is_one))

    def nothing(self) -> str:
        """Return what is said where there would be no line."""
        if not isinstance(self._form, LineFormat):
            return ""
        plurals = [target.kind.plural for target in self._asked.targets]
        last = plurals.pop()
        return f"no {', '.join(plurals)} or {last} found" if plurals else f"no {last} found"

    def note(self, seen: QueryResult) -> None:
        """Take what there is for printed."""
        self._printed = {
            object_trees.name_of(tree): (self._essence(tree, seen.moment), tree)
            for tree in seen.trees
        }

    def changes(self, seen: QueryResult) -> str:
        """Return what is not as it was noted last, what is gone among it; and note it."""
        before = self._printed
        self.note(seen)
        now = self._printed
        fresh = [
            WatchEvent("MODIFIED" if name in before else "ADDED", tree)
            for name, (essence, tree) in now.items()
            if name not in before or before[name][0] != essence
        ]
        gone = [
            WatchEvent("DELETED", tree) for name, (_, tree) in before.items() if name not in now
        ]
        news = [*fresh, *gone]
        return self._news(news, seen.moment) if news else ""

    def _news(self, news: Sequence[WatchEvent], moment: TableContext) -> str:
        form, trees = self._form, [one.tree for one in news]
        if isinstance(form, NameFormat):
            return form.text(trees)
        if not isinstance(form, LineFormat):
            return "".join(form.before_each + form.text(tree) for tree in trees)
        rows, titles = form.rows(trees, moment), form.titles(self._asked.targets[0].kind.name)
        if self._has_events:
            rows = [(one.what, *row) for one, row in zip(news, rows, strict=True)]
            titles = ("EVENT", *titles)
        above = titles if self._headers and not self._widths else ()
        # Never narrower than what stands above; titles count, printed or not.
        self._widths = printers.widths(rows, titles, self._widths)
        return printers.align_columns(rows, above, least=self._widths) + "\n"

    def _essence(self, tree: Tree, moment: TableContext) -> str:
        """Return what makes an object news: of a table, what it shows but for times."""
        if isinstance(self._form, LineFormat):
            return self._form.essence(tree, moment)
        return json.dumps(tree)


def _table_options(asked: ObjectQuery, options: dict[str, Any]) -> TableOptions:
    keys = [key.strip() for text in options["label_columns"] for key in text.split(",")]
    return TableOptions(
        is_wide=options["output"] == "wide",
        has_labels=options["show_labels"],
        label_columns=tuple(key for key in keys if key),
        has_kind=asked.has_several_kinds or options["show_kind"],
    )
