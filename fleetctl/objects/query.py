"""What `fleetctl get` is asked for: which objects, in which order; and what the store says. Prints nothing.

`--sort-by`: objects in the order of a field, as kubectl has it. Pure.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import jsonpath, selectors
from fleetctl.objects.kind_args import API_KEYS, Target, parse_targets
from fleetctl.objects.selectors import with_selectable_labels
from fleetctl.output.printers import TableContext
from machinery.clock import Clock
from manifests.suggestions import not_found_message
from schemas import sizes
from schemas.kinds import Kind
from store import object_trees
from store.object_trees import Tree
from store.reads import StoreReader

# Up to as many are asked for one by one; more, and the whole kind is read at once.
_MAX_SINGLE_READS = 3


class ObjectQuery(NamedTuple):
    """Which objects, and in which order."""

    targets: tuple[Target, ...]
    labels: tuple[selectors.LabelRequirement, ...] = ()
    fields: tuple[selectors.FieldRequirement, ...] = ()
    sort_by: str = ""

    @property
    def is_one(self) -> bool:
        """Whether one object is asked for by its name."""
        return len(self.targets) == 1 and len(self.targets[0].names) == 1

    @property
    def has_several_kinds(self) -> bool:
        return len(self.targets) > 1


class KindGroup(NamedTuple):
    """The objects of one kind."""

    kind: Kind
    trees: tuple[Tree, ...]


class QueryResult(NamedTuple):
    """What was found."""

    groups: tuple[KindGroup, ...]
    missing: tuple[str, ...]
    """What is said of names that nobody has."""
    moment: TableContext

    @property
    def trees(self) -> list[Tree]:
        return [tree for group in self.groups for tree in group.trees]


def parse(what: tuple[str, ...], options: dict[str, Any]) -> ObjectQuery:
    """Return what the words and flags say.

    Raises:
        click.UsageError: they contradict each other, or mean nothing.
        FleetctlError: a selector is none, or a file cannot be read.

    """
    labels, fields = options["selector"], options["field_selector"]
    targets = _parse_query_targets(what, options)
    if any(target.names for target in targets) and (labels or fields):
        flag = "-l" if labels else "--field-selector"
        raise click.UsageError(f"name objects, or select them with {flag}, not both")
    if labels and any(target.kind is API_KEYS for target in targets):
        raise click.UsageError("API keys have no labels; name those that you mean")
    return ObjectQuery(
        targets=targets,
        labels=selectors.parse_labels(labels),
        fields=selectors.parse_fields(fields),
        sort_by=options["sort_by"],
    )


def _parse_query_targets(what: tuple[str, ...], options: dict[str, Any]) -> tuple[Target, ...]:
    """Return what the words mean, or what is in the files."""
    files, recursive = options["files"], options["recursive"]
    if not files:
        if recursive:
            raise click.UsageError("-R is about the folders that -f names; give -f as well")
        if not what:
            raise click.UsageError("say what to show: KIND, KIND NAME..., KIND/NAME... or -f FILE")
        return parse_targets(what)
    if what or options["selector"] or options["field_selector"]:
        raise click.UsageError("name or select objects, or give their files with -f, not both")
    from fleetctl.objects import targets  # noqa: PLC0415 - with it come the models and YAML

    return targets.targets_in_files(files, recursive=recursive)


async def fetch(store: StoreReader, clock: Clock, asked: ObjectQuery) -> QueryResult:
    """Return what the store has of it.

    Raises:
        FleetctlError: no object can be sorted by that field, or it is none that can be selected by.
        StoreError: no answer; UndecodableError: it holds what is no document.

    """
    groups, missing = [], []
    every: list[Tree] = []
    for target in asked.targets:
        found, unknown = await _fetch_kind(store, target)
        found = [with_selectable_labels(tree) for tree in found]
        groups.append(KindGroup(kind=target.kind, trees=_select(found, asked)))
        every += found
        missing += unknown
    _refuse_unknown_fields(every, asked)
    has_nodes = any(target.kind.name == "Node" for target in asked.targets)
    ready = await object_trees.ready_nodes(store) if has_nodes else frozenset[str]()
    moment = TableContext(now=clock.now(), ready_nodes=ready)
    return QueryResult(groups=_sorted(groups, asked), missing=tuple(missing), moment=moment)


def _select(found: Sequence[Tree], asked: ObjectQuery) -> tuple[Tree, ...]:
    chosen = selectors.select(found, asked.labels)
    return tuple(tree for tree in chosen if all(part.holds(tree) for part in asked.fields))


def _refuse_unknown_fields(trees: Sequence[Tree], asked: ObjectQuery) -> None:
    """Refuse a field that no kind has: nothing would be found, and nobody would know why."""
    for field in asked.fields:
        if not any(field.is_there(tree) for tree in trees):
            from fleetctl.objects import kind_schema  # noqa: PLC0415 - with it come the models

            kind_schema.refuse_unselectable(field.path, [target.kind for target in asked.targets])


def _sorted(groups: Sequence[KindGroup], asked: ObjectQuery) -> tuple[KindGroup, ...]:
    if not asked.sort_by:
        return tuple(groups)

    return tuple(
        KindGroup(kind=group.kind, trees=tuple(sort_trees(group.trees, asked.sort_by)))
        for group in groups
    )


async def _fetch_kind(store: StoreReader, target: Target) -> tuple[list[Tree], list[str]]:
    """Return the objects, and what is said of names that nobody has."""
    kind, names = target.kind, tuple(dict.fromkeys(target.names))
    if not names:
        return await object_trees.list_all(store, kind.name), []
    if len(names) <= _MAX_SINGLE_READS:
        some = [await object_trees.get(store, kind.name, name) for name in names]
        there = [tree for tree in some if tree is not None]
        if len(there) == len(names):
            return there, []
    by_name = {
        object_trees.name_of(tree): tree for tree in await object_trees.list_all(store, kind.name)
    }
    missing = [not_found_message(kind, name, by_name) for name in names if name not in by_name]
    return [by_name[name] for name in names if name in by_name], missing


# What is not there comes first, then numbers (and sizes as "8Gi"), then texts.
SortKey: TypeAlias = tuple[int, float, tuple[tuple[int, int, str], ...]]

_DIGITS = re.compile(r"([0-9]+)")
_MISSING: SortKey = (0, 0, ())


def sort_trees(trees: Sequence[Tree], expression: str) -> list[Tree]:
    """Return the objects in the order of what a JSONPath finds in each; equals keep their order.

    Raises:
        FleetctlError: it is no path, or no object has such a field.

    """
    path = jsonpath.parse_path(expression)
    found = [path.find(tree) for tree in trees]
    if trees and not any(found):
        raise FleetctlError(
            f"--sort-by {expression}: none of the objects has such a field; write it as in "
            "--sort-by=.metadata.creationTimestamp, and see `-o yaml` for what there is"
        )
    ranks = [_sort_key(values[0]) if values else _MISSING for values in found]
    return [tree for _, tree in sorted(zip(ranks, trees, strict=True), key=lambda pair: pair[0])]


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
    """Return what sorts mac-2 before mac-10."""
    parts = _DIGITS.split(text)
    return tuple((1, int(p[:18]), p) if n % 2 else (0, 0, p) for n, p in enumerate(parts))
