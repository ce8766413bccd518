"""Edits objects of the store as text: notes at its top, three-way merges with other writers' changes, and the write."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as pathlib_Path

from fleetctl.cli.documents import list_tree
from fleetctl.objects import targets, writer
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.patches import apply_merge_patch, create_merge_patch
from fleetctl.objects.results import ResultPrinter
from insight.edits import ObjectEdit
from machinery.clock import Clock
from manifests import ownership, trees
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.trees import ABSENT, Path, Tree, key_of, show_path
from manifests.yaml import parser
from schemas.meta import ApiObject, ObjectKey
from store.port import Transport

_MARK = "#|"

INSTRUCTIONS = (
    'Edit the text below, save, and close the editor. Lines at the top that begin with "#|" are ignored.',
    "An empty or unchanged file cancels the edit. Problems are shown here.",
)


def with_notes(notes: Sequence[str], body: str) -> str:
    """Return the text that the editor opens."""
    return "".join(f"{line}\n" for line in _marked_lines(notes)) + body


def without_notes(notes: Sequence[str], text: str) -> str:
    """Return the user's text, without the notes at its top.

    Only lines that `with_notes` wrote are removed, in their order; comments of the user stay.
    """
    ours, at = _marked_lines(notes), 0
    while True:
        line, newline, rest = text.partition("\n")
        line = line.removesuffix("\r")
        if not line.startswith(_MARK) or line not in ours[at:]:
            return text
        at = ours.index(line, at) + 1
        text = rest
        if not newline:
            return text


def _marked_lines(notes: Sequence[str]) -> list[str]:
    """Return the notes as marked lines, followed by an empty one."""
    lines = [line for note in notes for line in note.splitlines()]
    return [*(f"{_MARK} {line}".rstrip() for line in lines), _MARK] if lines else []


def is_empty(body: str) -> bool:
    """Return whether only comments and document separators are left."""
    lines = (line.strip() for line in body.splitlines())
    return all(not line or line.startswith("#") or line == "---" for line in lines)


def problem_notes(head: str, problems: Sequence[ManifestError]) -> list[str]:
    """Return the notes about problems, with the line numbers of the text below the notes."""
    ordered = sorted(problems, key=lambda problem: (problem.line, problem.column))
    # The number of lines of the notes does not depend on the numbers in them.
    below = len(
        _marked_lines([*INSTRUCTIONS, head, *(str(_at_line(error, 0)) for error in ordered)])
    )
    return [*INSTRUCTIONS, head, *(str(_at_line(error, below)) for error in ordered)]


def _at_line(problem: ManifestError, below: int) -> ManifestError:
    """Return the problem with its line in words, without the name of the temporary file."""
    place = f"line {problem.line + below}" if problem.line else ""
    return replace(problem, source=place, line=0, column=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldConflict:
    """A field that the user and another writer changed to different values; None means removed."""

    path: Path
    ours: Tree
    theirs: Tree

    @property
    def field(self) -> str:
        return show_path(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """The merged tree, and the conflicts."""

    tree: Tree
    conflicts: tuple[FieldConflict, ...] = ()


def merge_changes(base: Tree, ours: Tree, theirs: Tree) -> MergeResult:
    """Return `theirs` with the changes from `base` to `ours`; lists are compared as a whole."""
    mine, other = create_merge_patch(base, ours), create_merge_patch(base, theirs)
    conflicts = tuple(_conflicts((), mine, other, ours, theirs))
    return MergeResult(tree=apply_merge_patch(theirs, mine), conflicts=conflicts)


def acknowledge(base: Tree, conflicts: tuple[FieldConflict, ...]) -> Tree:
    """Return the base with the other writer's values of conflicts: the user has seen them and may overwrite them."""
    for conflict in conflicts:
        base = (
            trees.without(base, conflict.path)
            if conflict.theirs is None
            else trees.with_value(base, conflict.path, conflict.theirs)
        )
    return base


def _child(tree: Tree, key: str) -> Tree:
    child = trees.value_at(tree, (key,))
    return None if child is ABSENT else child


def _conflicts(
    path: Path, mine: Tree, other: Tree, ours: Tree, theirs: Tree
) -> Iterator[FieldConflict]:
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in mine.keys() & other.keys():
            inside = (*path, key)
            yield from _conflicts(
                inside, mine[key], other[key], _child(ours, key), _child(theirs, key)
            )
    elif not trees.is_equal(ours, theirs):
        yield FieldConflict(path=path, ours=ours, theirs=theirs)


class RejectedError(Exception):
    """The saved text cannot be written; the editor opens again with the reasons."""

    def __init__(
        self,
        head: str,
        problems: Sequence[ManifestError],
        merges: Mapping[ObjectKey, MergeResult] | None = None,
    ) -> None:
        super().__init__(head)
        self.head = head
        self.problems = tuple(problems)
        self.merges = merges or {}
        """The objects in which another writer changed the same fields."""


class _ConflictError(Exception):
    """Another writer changed the same field between the check and the write."""

    def __init__(self, now: ApiObject, merge: MergeResult) -> None:
        super().__init__("conflict")
        self.now = now
        self.merge = merge


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSession:
    """The objects that were opened."""

    opened: Mapping[ObjectKey, ApiObject]
    bases: Mapping[ObjectKey, Tree]
    """The version of each object that the user has seen."""

    @classmethod
    def of(cls, objects: Sequence[ApiObject]) -> "EditSession":
        """Return a session in which the user sees the objects."""
        opened = {key_of(obj): obj for obj in objects}
        bases = {key: writer.editable_tree(obj) for key, obj in opened.items()}
        return cls(opened=opened, bases=bases)

    def with_acknowledged(self, merges: Mapping[ObjectKey, MergeResult]) -> "EditSession":
        """Return the session after the user was shown the conflicts, and may overwrite them."""
        bases = {
            key: acknowledge(base, merges[key].conflicts) if key in merges else base
            for key, base in self.bases.items()
        }
        return replace(self, bases=bases)

    def text(self, form: str) -> str:
        """Return the text of the objects for the editor, as yaml or json."""
        trees = list(self.bases.values())
        if form == "json":
            # In ASCII: a raw control character, such as DEL, cannot be read again.
            return json.dumps(trees[0] if len(trees) == 1 else list_tree(trees), indent=2) + "\n"
        return "---\n".join(parser.dump(tree) for tree in trees)

    def read(self, text: str, suffix: str) -> list[LoadedObject]:
        """Return the objects of the saved text: exactly the opened ones.

        Raises:
            RejectedError: the text is invalid, or an object is missing or new.

        """
        loaded_objects = load_text(text, suffix)
        there = {item.key for item in loaded_objects}
        problems = [
            self._unknown_problem(item) for item in loaded_objects if item.key not in self.opened
        ]
        problems.extend(_missing_problem(key) for key in self.opened if key not in there)
        if problems:
            raise RejectedError("nothing was written because of these problems:", problems)
        return loaded_objects

    def _unknown_problem(self, item: LoadedObject) -> ManifestError:
        names = ", ".join(map(str, self.opened))
        return item.document.problem(
            ("metadata", "name"),
            f"is not one of the edited objects ({names})",
            "Kind and name cannot be edited; to create another object: fleetctl create -f FILE",
        )

    def changed(self, found: Sequence[LoadedObject]) -> list[LoadedObject]:
        """Return the objects that the user changed."""
        return [item for item in found if writer.editable_tree(item.obj) != self.bases[item.key]]

    def merged(self, item: LoadedObject, now: ApiObject) -> MergeResult:
        """Return the user's changes of an object, merged into its current version."""
        ours, theirs = writer.editable_tree(item.obj), writer.editable_tree(now)
        return merge_changes(self.bases[item.key], ours, theirs)


def _missing_problem(key: ObjectKey) -> ManifestError:
    return ManifestError(
        source="",
        about=str(key),
        message="was removed from the text, or renamed",
        hint=f"Restore it; to delete the object: fleetctl delete {key.kind.lower()} {key.name}",
    )


def load_text(text: str, suffix: str) -> list[LoadedObject]:
    """Return the objects in a text.

    Raises:
        RejectedError: the text is invalid; the problems have line numbers.

    """
    with tempfile.NamedTemporaryFile("wb", suffix=suffix) as file:
        file.write(text.encode())
        file.flush()
        try:
            return load_objects([str(pathlib_Path(file.name))])
        except ManifestErrors as errors:
            head = "nothing was written because the text is invalid:"
            raise RejectedError(head, errors.problems) from None


async def write_changes(
    transport: Transport,
    clock: Clock,
    session: EditSession,
    found: Sequence[LoadedObject],
    results: ResultPrinter,
) -> None:
    """Write the changed objects; all are checked before the first write.

    Raises:
        RejectedError: the objects are invalid, or another writer changed the same fields.
        FleetctlError: an object is gone.

    """
    changed = session.changed(found)
    now = {item.key: await _read_object(transport, item.key) for item in changed}
    merges = {item.key: session.merged(item, now[item.key]) for item in changed}
    _refuse_conflicts(changed, now, merges)
    try:
        await writer.check_objects(transport, changed)
        for item in changed:
            writer.load_edited(now[item.key], merges[item.key].tree)
    except ManifestErrors as errors:
        head = "nothing was written because of these problems:"
        raise RejectedError(head, errors.problems) from None
    for item in found:
        if item not in changed:
            results.print_object(session.opened[item.key], "skipped")
            continue
        await _write_object(transport, clock, session, item, results)


async def _write_object(
    transport: Transport,
    clock: Clock,
    session: EditSession,
    item: LoadedObject,
    results: ResultPrinter,
) -> None:
    def edit(now: ApiObject) -> ApiObject | None:
        merge = session.merged(item, now)
        if merge.conflicts:
            raise _ConflictError(now, merge)
        return writer.merge_onto(now, writer.load_edited(now, merge.tree))

    change = ObjectEdit(
        edit=edit, manager="fleetctl-edit", done="edited", unchanged="edited (no change)"
    )
    try:
        written = await writer.write_edit(transport, clock, session.opened[item.key], change)
    except _ConflictError as error:
        key = item.key
        _refuse_conflicts([item], {key: error.now}, {key: error.merge})
        raise
    results.print_object(written.obj, change.done if written.is_changed else change.unchanged)


async def _read_object(transport: Transport, key: ObjectKey) -> ApiObject:
    [api_object] = await targets.read_selected(
        transport, targets.selection(kind_of(key.kind), [key.name])
    )
    return api_object


def _refuse_conflicts(
    items: Sequence[LoadedObject],
    now: Mapping[ObjectKey, ApiObject],
    merges: Mapping[ObjectKey, MergeResult],
) -> None:
    problems = [
        item.document.problem(
            conflict.path,
            f"is now {ownership.show_value(conflict.theirs)}, set by {_field_owner(now[item.key], conflict.field)}; "
            f"your value is {ownership.show_value(conflict.ours)}",
            "To overwrite it, delete these lines at the top and save; or use the other value",
        )
        for item in items
        for conflict in merges[item.key].conflicts
    ]
    if problems:
        head = "nothing was written because another writer changed the same fields meanwhile:"
        raise RejectedError(head, problems, merges)


def _field_owner(obj: ApiObject, field: str) -> str:
    entry = ownership.field_owner(obj, field)
    return entry.manager if entry is not None else "another writer"
