"""A deployment's revisions: what its replicas run, by hash, and which of them are kept. Pure."""

import hashlib
from collections.abc import Iterable

import orjson

from reconciler.actions import RemoveRevision, SaveRevision
from reconciler.observe import Observed
from reconciler.rollout.causes import cause
from schemas.deployment import ModelDeployment
from schemas.meta import RESTARTED_AT, ObjectName
from schemas.revision import Revision, Template


def content_of(deployment: ModelDeployment) -> Template:
    """Return all of the deployment that its engines are started with."""
    spec = deployment.spec
    return Template(
        model=spec.model,
        served_names=spec.served_names,
        context_length=spec.context_length,
        concurrency=spec.concurrency,
        queue_depth=spec.queue_depth,
        kv_cache=spec.kv_cache,
        resources=spec.resources,
        sharding=spec.sharding,
        restarted_at=deployment.metadata.annotations.get(RESTARTED_AT, ""),
    )


def digest(content: Template) -> str:
    """Return the hash by which replicas and endpoints carry the version.

    What has its default does not count: a field that a later release adds must not restart the fleet.
    """
    tree = content.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def template(deployment: ModelDeployment) -> str:
    """Return the hash of what the deployment's engines are started with now."""
    return digest(content_of(deployment))


def with_content(deployment: ModelDeployment, content: Template) -> ModelDeployment:
    """Return the deployment as it was when its engines were started with `content`."""
    fields = {
        "model": content.model,
        "served_names": content.served_names,
        "context_length": content.context_length,
        "concurrency": content.concurrency,
        "queue_depth": content.queue_depth,
        "kv_cache": content.kv_cache,
        "resources": content.resources,
        "sharding": content.sharding,
    }
    return deployment.model_copy(update={"spec": deployment.spec.model_copy(update=fields)})


def revision_name(deployment: ObjectName, hash_: str) -> ObjectName:
    """Return the name of a revision: derived, so that saving it twice collides."""
    return f"{deployment}-{hash_}"


def contents(seen: Observed) -> dict[str, Template]:
    """Return every version that replicas can be made of, by hash."""
    found = {one.spec.template: one.spec.content for one in _ours(seen)}
    if seen.deployment is not None:
        newest = content_of(seen.deployment)
        found[digest(newest)] = newest
    return found


def keep_books(seen: Observed) -> list[SaveRevision | RemoveRevision]:
    """Return what to do about the revisions: the newest is saved, the oldest are dropped."""
    ours = _ours(seen)
    strangers = [one for one in seen.revisions if one not in ours]
    if seen.deployment is None or seen.is_ending:
        is_over = all(one.is_orphan for one in seen.replicas)
        return [_remove(one) for one in seen.revisions] if is_over else []
    newest = template(seen.deployment)
    latest = max((one.spec.revision for one in ours), default=0)
    saved = next((one for one in ours if one.spec.template == newest), None)
    actions: list[SaveRevision | RemoveRevision] = []
    if saved is None or saved.spec.revision < latest:
        name = revision_name(seen.name, newest)
        there = next((one for one in seen.revisions if one.name == name), None)
        actions.append(
            SaveRevision(
                name=name,
                template=newest,
                number=latest + 1,
                cause=cause(seen.deployment, _last(ours), content_of(seen.deployment)),
                version=_version(there),
            )
        )
        strangers = [one for one in strangers if one.name != name]
    return [*actions, *map(_remove, strangers), *map(_remove, _too_many(seen, ours, newest))]


def _ours(seen: Observed) -> tuple[Revision, ...]:
    """Return the revisions of this very deployment, not of an earlier one of the name."""
    uid = None if seen.deployment is None else seen.deployment.metadata.uid
    return tuple(
        one
        for one in seen.revisions
        if any(owner.uid == uid for owner in one.metadata.owner_references)
    )


def _last(ours: Iterable[Revision]) -> Template | None:
    """Return what was the newest until now."""
    last = max(ours, key=lambda one: one.spec.revision, default=None)
    return None if last is None else last.spec.content


def _too_many(seen: Observed, ours: Iterable[Revision], newest: str) -> list[Revision]:
    assert seen.deployment is not None
    in_use = {newest, seen.stable, *(r.replica.spec.template for r in seen.replicas)}
    idle = sorted(
        (one for one in ours if one.spec.template not in in_use),
        key=lambda one: one.spec.revision,
    )
    return idle[: max(0, len(idle) - seen.deployment.spec.rollout.revision_history_limit)]


def _remove(one: Revision) -> RemoveRevision:
    return RemoveRevision(name=one.name, version=_version(one))


def _version(one: Revision | None) -> int:
    return 0 if one is None else int(one.metadata.resource_version or 0)
