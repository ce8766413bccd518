"""From an object and a tree of what it should be to the object that is written, for verbs that change one by hand.

Creating objects: everything is checked before the first is written, and none is written over another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fleetctl.cli.errors import FleetctlError
from machinery.clock import Clock
from manifests import plan
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Document, LoadedObject, read_objects
from manifests.observe import ObservedObjects, observe
from manifests.plan import ApplyMode, Write
from manifests.trees import Tree, object_tree, spec_of
from manifests.validate import validate
from manifests.yaml import parser
from schemas.meta import FLEET_ANNOTATIONS, FLEET_OWNED, ApiObject, ObjectMeta
from store import codec, objects
from store.errors import ConflictError, UnavailableError
from store.port import Transport

_FLEET_FIELDS = tuple(ObjectMeta.model_fields[name].alias or name for name in FLEET_OWNED)
_HIDDEN = "managedFields"


def patchable_tree(obj: ApiObject) -> dict[str, Tree]:
    """Return the object as a patch finds it: with what the fleet keeps, but for who wrote what, and the status."""
    tree = object_tree(obj)
    tree.pop("status", None)
    return {**tree, "metadata": _without(_metadata(tree), (_HIDDEN,))}


def editable_tree(obj: ApiObject) -> dict[str, Tree]:
    """Return what a user may change of the object, and its kind and name."""
    tree = patchable_tree(obj)
    metadata = _without(_metadata(tree), _FLEET_FIELDS)
    theirs = metadata.get("annotations")
    if isinstance(theirs, dict):
        kept = {key: text for key, text in theirs.items() if not key.startswith(FLEET_ANNOTATIONS)}
        metadata = {
            **_without(metadata, ("annotations",)),
            **({"annotations": kept} if kept else {}),
        }
    return {**tree, "metadata": metadata}


def load_patched(now: ApiObject, tree: Tree, source: str) -> LoadedObject:
    """Return the object that a changed tree of `shown` speaks of. `source` says in errors what it is.

    Raises:
        FleetctlError: it changes what is not for users to change, or is made for another resourceVersion.
        ManifestErrors: it is not valid.

    """
    before = patchable_tree(now)
    if not isinstance(tree, dict) or not isinstance(tree.get("metadata"), dict):
        raise FleetctlError(f"{source}: leaves no object; it must have metadata and spec")
    wanted, there = _metadata(tree), _metadata(before)
    for field, was, new in (
        ("apiVersion", before["apiVersion"], tree.get("apiVersion")),
        ("kind", before["kind"], tree.get("kind")),
        ("metadata.name", there["name"], wanted.get("name")),
    ):
        if was != new:
            raise FleetctlError(
                f"{source}: {field} cannot change; it is {was}. Create another object, and delete this one"
            )
    version = wanted.get("resourceVersion")
    if version is not None and version != there.get("resourceVersion"):
        raise FleetctlError(
            f"{source}: it is made for resourceVersion {version}, and the object has "
            f"{there.get('resourceVersion')}: somebody changed it since. Look at it again; nothing was changed"
        )
    for key in (*_FLEET_FIELDS, "status"):
        inside = key != "status"
        was, new = (there, wanted) if inside else (before, tree)
        if was.get(key) != new.get(key):
            name = f"metadata.{key}" if inside else key
            raise FleetctlError(f"{source}: {name} is written by the fleet; leave it out")
    metadata: dict[str, Tree] = _without(wanted, _FLEET_FIELDS)
    return _load_tree({**tree, "metadata": metadata}, source)


def load_edited(now: ApiObject, tree: Tree) -> ApiObject:
    """Return the object that a changed tree of `editable` speaks of; annotations of the fleet's are `now`'s.

    Raises:
        ManifestErrors: it is not valid.

    """
    assert isinstance(tree, dict)
    found = _load_tree(tree, f"{now.kind.lower()}/{now.name}, as edited").obj
    fleets = {k: v for k, v in now.metadata.annotations.items() if k.startswith(FLEET_ANNOTATIONS)}
    annotations = {**found.metadata.annotations, **fleets}
    metadata = found.metadata.model_copy(update={"annotations": annotations})
    return found.model_copy(update={"metadata": metadata})


def _load_tree(tree: dict[str, Tree], source: str) -> LoadedObject:
    [root] = parser.parse(parser.dump(tree), source).documents
    try:
        [found] = read_objects([Document(source=source, root=root)])
    except ManifestErrors as errors:
        raise ManifestErrors(without_positions(errors.problems)) from None
    return found


def without_positions(problems: Sequence[ManifestError]) -> list[ManifestError]:
    """Return the problems without lines, for a text that nobody has seen."""
    return [replace(problem, line=0, column=0) for problem in problems]


def merge_onto(now: ApiObject, wanted: ApiObject) -> ApiObject | None:
    """Return `now` as `wanted` says: labels, annotations and spec; None if nothing changes. Pure.

    Raises:
        FleetctlError: an annotation that only fleetctl's verbs write differs, or the object is being deleted.

    """
    ours, theirs = now.metadata, wanted.metadata
    refuse_fleet_annotations(now, ours.annotations, theirs.annotations)
    is_same_spec = spec_of(now) == spec_of(wanted)
    if is_same_spec and (ours.labels, ours.annotations) == (theirs.labels, theirs.annotations):
        return None
    refuse_deleted(now)
    metadata = ours.model_copy(
        update={
            "labels": theirs.labels,
            "annotations": theirs.annotations,
            "generation": ours.generation + (not is_same_spec),
        }
    )
    return now.model_copy(update={"metadata": metadata, "spec": spec_of(wanted)})


def refuse_fleet_annotations(
    obj: ApiObject, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Refuse to change what only verbs write, such as the mark of a restart.

    Raises:
        FleetctlError: one of them differs.

    """
    for key in sorted({*before, *after}):
        if key.startswith(FLEET_ANNOTATIONS) and before.get(key) != after.get(key):
            raise FleetctlError(
                f"{obj.kind.lower()}/{obj.name}: the annotation {key} is written by the fleet and by fleetctl's "
                "verbs, such as `fleetctl rollout restart`; leave it as it is"
            )


def refuse_deleted(obj: ApiObject) -> None:
    """Refuse to change what is going.

    Raises:
        FleetctlError: the object is being deleted.

    """
    if obj.metadata.deletion_timestamp is not None:
        raise FleetctlError(f"{obj.kind.lower()}/{obj.name} is being deleted; nothing was changed")


async def check_objects(transport: Transport, loaded: Sequence[LoadedObject]) -> None:
    """Check objects against each other and against what the store has.

    Raises:
        ManifestErrors: one of them names what is not there, or cannot be written.

    """
    seen = await observe(transport, [item.key for item in loaded])
    problems = [*validate(loaded, seen.known), *plan.find_refusals(loaded, seen.objects)]
    if problems:
        raise ManifestErrors(problems)


def _metadata(tree: Mapping[str, Tree]) -> dict[str, Tree]:
    found = tree["metadata"]
    assert isinstance(found, dict)
    return found


def _without(tree: Mapping[str, Tree], keys: Sequence[str]) -> dict[str, Tree]:
    return {key: value for key, value in tree.items() if key not in keys}


ReportCreated = Callable[[ApiObject], None]


async def create_all(
    transport: Transport,
    loaded: Sequence[LoadedObject],
    clock: Clock,
    *,
    manager: str,
    tell: ReportCreated,
    is_dry: bool = False,
) -> None:
    """Create objects, in the order in which they need each other; `tell` hears of each that was.

    Raises:
        ManifestErrors: one is there already, or something else stands against one; nothing was written.
        FleetctlError: somebody else created one meanwhile; those told of were written.
        StoreError: the store did not answer; those told of were written.

    """
    seen = await observe(transport, [item.key for item in loaded])
    problems = [
        *_existing_problems(loaded, seen),
        *validate(loaded, seen.known),
        *plan.find_refusals(loaded, {}),
    ]
    if problems:
        raise ManifestErrors(problems)
    changes = plan.plan_changes(loaded, {}, now=clock.now(), how=ApplyMode(manager=manager))
    for wave in plan.plan_waves(changes):
        for batch in wave:
            for obj in (
                [write.obj for write in batch] if is_dry else await _create_batch(transport, batch)
            ):
                tell(obj)


def _existing_problems(
    loaded: Sequence[LoadedObject], seen: ObservedObjects
) -> list[ManifestError]:
    return [_exists_problem(item) for item in loaded if item.key in seen.objects]


def _exists_problem(item: LoadedObject) -> ManifestError:
    name = f"{item.key.kind.lower()}/{item.key.name}"
    hint = f"`fleetctl apply` and `fleetctl edit {name}` change it, `fleetctl replace` makes it exactly this"
    return item.document.problem(("metadata", "name"), f"{name} is there already", hint)


async def _create_batch(transport: Transport, batch: Sequence[Write]) -> list[ApiObject]:
    """Write all of a batch in one transaction; return them as they are in the store."""
    wanted = [write.obj for write in batch]
    try:
        guards = [codec.unchanged_guard(obj) for obj in wanted]
        revision = await transport.commit(guards, [codec.put_spec(obj) for obj in wanted])
    except ConflictError as error:
        names = [
            f"{obj.kind.lower()}/{obj.name}" for obj in wanted if await _read_again(transport, obj)
        ]
        raise FleetctlError(
            f"{', '.join(names) or 'one of them'} was created by somebody else meanwhile; `fleetctl apply` changes "
            "what is there"
        ) from error
    except UnavailableError as error:
        # The answer was lost, not the deed, if they are ours that are there.
        found = [await _read_again(transport, obj) for obj in wanted] if error.ambiguous else []
        uids = [obj.metadata.uid for obj in found if obj is not None]
        if uids != [obj.metadata.uid for obj in wanted]:
            raise
        return [obj for obj in found if obj is not None]
    return [codec.with_version(obj, revision) for obj in wanted]


async def _read_again(transport: Transport, obj: ApiObject) -> ApiObject | None:
    return await objects.get(transport, type(obj), obj.name)
