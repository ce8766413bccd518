"""Three-way merge of trees by field: the last applied tree, the applied tree and the stored one. Pure; knows no kind.

Mappings are merged by key, lists are replaced as a whole. See docs/adr/0013-three-way-apply.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, TypeAlias

from manifests.trees import (
    ABSENT,
    AbsentType,
    OptionalTree,
    Path,
    Tree,
    show_path,
    value_at,
)

# Longer texts are stored as a hash: a base is only compared, and must not double the size of an annotation.
LONG = 256

Force: TypeAlias = bool | Literal["drift"]
"""The value that wins where others wrote the same fields. False: theirs. True: the manifest's. "drift": the manifest's,
unless another manifest has a different value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherManagers:
    """Field ownership outside the manifest that is merged."""

    updates: Mapping[str, str] = field(default_factory=dict)
    """Fields that other managers wrote last, as `spec.replicas`, and their managers."""
    own_updates: frozenset[str] = frozenset()
    """Fields that this manager wrote last without a manifest."""
    applied: Mapping[str, Tree] = field(default_factory=dict)
    """The manifests of other managers, by manager."""
    force: Force = False

    def updater(self, path: Path) -> str:
        """Return the other manager that last wrote the field, or a part of it; empty if there is none."""
        if not self.updates:
            return ""
        shown = show_path(path)
        exact = self.updates.get(shown)
        return exact if exact is not None else self.updater_below(shown)

    def updater_below(self, shown: str) -> str:
        """Return another manager that last wrote a field below the path; empty if there is none."""
        inside = (f"{shown}.", f"{shown}[")
        return next((name for key, name in self.updates.items() if key.startswith(inside)), "")

    def disagreeing_applier(self, path: Path, ours: OptionalTree) -> str:
        """Return a manager whose manifest has another value for the field; empty if there is none."""
        for name, tree in self.applied.items():
            theirs = value_at(tree, path)
            if theirs is not ABSENT and (ours is ABSENT or not matches(theirs, ours)):
                return name
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDisagreement:
    """A field whose value differs between the manifest and the store, because another manager wrote it."""

    path: Path
    owner: str
    """The other manager; empty if it is not recorded."""
    applier: str = ""
    """The manager whose manifest has another value; empty if no manifest has."""
    theirs: Tree
    """The value in the store; None if it is not set."""
    ours: Tree
    """The value in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """The merged tree, and the fields that were decided in a particular way."""

    tree: Mapping[str, Tree]
    kept_by_others: tuple[FieldDisagreement, ...]
    """Fields that keep another manager's value: the manifest's value has not changed."""
    conflicts: tuple[FieldDisagreement, ...]
    """Fields that both changed, to different values."""
    owned: tuple[Path, ...]
    """Fields that the manifest changes or removes."""
    removed: tuple[Path, ...]
    """The removed ones among them."""
    unowned: tuple[Path, ...]
    """Fields without any owner: defaults from the time when the object was written."""


def merge(
    base: Mapping[str, Tree],
    ours: Mapping[str, Tree],
    theirs: Mapping[str, Tree],
    others: OtherManagers,
) -> MergeResult:
    """Merge the manifest `ours` into the stored tree `theirs`; `base` is what the manifest applied last.

    `base` and `ours` contain only fields that the manifest sets, without defaults.
    """
    run = _Merge(others)
    tree = run.mapping((), base, ours, theirs)
    return MergeResult(
        tree=tree,
        kept_by_others=tuple(run.kept_by_others),
        conflicts=tuple(run.conflicts),
        owned=tuple(run.owned),
        removed=tuple(run.removed),
        unowned=tuple(run.unowned),
    )


class _Merge:
    """One merge in progress."""

    def __init__(self, others: OtherManagers) -> None:
        self.kept_by_others: list[FieldDisagreement] = []
        self.conflicts: list[FieldDisagreement] = []
        self.owned: list[Path] = []
        self.removed: list[Path] = []
        self.unowned: list[Path] = []
        self._others = others

    def mapping(
        self,
        path: Path,
        base: Mapping[str, Tree],
        ours: Mapping[str, Tree],
        theirs: Mapping[str, Tree],
    ) -> dict[str, Tree]:
        """Return the merged mapping, in the order of the stored one."""
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
            if not self._is_owned_by_others(path) and matches(base, theirs):
                return self._remove(path)
            return self.mapping(path, base, {}, theirs)
        return self._leaf(path, base, ours, theirs)

    def _leaf(
        self, path: Path, base: OptionalTree, ours: OptionalTree, theirs: Tree
    ) -> OptionalTree:
        if ours is ABSENT:
            return self._absent(path, base, theirs)
        if matches(ours, theirs):
            return theirs
        updater = self._others.updater(path)
        applier = self._others.disagreeing_applier(path, ours)
        if self._others.force is True:
            return self._own(path, ours)
        if applier:
            field_disagreement = FieldDisagreement(
                path=path, owner=updater or applier, applier=applier, theirs=theirs, ours=ours
            )
            self.conflicts.append(field_disagreement)
            return theirs
        if not self._is_changed(path, base, theirs) or self._others.force == "drift":
            return self._own(path, ours)
        field_disagreement = FieldDisagreement(path=path, owner=updater, theirs=theirs, ours=ours)
        is_applied_before = base is not ABSENT and base == abbreviate(ours)
        (self.kept_by_others if is_applied_before else self.conflicts).append(field_disagreement)
        return theirs

    def _is_changed(self, path: Path, base: OptionalTree, theirs: Tree) -> bool:
        """Return whether another manager changed the field since the manifest was last applied."""
        if base is ABSENT:
            return bool(self._others.updater(path))
        if matches(base, theirs):
            return isinstance(theirs, dict) and bool(self._others.updater_below(show_path(path)))
        return show_path(path) not in self._others.own_updates

    def _is_owned_by_others(self, path: Path) -> bool:
        return bool(self._others.updater(path) or self._others.disagreeing_applier(path, ABSENT))

    def _absent(self, path: Path, base: OptionalTree, theirs: Tree) -> OptionalTree:
        """Return the value of a field that the manifest does not contain, or no longer contains."""
        is_owned = self._is_owned_by_others(path)
        if base is ABSENT:
            self.unowned.extend([] if is_owned else [path])
            return theirs
        if is_owned or self._is_changed(path, base, theirs):
            return theirs
        return self._remove(path)

    def _own(self, path: Path, ours: Tree) -> Tree:
        self.owned.append(path)
        return ours

    def _remove(self, path: Path) -> Literal[AbsentType.ABSENT]:
        self.owned.append(path)
        self.removed.append(path)
        return ABSENT


def matches(applied: Tree, stored: Tree) -> bool:
    """Return whether the stored value is the applied one; a stored mapping may have further fields."""
    if isinstance(applied, dict):
        return isinstance(stored, dict) and all(
            matches(value, stored.get(key)) for key, value in applied.items()
        )
    return applied == stored or (isinstance(stored, str) and applied == abbreviate(stored))


def abbreviate(tree: Tree) -> Tree:
    """Return the tree as a base is stored: long texts as their hash."""
    if isinstance(tree, dict):
        return {key: abbreviate(value) for key, value in tree.items()}
    if isinstance(tree, str) and len(tree) > LONG:
        return f"sha256:{sha256(tree.encode()).hexdigest()}"
    return tree
