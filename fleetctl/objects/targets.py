"""Which objects a verb is about (names, -l or --all), and changing one of them by compare-and-swap.

`-f` of verbs that only look: which objects the manifests name. Imports every model there is.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader, selectors
from fleetctl.objects.kind_args import WRITABLE, Target, kind_of
from machinery.clock import Clock
from manifests import ownership
from manifests.errors import ManifestErrors
from manifests.load import load_objects
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject, ObjectMeta
from schemas.node import Node
from store import codec, errors
from store.errors import ConflictError, UnavailableError
from store.mutate import mutate
from store.port import ModRevisionGuard, Transport

Obj = TypeVar("Obj", bound=ApiObject)
Edit = Callable[[Obj], Obj | None]

# Whoever writes a node's spec first beside us is the reconciler, and it does so once.
_ATTEMPTS = 3

selector_option = click.option(
    "-l", "--selector", default="", help="All objects with these labels: k=v,k!=v,k,!k."
)
files_option = click.option(
    "-f", "--filename", "files", multiple=True, help="The objects that are in these manifests."
)
version_option = click.option(
    "--resource-version", help="Refuse, unless this is the object's resourceVersion."
)
manager_option = click.option(
    "--field-manager",
    "manager",
    default="fleetctl",
    show_default=True,
    help="As whose the fields are recorded.",
)
recursive_option = click.option(
    "-R", "--recursive", is_flag=True, help="Folders with all below them."
)
all_option = click.option("--all", "is_all", is_flag=True, help="All objects of the kind.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Objects of a kind: by name, by their labels, or all of them."""

    kind: Kind
    names: tuple[str, ...]
    selector: tuple[selectors.LabelRequirement, ...]


def selection(
    kind: Kind, names: Sequence[str], *, labels: str = "", is_all: bool | None = False
) -> Selection:
    """Return what the flags say; `is_all` is None for verbs that have no --all.

    Raises:
        click.UsageError: they say nothing, or two things.
        FleetctlError: the selector is none.

    """
    ways = [bool(names), bool(labels), bool(is_all)]
    several = "-l" if is_all is None else "-l or --all"
    if sum(ways) > 1:
        raise click.UsageError(
            f"name {kind.plural}, or choose them with {several}: only one of these"
        )
    if not any(ways):
        raise click.UsageError(f"which {kind.plural}? Name them, or choose them with {several}")
    return Selection(
        kind=kind, names=tuple(dict.fromkeys(names)), selector=selectors.parse_labels(labels)
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
    """Return what `KIND NAME...`, `KIND/NAME...`, `KIND,KIND -l ...` or `-f FILE` mean.

    Of `options` it reads files, recursive and selector. `verb` says in errors what cannot be done to objects that
    the fleet writes; with `is_read` they are taken as well. `among` are the kinds that a refusal speaks of, if they
    are others.

    Raises:
        click.UsageError: they say nothing, or two things.
        FleetctlError: the kind is written by the fleet, or a file cannot be read.

    """
    labels: str = options["selector"]
    if options["files"]:
        if words or labels or is_all:
            raise click.UsageError("name objects, or the files that hold them with -f, not both")
        return _selections_in_files(options["files"], verb=verb, recursive=options["recursive"])
    if options.get("recursive"):
        raise click.UsageError("-R is about the folders that -f names; give -f as well")
    if not words:
        raise click.UsageError("say which objects: KIND NAME..., KIND/NAME... or -f FILE")
    among = among or (kinds.KINDS if is_read else WRITABLE)
    found: dict[str, list[str]] = {}
    if any("/" in word for word in words):
        for word in words:
            kind, slash, name = word.partition("/")
            if not slash or not name:
                raise click.UsageError("write KIND NAME NAME..., or KIND/NAME KIND/NAME...")
            found.setdefault(kind_of(kind, among).name, []).append(name)
    else:
        for part in words[0].split(","):
            found.setdefault(kind_of(part, among).name, []).extend(words[1:])
    return [
        selection(
            kind_of(kind) if is_read else _writable_kind(kind, verb),
            names,
            labels=labels,
            is_all=is_all,
        )
        for kind, names in found.items()
    ]


def _selections_in_files(files: Sequence[str], *, verb: str, recursive: bool) -> list[Selection]:
    found: dict[str, list[str]] = {}
    try:
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was changed:\n{error}") from error
    for item in loaded:
        found.setdefault(item.obj.kind, []).append(item.obj.name)
    return [selection(_writable_kind(kind, verb), names) for kind, names in found.items()]


def _writable_kind(word: str, verb: str) -> Kind:
    kind = kind_of(word)
    if not kind.written_by_users:
        known = ", ".join(kind.plural for kind in WRITABLE)
        raise FleetctlError(f"{kind.plural} are written by the fleet; {verb} one of {known}")
    return kind


def parse_node_names(words: Sequence[str]) -> list[str]:
    """Return the names in `mac-1 node/mac-2`.

    Raises:
        click.UsageError: one of them is no node.

    """
    found = []
    for word in words:
        before, slash, name = word.partition("/")
        if slash and kind_of(before).name != "Node":
            raise click.UsageError(f"{word} is no node; write NODE or node/NODE")
        found.append(name if slash else word)
    return found


async def read_selected(transport: Transport, choice: Selection) -> list[ApiObject]:
    """Return the objects; says so when a selector found none.

    Raises:
        FleetctlError: there is no object of that name; with the nearest.

    """
    found = await reader.read(transport, choice.kind, choice.names)
    found = selectors.select(found, choice.selector)
    if not found:
        click.echo(f"no {choice.kind.plural} found", err=True)
    return found


async def read_all_selected(transport: Transport, choices: Sequence[Selection]) -> list[ApiObject]:
    """Return the objects of several choices, in their order; `chosen` has the errors."""
    return [obj for one in choices for obj in await read_selected(transport, one)]


async def read_nodes(transport: Transport, choice: Selection) -> list[Node]:
    """Return the nodes; `chosen` has the errors."""
    return cast("list[Node]", await read_selected(transport, choice))


def refuse_several_versions(found: Sequence[ApiObject], version: str | None) -> None:
    """Refuse one resourceVersion for several objects: each has its own.

    Raises:
        click.UsageError: there are several.

    """
    if version is not None and len(found) > 1:
        raise click.UsageError("--resource-version is that of one object; name one")


def refuse_other_version(obj: ApiObject, version: str | None) -> None:
    """Refuse an object that is not as the user saw it.

    Raises:
        FleetctlError: it has another resourceVersion.

    """
    now = obj.metadata.resource_version
    if version is not None and now != version:
        raise FleetctlError(
            f"{object_ref(obj)} was changed: its resourceVersion is {now or 'none'}, not {version}. "
            "Look at it again; nothing was changed"
        )


def object_ref(obj: ApiObject) -> str:
    """Return `node/mac-1`."""
    return f"{obj.kind.lower()}/{obj.name}"


def with_spec(obj: Obj, **fields: Any) -> Obj | None:
    """Return the object with these fields of its spec, a generation later; None if it has them. Pure."""
    spec = getattr(obj, "spec")  # noqa: B009 - each kind narrows it, so mypy sees no such field in the base
    wanted = spec.model_copy(update=fields)
    if wanted == spec:
        return None
    metadata = obj.metadata.model_copy(update={"generation": obj.metadata.generation + 1})
    return obj.model_copy(update={"metadata": metadata, "spec": wanted})


async def apply_edit(
    transport: Transport, clock: Clock, obj: Obj, edit: Edit[Obj], *, manager: str
) -> bool:
    """Change an object in the store; return whether there was anything to change. `write` has the rest."""
    return (await write_edit(transport, clock, obj, edit, manager=manager)).is_news


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Generic[Obj]):
    """What became of an object."""

    obj: Obj
    """As it is in the store now; of a dry run, as it would be."""
    is_news: bool
    """Whether there was anything to change."""


async def write_edit(
    transport: Transport,
    clock: Clock,
    obj: Obj,
    edit: Edit[Obj],
    *,
    manager: str | None,
    is_dry: bool = False,
) -> WriteResult[Obj]:
    """Change an object in the store, and note there that `manager` did; None: `edit` notes it itself.

    `edit` (pure) gets the object as it is then and returns what it should be, None if it is that already. A node
    that only its agent has spoken of yet gets its spec with it.

    Raises:
        FleetctlError: it is gone; or what `edit` refuses.
        StoreError: as store.mutate.mutate.

    """
    note = _TrackedEdit(edit, manager, clock)
    if is_dry:
        wanted = note(obj)
        return WriteResult(obj=wanted or obj, is_news=wanted is not None)
    for _ in range(_ATTEMPTS):
        try:
            there = await mutate(transport, clock, type(obj), obj.name, note)
        except errors.NotFoundError:
            if not await _create_node_spec(transport, clock, obj, note):
                continue
            there = note.made or obj
        return WriteResult(obj=_with_status_of(obj, there), is_news=note.made is not None)
    raise ConflictError(f"{object_ref(obj)} comes and goes")


class _TrackedEdit(Generic[Obj]):
    """An edit that notes whose it is, and knows its own work."""

    def __init__(self, edit: Edit[Obj], manager: str | None, clock: Clock) -> None:
        self.made: Obj | None = None
        self._edit = edit
        self._manager = manager
        self._clock = clock

    def __call__(self, now: Obj) -> Obj | None:
        # Tried again after a lost answer, an edit would find its own work done, and refuse to do it twice.
        if self.made is not None and codec.encode_spec(now) == codec.encode_spec(self.made):
            return None
        wanted = self._edit(now)
        if wanted is not None and self._manager is not None:
            wanted = ownership.record_update(now, wanted, self._manager, self._clock.now())
        self.made = wanted or self.made
        return wanted


def _with_status_of(seen: Obj, written: Obj) -> Obj:
    """Return what was written with the status that was seen; specs are written without."""
    if "status" not in type(seen).model_fields:
        return written
    return written.model_copy(update={"status": getattr(seen, "status", None)})


async def _create_node_spec(
    transport: Transport, clock: Clock, obj: ApiObject, edit: Edit[Any]
) -> bool:
    """Write the spec of a node that has none yet, as the reconciler does when a node joins; return whether it was.

    Raises:
        FleetctlError: it is no such node, but gone.

    """
    if not isinstance(obj, Node) or obj.status is None:
        raise FleetctlError(f"{object_ref(obj)} is gone: somebody deleted it") from None
    metadata = ObjectMeta(
        name=obj.name, uid=obj.status.uid, generation=1, creation_timestamp=clock.now()
    )
    wanted: Node | None = edit(Node(metadata=metadata))
    if wanted is None:
        return True
    put = codec.put_spec(wanted)
    try:
        await transport.commit([ModRevisionGuard(key=put.key, mod_revision=0)], [put])
    except ConflictError:
        return False  # the reconciler was faster: change what it wrote
    except UnavailableError as error:
        if not error.ambiguous:
            raise
        return False  # it may be there: look again
    return True


def targets_in_files(files: Sequence[str], *, recursive: bool) -> tuple[Target, ...]:
    """Return the objects that are in the files, by kind, each kind's in their order.

    Raises:
        FleetctlError: a file cannot be read, or there is something wrong in it.

    """
    try:
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(str(error)) from error
    names: dict[str, list[str]] = {}
    for item in loaded:
        names.setdefault(item.obj.kind, []).append(item.obj.name)
    found = [(kinds.by_name(kind), tuple(some)) for kind, some in names.items()]
    return tuple(Target(kind=kind, names=some) for kind, some in found if kind is not None)
