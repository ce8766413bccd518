"""Three-way merge of trees, field by field: what was said last, what is said now, what is there. Pure; knows no kind.

Mappings are merged by their keys, lists are taken whole. See docs/adr/0028-three-way-apply.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Final, Literal, TypeAlias

from manifests.trees import Path, Tree, show_path

# Longer texts are remembered by their hash: a base is compared only, and must not double an annotation's size.
_LONG = 256


class AbsentType(Enum):
    """Says that a field is not there; None would be a value that a manifest may say."""

    UNSAID = 0


ABSENT: Final = AbsentType.UNSAID
OptionalTree: TypeAlias = Tree | Literal[AbsentType.UNSAID]
Force: TypeAlias = bool | Literal["drift"]
"""Who wins where others wrote the same fields: False, they do; True, the manifest; "drift", the manifest, but for what
another manifest says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherManagers:
    """Who says what besides the manifest that is merged."""

    updates: Mapping[str, str] = field(default_factory=dict)
    """Fields that others wrote last, as `spec.replicas`, to who they are."""
    mine: frozenset[str] = frozenset()
    """Fields that this manager itself wrote last, other than by a manifest."""
    rivals: Mapping[str, Tree] = field(default_factory=dict)
    """What the manifests of others said, by who they are."""
    force: Force = False

    def by(self, path: Path) -> str:
        """Return who else wrote the field, or something in it, last; empty if nobody is known to."""
        if not self.updates:
            return ""
        shown = show_path(path)
        exact = self.updates.get(shown)
        return exact if exact is not None else self.beneath(shown)

    def beneath(self, shown: str) -> str:
        """Return who else wrote something in the mapping; empty if nobody is known to."""
        inside = (f"{shown}.", f"{shown}[")
        return next((who for key, who in self.updates.items() if key.startswith(inside)), "")

    def rival(self, path: Path, ours: OptionalTree) -> str:
        """Return whose manifest says something else of the field; empty if nobody's does."""
        for who, tree in self.rivals.items():
            said = value_at(tree, path)
            if said is not ABSENT and (ours is ABSENT or not matches(said, ours)):
                return who
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDisagreement:
    """A field of which the manifest and the store say different things, because somebody else wrote it."""

    path: Path
    owner: str
    """Who wrote it; empty if that was not recorded."""
    theirs: Tree
    """What is in the store; None if it is not set."""
    ours: Tree
    """What the manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What the three make together."""

    tree: Mapping[str, Tree]
    kept: tuple[FieldDisagreement, ...]
    """What stays as others set it: the manifest says what it said before."""
    conflicts: tuple[FieldDisagreement, ...]
    """What both have changed, to different values."""
    taken: tuple[Path, ...]
    """What the manifest changes or takes away."""
    removed: tuple[Path, ...]
    """What it takes away."""
    unsaid: tuple[Path, ...]
    """What nobody says: defaults as they were when the object was written."""


def merge(
    base: Mapping[str, Tree],
    ours: Mapping[str, Tree],
    theirs: Mapping[str, Tree],
    claims: OtherManagers,
) -> MergeResult:
    """Return what becomes of `theirs`; `base` and `ours` hold only what is said."""
    run = _Merge(claims)
    tree = run.mapping((), base, ours, theirs)
    return MergeResult(
        tree=tree,
        kept=tuple(run.kept),
        conflicts=tuple(run.conflicts),
        taken=tuple(run.taken),
        removed=tuple(run.removed),
        unsaid=tuple(run.unsaid),
    )


class _Merge:
    """One merge on its way."""

    def __init__(self, claims: OtherManagers) -> None:
        self.kept: list[FieldDisagreement] = []
        self.conflicts: list[FieldDisagreement] = []
        self.taken: list[Path] = []
        self.removed: list[Path] = []
        self.unsaid: list[Path] = []
        self._claims = claims

    def mapping(
        self,
        path: Path,
        base: Mapping[str, Tree],
        ours: Mapping[str, Tree],
        theirs: Mapping[str, Tree],
    ) -> dict[str, Tree]:
        """Return the mapping, in the order of what is there."""
        merged: dict[str, Tree] = {}
        for key in dict.fromkeys((*theirs, *base, *ours)):
            three = base.get(key, ABSENT), ours.get(key, ABSENT), theirs.get(key)
            value = self._value((*path, key), *three)
            if value is not ABSENT and (value is not None or three[1] is None):
                merged[key] = value
        return merged

    def _value(
        self, path: Path, base: OptionalTree, ours: OptionalTree, theirs: Tree
    ) -> OptionalTree:
        if not isinstance(theirs, dict):
            return self._leaf(path, base, ours, theirs)
        if isinstance(ours, dict) and (base is ABSENT or isinstance(base, dict)):
            return self.mapping(path, {} if base is ABSENT else base, ours, theirs)
        if ours is ABSENT and isinstance(base, dict):
            is_ours_alone = not self._claims.by(path) and not self._claims.rival(path, ABSENT)
            if is_ours_alone and matches(base, theirs):
                return self._removal(path)
            return self.mapping(path, base, {}, theirs)
        return self._leaf(path, base, ours, theirs)

    def _leaf(
        self, path: Path, base: OptionalTree, ours: OptionalTree, theirs: Tree
    ) -> OptionalTree:
        if ours is ABSENT:
            return self._unsaid(path, base, theirs)
        if matches(ours, theirs):
            return theirs
        found = FieldDisagreement(path=path, owner=self._claims.by(path), theirs=theirs, ours=ours)
        rival = self._claims.rival(path, ours)
        if self._claims.force is True:
            return self._take(path, ours)
        if rival:
            owner = found.owner or rival
            self.conflicts.append(
                FieldDisagreement(path=path, owner=owner, theirs=theirs, ours=ours)
            )
            return theirs
        if not self._is_changed(path, base, theirs) or self._claims.force == "drift":
            return self._take(path, ours)
        is_said_before = base is not ABSENT and base == abbreviate(ours)
        (self.kept if is_said_before else self.conflicts).append(found)
        return theirs

    def _is_changed(self, path: Path, base: OptionalTree, theirs: Tree) -> bool:
        """Return whether somebody else changed the field since the manifest was applied last."""
        if base is ABSENT:
            return bool(self._claims.by(path))
        if matches(base, theirs):
            return isinstance(theirs, dict) and bool(self._claims.beneath(show_path(path)))
        return show_path(path) not in self._claims.mine

    def _unsaid(self, path: Path, base: OptionalTree, theirs: Tree) -> OptionalTree:
        """Return what becomes of a field that the manifest does not say (any more)."""
        owned = bool(self._claims.by(path) or self._claims.rival(path, ABSENT))
        if base is ABSENT:
            self.unsaid.extend([] if owned else [path])
            return theirs
        if owned or self._is_changed(path, base, theirs):
            return theirs
        return self._removal(path)

    def _take(self, path: Path, ours: Tree) -> Tree:
        self.taken.append(path)
        return ours

    def _removal(self, path: Path) -> Literal[AbsentType.UNSAID]:
        self.taken.append(path)
        self.removed.append(path)
        return ABSENT


def matches(said: Tree, there: Tree) -> bool:
    """Return whether what is there is as it is said; of a mapping, what is not said may be anything."""
    if isinstance(said, dict):
        return isinstance(there, dict) and all(
            matches(value, there.get(key)) for key, value in said.items()
        )
    return said == there or (isinstance(there, str) and said == abbreviate(there))


def abbreviate(tree: Tree) -> Tree:
    """Return the tree as a base is kept: long texts by their hash."""
    if isinstance(tree, dict):
        return {key: abbreviate(value) for key, value in tree.items()}
    if isinstance(tree, str) and len(tree) > _LONG:
        return f"sha256:{sha256(tree.encode()).hexdigest()}"
    return tree


def value_at(tree: Tree, path: Path) -> OptionalTree:
    """Return what is at the path; mappings only."""
    found: Tree = tree
    for part in path:
        if not isinstance(found, dict) or not isinstance(part, str) or part not in found:
            return ABSENT
        found = found[part]
    return found


def without(tree: Mapping[str, Tree], path: Path) -> dict[str, Tree]:
    """Return the tree without what is at the path."""
    first, *rest = path
    assert isinstance(first, str)
    below = tree.get(first)
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    return {**tree, first: without(below, tuple(rest))} if isinstance(below, dict) else dict(tree)


def with_value(tree: Mapping[str, Tree], path: Path, value: Tree) -> dict[str, Tree]:
    """Return the tree with the value at the path."""
    first, *rest = path
    assert isinstance(first, str)
    if not rest:
        return {**tree, first: value}
    below = tree.get(first)
    inner = below if isinstance(below, dict) else {}
    return {**tree, first: with_value(inner, tuple(rest), value)}


def subtract(tree: Mapping[str, Tree], said: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return what of the tree is not said."""
    rest: dict[str, Tree] = {}
    for key, value in tree.items():
        if key not in said:
            rest[key] = value
            continue
        ours = said[key]
        if isinstance(value, dict) and isinstance(ours, dict):
            rest[key] = subtract(value, ours)
    return rest


def iter_paths(tree: Tree, path: Path = ()) -> Iterator[Path]:
    """Yield the path to everything in the mapping, mappings themselves too."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            yield from iter_paths(value, (*path, key))


def changed_paths(before: Tree, after: Tree, path: Path = ()) -> Iterator[Path]:
    """Yield the fields that differ; a mapping that comes or goes is one too, with all in it."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from changed_paths(before.get(key), after.get(key), (*path, key))
        return
    if before == after:
        return
    yield path
    yield from iter_paths(before, path)
    yield from iter_paths(after, path)
