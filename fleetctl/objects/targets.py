"""Objects that a command line names: by name, by label selector, with --all, or in manifest files."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader, selectors
from fleetctl.objects.kind_args import WRITABLE, Target, kind_of, parse_names
from manifests.errors import ManifestErrors
from manifests.load import load_objects
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject
from schemas.node import Node
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Objects of one kind: by name, by label, or all."""

    kind: Kind
    names: tuple[str, ...]
    requirements: tuple[selectors.LabelRequirement, ...]


def selection(
    kind: Kind, names: Sequence[str], *, labels: str = "", is_all: bool | None = False
) -> Selection:
    """Return the selection of the flags; `is_all` is None for verbs without --all.

    Raises:
        click.UsageError: the flags select nothing, or contradict each other.
        FleetctlError: the label selector is invalid.

    """
    ways = [bool(names), bool(labels), bool(is_all)]
    flags = "-l" if is_all is None else "-l or --all"
    if sum(ways) > 1:
        raise click.UsageError(f"give the names of {kind.plural}, or {flags}, but not both")
    if not any(ways):
        raise click.UsageError(f"which {kind.plural}? Give their names, or {flags}")
    return Selection(
        kind=kind,
        names=tuple(dict.fromkeys(names)),
        requirements=selectors.parse_labels(labels),
    )


def parse_selections(
    words: Sequence[str],
    options: Mapping[str, Any],
    *,
    verb: str,
    is_all: bool | None = False,
    is_read: bool = False,
    among: Sequence[Kind] | None = None,
) -> list[Selection]:
    """Return the selections of `KIND NAME...`, `KIND/NAME...`, `KIND,KIND -l ...` or `-f FILE`.

    Reads files, recursive and selector of `options`. `verb` names the action in errors about kinds that the fleet
    writes; with `is_read` these kinds are accepted. `among` replaces the kinds that errors list.

    Raises:
        click.UsageError: the words and flags select nothing, or contradict each other.
        FleetctlError: the fleet writes the kind, or a file cannot be read.

    """
    labels: str = options["selector"]
    if options["files"]:
        if words or labels or is_all:
            raise click.UsageError("give names, or files with -f, but not both")
        head, recursive = "nothing was changed:\n", options["recursive"]
        targets = targets_in_files(options["files"], recursive=recursive, head=head)
        return [selection(_writable_kind(kind.name, verb), names) for kind, names in targets]
    if options.get("recursive"):
        raise click.UsageError("-R applies to the folders of -f; give -f as well")
    if not words:
        raise click.UsageError("which objects? Give KIND NAME..., KIND/NAME... or -f FILE")
    among = among or (kinds.KINDS if is_read else WRITABLE)
    return [
        selection(
            kind_of(kind) if is_read else _writable_kind(kind, verb),
            names,
            labels=labels,
            is_all=is_all,
        )
        for kind, names in _names_by_kind(words, among).items()
    ]


def _names_by_kind(words: Sequence[str], among: Sequence[Kind]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    if any("/" in word for word in words):
        for word in words:
            kind, slash, name = word.partition("/")
            if not slash or not name:
                raise click.UsageError("write KIND NAME NAME..., or KIND/NAME KIND/NAME...")
            names.setdefault(kind_of(kind, among).name, []).append(name)
    else:
        for part in words[0].split(","):
            kind_found = kind_of(part, among, may_be_name=[part] == [*words])
            names.setdefault(kind_found.name, []).extend(words[1:])
    return names


def _writable_kind(word: str, verb: str) -> Kind:
    kind = kind_of(word)
    if not kind.written_by_users:
        known = ", ".join(kind.plural for kind in WRITABLE)
        raise FleetctlError(f"{kind.plural} are written by the fleet; {verb} one of {known}")
    return kind


def targets_in_files(
    files: Sequence[str], *, recursive: bool, head: str = ""
) -> tuple[Target, ...]:
    """Return the objects in manifest files by kind, each kind's in the order of the files. `head` begins errors.

    Raises:
        FleetctlError: a file cannot be read, or is invalid.

    """
    try:
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(f"{head}{error}") from error
    names: dict[str, list[str]] = {}
    for item in loaded:
        names.setdefault(item.obj.kind, []).append(item.obj.name)
    return tuple(Target(kind=kind_of(kind), names=tuple(some)) for kind, some in names.items())


def parse_node_names(words: Sequence[str]) -> list[str]:
    """Return the names in `mac-1 node/mac-2` or `node mac-1`. Raises as `kind_args.parse_names`."""
    return parse_names(words, kind_of("nodes")) if words else []


async def read_selected(transport: Transport, chosen: Selection) -> list[ApiObject]:
    """Return the selected objects; print a note if a label selector matches none.

    Raises:
        FleetctlError: an object does not exist; the message has the nearest name.

    """
    selected = await reader.read(transport, chosen.kind, chosen.names)
    selected = selectors.select(selected, chosen.requirements)
    if not selected:
        click.echo(f"no {chosen.kind.plural} found", err=True)
    return selected


async def read_all_selected(transport: Transport, chosen: Sequence[Selection]) -> list[ApiObject]:
    """Return the objects of several selections in their order. Raises as `read_selected`."""
    return [obj for one in chosen for obj in await read_selected(transport, one)]


async def read_node(transport: Transport, word: str) -> Node:
    """Return the node that `mac-1` or `node/mac-1` names. Raises as `read_selected`."""
    names = parse_node_names((word,))
    [node] = await read_nodes(transport, selection(kind_of("nodes"), names, is_all=None))
    return node


async def read_nodes(transport: Transport, chosen: Selection) -> list[Node]:
    """Return the selected nodes. Raises as `read_selected`."""
    return cast("list[Node]", await read_selected(transport, chosen))


def object_ref(obj: ApiObject) -> str:
    """Return `node/mac-1`."""
    return f"{obj.kind.lower()}/{obj.name}"
