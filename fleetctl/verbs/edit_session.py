"""The text that an editor opens: notes of ours on top, which go again, and the user's own text, kept to the byte. Pure.

What a user changed of an object, put onto what it is by now. Pure; an object is a tree of what a user may change.

Objects of the store in the editor: what the user changed of them is written onto what they are by then.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as pathlib_Path

from fleetctl.objects import targets, writer
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.patches import apply_merge_patch, create_merge_patch, is_equal_json
from fleetctl.output.results import ResultPrinter
from machinery.clock import Clock
from manifests import ownership
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.trees import Path, Tree, key_of, show_path
from manifests.yaml import parser
from schemas.meta import ApiObject, ObjectKey
from store.port import Transport

_MARK = "#|"

INSTRUCTIONS = (
    'Edit below, save, and leave the editor. Lines that begin with "#|" at the top are not part of it.',
    "An empty file ends the edit, and so does leaving it as it is. What is wrong is told here.",
)


def with_notes(notes: Sequence[str], body: str) -> str:
    """Return the text to open."""
    return "".join(f"{line}\n" for line in _marked_lines(notes)) + body


def without_notes(notes: Sequence[str], text: str) -> str:
    """Return what the user wrote: the text without those of our notes that are left at its top.

    Only lines that we wrote go, in their order: a comment of the user's stays, whatever it begins with.
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
    """Return the notes as lines of the text, an empty one last."""
    lines = [line for note in notes for line in note.splitlines()]
    return [*(f"{_MARK} {line}".rstrip() for line in lines), _MARK] if lines else []


def is_empty(body: str) -> bool:
    """Return whether nothing was left but comments and marks of documents."""
    lines = (line.strip() for line in body.splitlines())
    return all(not line or line.startswith("#") or line == "---" for line in lines)


def problem_notes(head: str, problems: Sequence[ManifestError]) -> list[str]:
    """Return the notes that say what is wrong, at the lines that it has below these very notes."""
    ordered = sorted(problems, key=lambda one: (one.line, one.column))
    # How many lines notes take does not depend on the numbers in them.
    below = len(_marked_lines([*INSTRUCTIONS, head, *(str(_at_line(one, 0)) for one in ordered)]))
    return [*INSTRUCTIONS, head, *(str(_at_line(one, below)) for one in ordered)]


def _at_line(problem: ManifestError, below: int) -> ManifestError:
    """Return the problem with its place in words: the file is of no interest to who has it open."""
    place = f"line {problem.line + below}" if problem.line else ""
    return replace(problem, source=place, line=0, column=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldConflict:
    """A field that the user and somebody else changed, to different values; None: it was taken away."""

    path: Path
    ours: Tree
    theirs: Tree

    @property
    def field(self) -> str:
        return show_path(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What comes of both changes."""

    tree: Tree
    conflicts: tuple[FieldConflict, ...] = ()


def merge_changes(base: Tree, ours: Tree, theirs: Tree) -> MergeResult:
    """Return `theirs` with what was changed between `base` and `ours`; lists are compared whole."""
    mine, other = create_merge_patch(base, ours), create_merge_patch(base, theirs)
    conflicts = tuple(_conflicts((), mine, other, ours, theirs))
    return MergeResult(tree=apply_merge_patch(theirs, mine), conflicts=conflicts)


def acknowledge(base: Tree, conflicts: tuple[FieldConflict, ...]) -> Tree:
    """Return the base as it is once the user was told: what others wrote there is known, and may be written over."""
    for one in conflicts:
        base = _with_value(base, one.path, one.theirs)
    return base


def _conflicts(
    path: Path, mine: Tree, other: Tree, ours: Tree, theirs: Tree
) -> Iterator[FieldConflict]:
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in mine.keys() & other.keys():
            inside = (*path, key)
            yield from _conflicts(
                inside, mine[key], other[key], _child(ours, key), _child(theirs, key)
            )
    elif not is_equal_json(ours, theirs):
        yield FieldConflict(path=path, ours=ours, theirs=theirs)


def _child(tree: Tree, key: str) -> Tree:
    return tree.get(key) if isinstance(tree, dict) else None


def _with_value(tree: Tree, path: Path, value: Tree) -> Tree:
    """Return the tree with the value at the path; None takes away what is there."""
    if not path:
        return value
    found = dict(tree) if isinstance(tree, dict) else {}
    key = str(path[0])
    inner = _with_value(found.get(key), path[1:], value)
    if inner is None:
        found.pop(key, None)
        return found
    return {**found, key: inner}


_MANAGER = "fleetctl-edit"


class RejectedError(Exception):
    """What was saved cannot be written; the editor opens again and says why."""

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
        """Where somebody else changed the same fields."""


class _ConflictError(Exception):
    """Somebody changed the same field between the check and the write."""

    def __init__(self, now: ApiObject, merge: MergeResult) -> None:
        super().__init__("conflict")
        self.now = now
        self.merge = merge


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSession:
    """The objects that were opened."""

    opened: Mapping[ObjectKey, ApiObject]
    bases: Mapping[ObjectKey, Tree]
    """What the user has seen of each."""

    @classmethod
    def of(cls, objects: Sequence[ApiObject]) -> "EditSession":
        """Return a session in which the user sees the objects."""
        opened = {key_of(obj): obj for obj in objects}
        bases = {key: writer.editable_tree(obj) for key, obj in opened.items()}
        return cls(opened=opened, bases=bases)

    def told(self, merges: Mapping[ObjectKey, MergeResult]) -> "EditSession":
        """Return the session in which the user knows what others wrote, and may write over it."""
        bases = {
            key: acknowledge(base, merges[key].conflicts) if key in merges else base
            for key, base in self.bases.items()
        }
        return replace(self, bases=bases)

    def text(self, form: str) -> str:
        """Return what the editor shows first."""
        trees = list(self.bases.values())
        if form == "json":
            whole: Tree = {"apiVersion": "v1", "kind": "List", "items": trees}
            return json.dumps(trees[0] if len(trees) == 1 else whole, indent=2) + "\n"
        return "---\n".join(parser.dump(tree) for tree in trees)

    def read(self, text: str, suffix: str) -> list[LoadedObject]:
        """Return the objects that the user left: those that were opened, and no others.

        Raises:
            RejectedError: it is not valid.

        """
        found = load_text(text, suffix)
        there = {item.key for item in found}
        problems = [self._stranger(item) for item in found if item.key not in self.opened]
        problems.extend(_missing_problem(key) for key in self.opened if key not in there)
        if problems:
            raise RejectedError("nothing was written, for this cannot be done:", problems)
        return found

    def _stranger(self, item: LoadedObject) -> ManifestError:
        names = ", ".join(map(str, self.opened))
        return item.document.problem(
            ("metadata", "name"),
            f"is none of what is edited ({names})",
            "Kind and name cannot be edited; to make another object: fleetctl create -f FILE",
        )

    def changed(self, found: Sequence[LoadedObject]) -> list[LoadedObject]:
        """Return those that are not as the user saw them."""
        return [item for item in found if writer.editable_tree(item.obj) != self.bases[item.key]]

    def merged(self, item: LoadedObject, now: ApiObject) -> MergeResult:
        """Return what the user changed of an object, on what it is now."""
        ours, theirs = writer.editable_tree(item.obj), writer.editable_tree(now)
        return merge_changes(self.bases[item.key], ours, theirs)


def _missing_problem(key: ObjectKey) -> ManifestError:
    return ManifestError(
        source="",
        about=str(key),
        message="was taken out of the text, or has another name there",
        hint=f"Put it back as it was; to delete it: fleetctl delete {key.kind.lower()} {key.name}",
    )


def load_text(text: str, suffix: str) -> list[LoadedObject]:
    """Return the objects in a text.

    Raises:
        RejectedError: it is not valid; with its lines.

    """
    with tempfile.NamedTemporaryFile("wb", suffix=suffix) as file:
        file.write(text.encode())
        file.flush()
        try:
            return load_objects([str(pathlib_Path(file.name))])
        except ManifestErrors as errors:
            head = "nothing was written, for this is not valid:"
            raise RejectedError(head, errors.problems) from None


async def write_changes(
    transport: Transport,
    clock: Clock,
    session: EditSession,
    found: Sequence[LoadedObject],
    results: ResultPrinter,
) -> None:
    """Write what the user changed; all are checked before one is written.

    Raises:
        RejectedError: it is not valid as things are now, or somebody else changed the same fields.
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
        head = "nothing was written, for this does not go with what the fleet has:"
        raise RejectedError(head, errors.problems) from None
    for item in found:
        if item not in changed:
            results.say(session.opened[item.key], "skipped")
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

    seen = session.opened[item.key]
    try:
        written = await targets.write_edit(transport, clock, seen, edit, manager=_MANAGER)
    except _ConflictError as error:
        key = item.key
        _refuse_conflicts([item], {key: error.now}, {key: error.merge})
        raise
    results.say(written.obj, "edited" if written.is_news else "edited (no change)")


async def _read_object(transport: Transport, key: ObjectKey) -> ApiObject:
    [found] = await targets.read_selected(
        transport, targets.selection(kind_of(key.kind), [key.name])
    )
    return found


def _refuse_conflicts(
    items: Sequence[LoadedObject],
    now: Mapping[ObjectKey, ApiObject],
    merges: Mapping[ObjectKey, MergeResult],
) -> None:
    problems = [
        item.document.problem(
            one.path,
            f"is {ownership.show_value(one.theirs)} by now, set by {_field_owner(now[item.key], one.field)}; "
            f"here it is {ownership.show_value(one.ours)}",
            "To write yours over it, delete these lines at the top and save; or write theirs here",
        )
        for item in items
        for one in merges[item.key].conflicts
    ]
    if problems:
        head = "not written, for somebody else changed the same since this was opened:"
        raise RejectedError(head, problems, merges)


def _field_owner(obj: ApiObject, field: str) -> str:
    found = ownership.field_owner(obj, field)
    return found.manager if found is not None else "somebody else"
