"""What `fleetctl get` is asked for: which objects, in which order; and what the store says. Prints nothing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from fleetctl import documents, selector
from fleetctl.documents import Tree
from fleetctl.kinds import API_KEYS, Target, targets_of
from fleetctl.labels import labelled
from fleetctl.printers import Moment
from machinery.clock import Clock
from manifests.missing import not_found
from schemas.kinds import Kind
from store.listing import Reads

# Up to as many are asked for one by one; more, and the whole kind is read at once.
_FEW = 3


class Asked(NamedTuple):
    """Which objects, and in which order."""

    targets: tuple[Target, ...]
    labels: tuple[selector.Requirement, ...] = ()
    fields: tuple[selector.FieldRequirement, ...] = ()
    sort_by: str = ""

    @property
    def is_one(self) -> bool:
        """Whether one object is asked for by its name."""
        return len(self.targets) == 1 and len(self.targets[0].names) == 1

    @property
    def has_several_kinds(self) -> bool:
        return len(self.targets) > 1


class Group(NamedTuple):
    """The objects of one kind."""

    kind: Kind
    trees: tuple[Tree, ...]


class Seen(NamedTuple):
    """What was found."""

    groups: tuple[Group, ...]
    missing: tuple[str, ...]
    """What is said of names that nobody has."""
    moment: Moment

    @property
    def trees(self) -> list[Tree]:
        return [tree for group in self.groups for tree in group.trees]


def parse(what: tuple[str, ...], options: dict[str, Any]) -> Asked:
    """Return what the words and flags say.

    Raises:
        click.UsageError: they contradict each other, or mean nothing.
        FleetctlError: a selector is none, or a file cannot be read.

    """
    labels, fields = options["selector"], options["field_selector"]
    targets = _targets(what, options)
    if any(target.names for target in targets) and (labels or fields):
        flag = "-l" if labels else "--field-selector"
        raise click.UsageError(f"name objects, or select them with {flag}, not both")
    if labels and any(target.kind is API_KEYS for target in targets):
        raise click.UsageError("API keys have no labels; name those that you mean")
    return Asked(
        targets=targets,
        labels=selector.parse(labels),
        fields=selector.parse_fields(fields),
        sort_by=options["sort_by"],
    )


def _targets(what: tuple[str, ...], options: dict[str, Any]) -> tuple[Target, ...]:
    """Return what the words mean, or what is in the files."""
    files, recursive = options["files"], options["recursive"]
    if not files:
        if recursive:
            raise click.UsageError("-R is about the folders that -f names; give -f as well")
        if not what:
            raise click.UsageError("say what to show: KIND, KIND NAME..., KIND/NAME... or -f FILE")
        return targets_of(what)
    if what or options["selector"] or options["field_selector"]:
        raise click.UsageError("name or select objects, or give their files with -f, not both")
    from fleetctl import infiles  # noqa: PLC0415 - with it come the models and YAML

    return infiles.targets_of(files, recursive=recursive)


async def look(store: Reads, clock: Clock, asked: Asked) -> Seen:
    """Return what the store has of it.

    Raises:
        FleetctlError: no object can be sorted by that field, or it is none that can be selected by.
        StoreError: no answer; UndecodableError: it holds what is no document.

    """
    groups, missing = [], []
    every: list[Tree] = []
    for target in asked.targets:
        found, unknown = await _of_kind(store, target)
        found = [labelled(tree) for tree in found]
        groups.append(Group(kind=target.kind, trees=_chosen(found, asked)))
        every += found
        missing += unknown
    _refuse_unknown_fields(every, asked)
    has_nodes = any(target.kind.name == "Node" for target in asked.targets)
    ready = await documents.ready_nodes(store) if has_nodes else frozenset[str]()
    moment = Moment(now=clock.now(), ready_nodes=ready)
    return Seen(groups=_sorted(groups, asked), missing=tuple(missing), moment=moment)


def _chosen(found: Sequence[Tree], asked: Asked) -> tuple[Tree, ...]:
    chosen = selector.select(found, asked.labels)
    return tuple(tree for tree in chosen if all(part.holds(tree) for part in asked.fields))


def _refuse_unknown_fields(trees: Sequence[Tree], asked: Asked) -> None:
    """Refuse a field that no kind has: nothing would be found, and nobody would know why."""
    for field in asked.fields:
        if not any(field.is_there(tree) for tree in trees):
            from fleetctl import selectable  # noqa: PLC0415 - with it come the models

            selectable.refuse_unknown(field.path, [target.kind for target in asked.targets])


def _sorted(groups: Sequence[Group], asked: Asked) -> tuple[Group, ...]:
    if not asked.sort_by:
        return tuple(groups)
    from fleetctl import sorting  # noqa: PLC0415 - with it comes all of JSONPath

    return tuple(
        Group(kind=group.kind, trees=tuple(sorting.sort(group.trees, asked.sort_by)))
        for group in groups
    )


async def _of_kind(store: Reads, target: Target) -> tuple[list[Tree], list[str]]:
    """Return the objects, and what is said of names that nobody has."""
    kind, names = target.kind, tuple(dict.fromkeys(target.names))
    if not names:
        return await documents.list_all(store, kind.name), []
    if len(names) <= _FEW:
        some = [await documents.get(store, kind.name, name) for name in names]
        there = [tree for tree in some if tree is not None]
        if len(there) == len(names):
            return there, []
    by_name = {documents.name_of(tree): tree for tree in await documents.list_all(store, kind.name)}
    missing = [not_found(kind, name, by_name) for name in names if name not in by_name]
    return [by_name[name] for name in names if name in by_name], missing
