"""Objects of the store in the editor: what the user changed of them is written onto what they are by then."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetctl import rewriting, targets
from fleetctl.edit import merging
from fleetctl.edit.merging import Merge
from fleetctl.kinds import kind_of
from fleetctl.results import Results
from machinery.clock import Clock
from manifests import ownership, yamlio
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Loaded, load_objects
from manifests.tree import Tree, key_of
from schemas.meta import ApiObject, ObjectKey
from store.port import Transport

_MANAGER = "fleetctl-edit"


class RejectedError(Exception):
    """What was saved cannot be written; the editor opens again and says why."""

    def __init__(
        self,
        head: str,
        problems: Sequence[ManifestError],
        merges: Mapping[ObjectKey, Merge] | None = None,
    ) -> None:
        super().__init__(head)
        self.head = head
        self.problems = tuple(problems)
        self.merges = merges or {}
        """Where somebody else changed the same fields."""


class _ConflictError(Exception):
    """Somebody changed the same field between the check and the write."""

    def __init__(self, now: ApiObject, merge: Merge) -> None:
        super().__init__("conflict")
        self.now = now
        self.merge = merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The objects that were opened."""

    opened: Mapping[ObjectKey, ApiObject]
    bases: Mapping[ObjectKey, Tree]
    """What the user has seen of each."""

    @classmethod
    def of(cls, objects: Sequence[ApiObject]) -> "Session":
        """Return a session in which the user sees the objects."""
        opened = {key_of(obj): obj for obj in objects}
        bases = {key: rewriting.editable(obj) for key, obj in opened.items()}
        return cls(opened=opened, bases=bases)

    def told(self, merges: Mapping[ObjectKey, Merge]) -> "Session":
        """Return the session in which the user knows what others wrote, and may write over it."""
        bases = {
            key: merging.settled(base, merges[key].conflicts) if key in merges else base
            for key, base in self.bases.items()
        }
        return replace(self, bases=bases)

    def text(self, form: str) -> str:
        """Return what the editor shows first."""
        trees = list(self.bases.values())
        if form == "json":
            whole: Tree = {"apiVersion": "v1", "kind": "List", "items": trees}
            return json.dumps(trees[0] if len(trees) == 1 else whole, indent=2) + "\n"
        return "---\n".join(yamlio.dump(tree) for tree in trees)

    def read(self, text: str, suffix: str) -> list[Loaded]:
        """Return the objects that the user left: those that were opened, and no others.

        Raises:
            RejectedError: it is not valid.

        """
        found = load_text(text, suffix)
        there = {item.key for item in found}
        problems = [self._stranger(item) for item in found if item.key not in self.opened]
        problems.extend(_lost(key) for key in self.opened if key not in there)
        if problems:
            raise RejectedError("nothing was written, for this cannot be done:", problems)
        return found

    def _stranger(self, item: Loaded) -> ManifestError:
        names = ", ".join(map(str, self.opened))
        return item.document.problem(
            ("metadata", "name"),
            f"is none of what is edited ({names})",
            "Kind and name cannot be edited; to make another object: fleetctl create -f FILE",
        )

    def changed(self, found: Sequence[Loaded]) -> list[Loaded]:
        """Return those that are not as the user saw them."""
        return [item for item in found if rewriting.editable(item.obj) != self.bases[item.key]]

    def merged(self, item: Loaded, now: ApiObject) -> Merge:
        """Return what the user changed of an object, on what it is now."""
        ours, theirs = rewriting.editable(item.obj), rewriting.editable(now)
        return merging.merge(self.bases[item.key], ours, theirs)


def _lost(key: ObjectKey) -> ManifestError:
    return ManifestError(
        source="",
        about=str(key),
        message="was taken out of the text, or has another name there",
        hint=f"Put it back as it was; to delete it: fleetctl delete {key.kind.lower()} {key.name}",
    )


def load_text(text: str, suffix: str) -> list[Loaded]:
    """Return the objects in a text.

    Raises:
        RejectedError: it is not valid; with its lines.

    """
    with tempfile.NamedTemporaryFile("wb", suffix=suffix) as file:
        file.write(text.encode())
        file.flush()
        try:
            return load_objects([str(Path(file.name))])
        except ManifestErrors as errors:
            head = "nothing was written, for this is not valid:"
            raise RejectedError(head, errors.problems) from None


async def write(
    transport: Transport, clock: Clock, session: Session, found: Sequence[Loaded], results: Results
) -> None:
    """Write what the user changed; all are checked before one is written.

    Raises:
        RejectedError: it is not valid as things are now, or somebody else changed the same fields.
        FleetctlError: an object is gone.

    """
    changed = session.changed(found)
    now = {item.key: await _read(transport, item.key) for item in changed}
    merges = {item.key: session.merged(item, now[item.key]) for item in changed}
    _refuse_conflicts(changed, now, merges)
    try:
        await rewriting.check(transport, changed)
        for item in changed:
            rewriting.edited(now[item.key], merges[item.key].tree)
    except ManifestErrors as errors:
        head = "nothing was written, for this does not go with what the fleet has:"
        raise RejectedError(head, errors.problems) from None
    for item in found:
        if item not in changed:
            results.say(session.opened[item.key], "skipped")
            continue
        await _write(transport, clock, session, item, results)


async def _write(
    transport: Transport, clock: Clock, session: Session, item: Loaded, results: Results
) -> None:
    def edit(now: ApiObject) -> ApiObject | None:
        merge = session.merged(item, now)
        if merge.conflicts:
            raise _ConflictError(now, merge)
        return rewriting.onto(now, rewriting.edited(now, merge.tree))

    seen = session.opened[item.key]
    try:
        written = await targets.write(transport, clock, seen, edit, manager=_MANAGER)
    except _ConflictError as error:
        key = item.key
        _refuse_conflicts([item], {key: error.now}, {key: error.merge})
        raise
    results.say(written.obj, "edited" if written.is_news else "edited (no change)")


async def _read(transport: Transport, key: ObjectKey) -> ApiObject:
    [found] = await targets.chosen(transport, targets.choice(kind_of(key.kind), [key.name]))
    return found


def _refuse_conflicts(
    items: Sequence[Loaded],
    now: Mapping[ObjectKey, ApiObject],
    merges: Mapping[ObjectKey, Merge],
) -> None:
    problems = [
        item.document.problem(
            one.path,
            f"is {ownership.shown(one.theirs)} by now, set by {_owner(now[item.key], one.field)}; "
            f"here it is {ownership.shown(one.ours)}",
            "To write yours over it, delete these lines at the top and save; or write theirs here",
        )
        for item in items
        for one in merges[item.key].conflicts
    ]
    if problems:
        head = "not written, for somebody else changed the same since this was opened:"
        raise RejectedError(head, problems, merges)


def _owner(obj: ApiObject, field: str) -> str:
    found = ownership.owner_of(obj, field)
    return found.manager if found is not None else "somebody else"
