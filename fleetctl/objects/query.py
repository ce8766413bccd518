"""Parses and runs the query of `fleetctl get`: which objects, in which order. Prints nothing."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import API_KEYS, Target, parse_targets
from fleetctl.objects.node_pools import read_node_pools
from fleetctl.objects.selectors import with_selectable_labels
from fleetctl.objects.table_context import TableContext
from machinery.clock import Clock
from manifests.suggestions import not_found_message
from schemas import sizes
from schemas.kinds import Kind
from store import object_trees
from store.object_trees import Tree
from store.reads import StoreReader

# Up to this many names are read one by one; for more, the whole kind is listed.
_MAX_SINGLE_READS = 3

RowsOf: TypeAlias = Callable[[Sequence[Tree], TableContext], list[tuple[str, ...]]]
"""Makes the rows of a table of objects of one kind."""

# Missing values sort first, then numbers (and sizes such as "8Gi"), then texts.
SortKey: TypeAlias = tuple[int, float, tuple[tuple[int, int, str], ...]]

_DIGITS = re.compile(r"([0-9]+)")
_MISSING: SortKey = (0, 0, ())


class ObjectQuery(NamedTuple):
    """The requested objects, and their order."""

    targets: tuple[Target, ...]
    labels: tuple[selectors.LabelRequirement, ...] = ()
    sort_by: str = ""

    @property
    def is_one(self) -> bool:
        """True if the query names exactly one object."""
        return len(self.targets) == 1 and len(self.targets[0].names) == 1

    @property
    def has_all_nodes(self) -> bool:
        """True if it selects all nodes."""
        return not self.labels and any(
            target.kind.name == "Node" and not target.names for target in self.targets
        )

    @property
    def has_several_kinds(self) -> bool:
        return len(self.targets) > 1

    @property
    def is_by_page(self) -> bool:
        """True if rows can be made of one page of objects after the other: nothing is compared with all of them."""
        (first, *others), is_stored_order = self.targets, not self.sort_by
        is_whole_kind = not others and not first.names
        return is_whole_kind and is_stored_order and first.kind.name in object_trees.PAGED_KINDS


class KindGroup(NamedTuple):
    """The objects of one kind."""

    kind: Kind
    trees: tuple[Tree, ...]


class QueryResult(NamedTuple):
    """The objects that were found, and errors about those that were not."""

    groups: tuple[KindGroup, ...]
    missing: tuple[str, ...]
    """One error for each name that does not exist."""
    context: TableContext

    @property
    def trees(self) -> list[Tree]:
        return [tree for group in self.groups for tree in group.trees]


def parse(words: tuple[str, ...], options: dict[str, Any]) -> ObjectQuery:
    """Return the query of the command line.

    Raises:
        click.UsageError: words and flags contradict each other, or select nothing.
        FleetctlError: a selector is invalid, or a file cannot be read.

    """
    labels, targets = options["selector"], _parse_query_targets(words, options)
    if labels and any(target.names for target in targets):
        raise click.UsageError("give names, or select objects with -l, but not both")
    if labels and any(target.kind is API_KEYS for target in targets):
        raise click.UsageError("API keys have no labels; give their names")
    return ObjectQuery(
        targets=targets,
        labels=selectors.parse_labels(labels),
        sort_by=options["sort_by"],
    )


def _parse_query_targets(words: tuple[str, ...], options: dict[str, Any]) -> tuple[Target, ...]:
    """Return the targets of the words, or of the files."""
    files, recursive = options["files"], options["recursive"]
    if not files:
        if recursive:
            raise click.UsageError("-R applies to the folders of -f; give -f as well")
        if not words:
            raise click.UsageError(
                "which objects? Give KIND, KIND NAME..., KIND/NAME... or -f FILE"
            )
        return parse_targets(words)
    if words or options["selector"]:
        raise click.UsageError("give names or selectors, or files with -f, but not both")
    from fleetctl.objects import targets  # noqa: PLC0415 - it imports the models

    return targets.targets_in_files(files, recursive=recursive)


async def fetch(store: StoreReader, clock: Clock, query: ObjectQuery) -> QueryResult:
    """Read the objects of the query.

    Raises:
        FleetctlError: objects cannot be sorted by the field.
        StoreError: the store does not answer; UndecodableError: it holds an invalid document.

    """
    groups, missing = [], []
    candidates: list[Tree] = []
    for target in query.targets:
        found, unknown = await _fetch_kind(store, target)
        for at, tree in enumerate(found):  # one by one: two lists of 20,000 trees take 10 MiB more
            found[at] = with_selectable_labels(tree)
        chosen = tuple(selectors.select(found, query.labels))
        groups.append(KindGroup(kind=target.kind, trees=chosen))
        candidates += found
        missing += unknown
    context = TableContext(now=clock.now())
    if any(target.kind.name == "Node" for target in query.targets):
        context = context._replace(
            ready_nodes=await object_trees.ready_nodes(store),
            node_pools=await read_node_pools(store, candidates),
        )
    return QueryResult(
        groups=_sorted_groups(groups, query), missing=tuple(missing), context=context
    )


async def fetch_rows(
    store: StoreReader, clock: Clock, query: ObjectQuery, rows_of: RowsOf
) -> list[tuple[str, ...]]:
    """Return the rows of the objects of a query that `is_by_page`: they take a tenth of the memory of the objects.

    Raises:
        StoreError: the store does not answer; UndecodableError: it holds an invalid document.

    """
    context = TableContext(now=clock.now())

    def rows(trees: Sequence[Tree]) -> list[tuple[str, ...]]:
        shown = [with_selectable_labels(tree) for tree in trees]
        return rows_of(selectors.select(shown, query.labels), context)

    pages = await object_trees.convert_all(store, query.targets[0].kind.name, rows)
    return list(chain.from_iterable(pages))


async def _fetch_kind(store: StoreReader, target: Target) -> tuple[list[Tree], list[str]]:
    """Return the objects, and the errors about names that do not exist."""
    kind, names = target.kind, tuple(dict.fromkeys(target.names))
    if kind.name == "Endpoint":
        every = await object_trees.list_all(store, kind.name)
        every += _external_trees(await object_trees.list_all(store, "ModelRoute"))
        return _named(kind, names, every)
    if not names:
        return await object_trees.list_all(store, kind.name), []
    if len(names) <= _MAX_SINGLE_READS:
        some = [await object_trees.get(store, kind.name, name) for name in names]
        trees = [tree for tree in some if tree is not None]
        if len(trees) == len(names):
            return trees, []
    return _named(kind, names, await object_trees.list_all(store, kind.name))


def _external_trees(routes: Iterable[Tree]) -> list[Tree]:
    """Return a tree for each external endpoint, in the form of an Endpoint; its name is ROUTE/NAME."""
    return [
        _external_tree(route, endpoint)
        for route in routes
        for endpoint in route["spec"].get("external") or ()
    ]


def _external_tree(route: Tree, external: Tree) -> Tree:
    metadata = route["metadata"]
    return {
        "apiVersion": route["apiVersion"],
        "kind": "Endpoint",
        "metadata": {
            "name": f"{metadata['name']}/{external['name']}",
            "labels": {},
            "creationTimestamp": metadata.get("creationTimestamp"),
        },
        "spec": {
            "external": True,
            "node": urlsplit(external["url"]).hostname or "",
            "url": external["url"],
            "model": external["model"],
            "servedNames": [route["spec"]["model"]],
        },
    }


def _named(kind: Kind, names: Sequence[str], every: list[Tree]) -> tuple[list[Tree], list[str]]:
    """Return the objects of these names, all if there are none, and the errors about names that do not exist."""
    if not names:
        return every, []
    by_name = {object_trees.name_of(tree): tree for tree in every}
    missing = [not_found_message(kind, name, by_name) for name in names if name not in by_name]
    return [by_name[name] for name in names if name in by_name], missing


def _sorted_groups(groups: Sequence[KindGroup], query: ObjectQuery) -> tuple[KindGroup, ...]:
    if not query.sort_by:
        return tuple(groups)
    return tuple(
        KindGroup(kind=group.kind, trees=tuple(sort_trees(group.trees, query.sort_by)))
        for group in groups
    )


def sort_trees(trees: Sequence[Tree], expression: str) -> list[Tree]:
    """Return the objects in the order of the first value that a JSONPath finds in each. The sort is stable.

    Raises:
        FleetctlError: the path is invalid, or no object has the field.

    """
    from fleetctl.objects import jsonpath  # noqa: PLC0415 - most queries do not sort

    path = jsonpath.parse_path(expression)
    found = [path.find(tree) for tree in trees]
    if trees and not any(found):
        raise FleetctlError(
            f"--sort-by {expression}: no object has this field; write a path such as "
            "--sort-by=.metadata.creationTimestamp. `-o yaml` shows the fields"
        )
    keys = [_sort_key(values[0]) if values else _MISSING for values in found]
    return [tree for _, tree in sorted(zip(keys, trees, strict=True), key=lambda pair: pair[0])]


def _sort_key(value: Any) -> SortKey:
    if value is None:
        return _MISSING
    if isinstance(value, bool | int | float):
        return (1, float(value), ())
    text = str(value)
    try:
        return (1, float(sizes.parse(text)), ())
    except (ValueError, OverflowError):
        return (2, 0, _natural_key(text))


def _natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts mac-2 before mac-10."""
    parts = _DIGITS.split(text)
    return tuple((1, int(p[:18]), p) if n % 2 else (0, 0, p) for n, p in enumerate(parts))
