"""Revisions of a deployment: the versions that replicas run, their hashes and change causes, and their limit. Pure."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Final, TypeVar

import orjson

from reconciler.deployments.actions import RemoveRevision, SaveRevision
from reconciler.deployments.observe import DeploymentView
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    Revision,
    RevisionTemplate,
)
from schemas.meta import CHANGE_CAUSE, RESTARTED_AT, ObjectName

Given = TypeVar("Given")
Found = TypeVar("Found")
_REMEMBERED: Final = 64


def change_cause(
    deployment: ModelDeployment, before: Revision | None, same: Revision | None
) -> str:
    """Return why the deployment's newest version came; empty for a first version without an annotation.

    `before` is the newest saved revision, `same` an earlier revision of the same version. An annotation that was written
    for this change comes first. Without one, a return to `same` is told as that, and any other change by its fields. The
    cause is stored with the revision, because earlier revisions may be removed later.
    """
    given = new_cause(deployment, before)
    if same is not None and given in ("", restored_cause(same)):
        cause = restored_cause(same)
        return f"undo to revision {same.spec.revision}" + (f": {cause}" if cause else "")
    if given or before is None:
        return given
    return describe_difference(before.spec.content, content_of(deployment))


def new_cause(deployment: ModelDeployment, newest: Revision | None) -> str:
    """Return the change cause that was annotated after the newest revision; empty if there is none."""
    given = deployment.metadata.annotations.get(CHANGE_CAUSE, "")
    return "" if newest is not None and given == restored_cause(newest) else given


def restored_cause(revision: Revision) -> str:
    """Return the change cause that a return to the revision brings back: its annotation; empty if it had none."""
    return revision.metadata.annotations.get(CHANGE_CAUSE, "")


def describe_difference(before: RevisionTemplate, now: RevisionTemplate) -> str:
    """Describe the fields that differ, as in "contextLength 2048 -> 4096"."""
    old, new = dict(_flat("", _tree(before))), dict(_flat("", _tree(now)))
    changed = [path for path in dict.fromkeys((*old, *new)) if old.get(path) != new.get(path)]
    return ", ".join(_words(path, old.get(path), new.get(path)) for path in changed)


def _tree(content: RevisionTemplate) -> dict[str, Any]:
    return content.model_dump(mode="json", by_alias=True, exclude_none=True)


def _flat(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _words(path: str, old: Any, new: Any) -> str:
    if path == "restartedAt":
        return f"restarted at {new}" if new else "restart undone"
    return f"{path} {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return "none" if value is None else str(value)


def _remembered(function: Callable[[Given], Found]) -> Callable[[Given], Found]:
    """Return the pure function with its last results remembered, by the identity of the argument, which is frozen.

    One reconcile needs the version of its deployment a dozen times.
    """
    last: dict[int, tuple[Given, Found]] = {}

    @wraps(function)
    def remembered(given: Given) -> Found:
        there = last.get(id(given))
        if there is not None and there[0] is given:
            return there[1]
        found = function(given)
        if len(last) >= _REMEMBERED:
            last.clear()
        last[id(given)] = given, found
        return found

    return remembered


@_remembered
def content_of(deployment: ModelDeployment) -> RevisionTemplate:
    """Return everything that the deployment's engines are started with."""
    names = RevisionTemplate.model_fields.keys() & ModelDeploymentSpec.model_fields.keys()
    fields = {name: getattr(deployment.spec, name) for name in names}
    restarted_at = deployment.metadata.annotations.get(RESTARTED_AT, "")
    return RevisionTemplate(**fields, restarted_at=restarted_at)


@_remembered
def digest(content: RevisionTemplate) -> str:
    """Return the hash that names a version on replicas and endpoints.

    Fields with their default value do not count: a field that a later release adds must not restart the fleet.
    """
    tree = content.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def template_hash(deployment: ModelDeployment) -> str:
    """Return the hash of the deployment's current version."""
    return digest(content_of(deployment))


def revision_name(deployment: ObjectName, hash_: str) -> ObjectName:
    """Return the name of a revision: derived, so that storing it twice collides."""
    return f"{deployment}-{hash_}"


def known_contents(observed: DeploymentView) -> dict[str, RevisionTemplate]:
    """Return every version that a replica can be created with, by hash."""
    revision_templates = {
        revision.spec.template: revision.spec.content for revision in _owned(observed)
    }
    if observed.deployment is not None:
        newest = content_of(observed.deployment)
        revision_templates[digest(newest)] = newest
    return revision_templates


def collect_revisions(observed: DeploymentView) -> list[SaveRevision | RemoveRevision]:
    """Return the actions that save the newest version and remove revisions beyond the history limit."""
    owned = _owned(observed)
    foreign = [revision for revision in observed.revisions if revision not in owned]
    if observed.deployment is None or observed.is_ending:
        is_over = all(replica.is_orphan for replica in observed.replicas)
        return [_remove(one) for one in observed.revisions] if is_over else []
    newest = template_hash(observed.deployment)
    latest = max((one.spec.revision for one in owned), default=0)
    saved = next((one for one in owned if one.spec.template == newest), None)
    actions: list[SaveRevision | RemoveRevision] = []
    if saved is None or saved.spec.revision < latest:
        name = revision_name(observed.name, newest)
        existing = next((one for one in observed.revisions if one.name == name), None)
        actions.append(
            SaveRevision(
                name=name,
                template=newest,
                number=latest + 1,
                cause=change_cause(observed.deployment, _last(owned), saved),
                version=_version(existing),
            )
        )
        foreign = [one for one in foreign if one.name != name]
    return [*actions, *map(_remove, foreign), *map(_remove, _too_many(observed, owned, newest))]


def _owned(observed: DeploymentView) -> tuple[Revision, ...]:
    """Return the revisions that this deployment owns, and not an earlier one of the same name."""
    uid = None if observed.deployment is None else observed.deployment.metadata.uid
    return tuple(
        revision
        for revision in observed.revisions
        if any(owner.uid == uid for owner in revision.metadata.owner_references)
    )


def _last(owned: Iterable[Revision]) -> Revision | None:
    """Return the newest saved revision."""
    return max(owned, key=lambda one: one.spec.revision, default=None)


def _too_many(observed: DeploymentView, owned: Iterable[Revision], newest: str) -> list[Revision]:
    assert observed.deployment is not None
    in_use = {
        newest,
        observed.stable_template,
        *(r.replica.spec.template for r in observed.replicas),
    }
    idle = sorted(
        (revision for revision in owned if revision.spec.template not in in_use),
        key=lambda one: one.spec.revision,
    )
    return idle[: max(0, len(idle) - observed.deployment.spec.rollout.revision_history_limit)]


def _remove(one: Revision) -> RemoveRevision:
    return RemoveRevision(name=one.name, version=_version(one))


def _version(one: Revision | None) -> int:
    return 0 if one is None else int(one.metadata.resource_version or 0)
