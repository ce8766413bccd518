"""Writes objects for verbs: edits by compare-and-swap, checked trees of a user, and creation in dependency order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import git_warnings
from fleetctl.objects.targets import object_ref
from insight.edits import ObjectEdit
from machinery.clock import Clock
from manifests import apply as applying
from manifests import ownership, plan
from manifests.apply import ApplyOptions, PlanChangedError
from manifests.documents import Document
from manifests.errors import ApplyError, ManifestError, ManifestErrors, join_names
from manifests.load import LoadedObject, read_objects
from manifests.observe import observe
from manifests.trees import Tree, object_tree, spec_of
from manifests.validate import validate
from manifests.yaml import parser
from schemas.meta import FLEET_ANNOTATIONS, FLEET_OWNED, ApiObject, ObjectMeta
from schemas.node import Node
from store import codec
from store.errors import ConflictError, NotFoundError, UnavailableError
from store.mutate import mutate
from store.port import ModRevisionGuard, Transport

Obj = TypeVar("Obj", bound=ApiObject)
ReportCreated = Callable[[ApiObject], None]

# Only the reconciler may write a node's spec before us, and it does so once.
_ATTEMPTS = 3
_FLEET_FIELDS = tuple(ObjectMeta.model_fields[name].alias or name for name in FLEET_OWNED)
_HIDDEN = "managedFields"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Generic[Obj]):
    """The result of an edit."""

    obj: Obj
    """The object as it is in the store now; in a dry run, as it would be."""
    is_changed: bool


async def write_edit(
    transport: Transport, clock: Clock, obj: Obj, change: ObjectEdit[Obj], *, is_dry: bool = False
) -> WriteResult[Obj]:
    """Change an object in the store, as it is then; in a dry run only return what would be written.

    A node that has only a status, from its agent, gets its spec here. A change of a field that a GitSource keeps prints
    a warning, in a dry run too.

    Raises:
        FleetctlError: the object is gone.
        EditRefusedError: the edit refused.
        StoreError: as store.mutate.mutate.

    """
    written: Obj | None = None
    kept_in_git: dict[str, tuple[str, ...]] = {}

    def edit(current: Obj) -> Obj | None:
        nonlocal written, kept_in_git
        # On a retry after a lost answer the edit may be in the store already; it must not run twice.
        if written is not None and codec.encode_spec(current) == codec.encode_spec(written):
            return None
        changed = change.applied(current, clock.now())
        if changed is not None:
            written, kept_in_git = changed, ownership.fields_kept_in_git(current, changed)
        return changed

    stored: Obj = obj
    if is_dry:
        stored = edit(obj) or obj
    else:
        for _ in range(_ATTEMPTS):
            try:
                stored = await mutate(transport, clock, type(obj), obj.name, edit)
                break
            except NotFoundError:
                if await _create_node_spec(transport, clock, obj, edit):
                    stored = written or obj
                    break
        else:
            raise ConflictError(f"{object_ref(obj)} is created and deleted repeatedly")
        if "status" in type(obj).model_fields:  # specs are written without it
            stored = stored.model_copy(update={"status": getattr(obj, "status", None)})
    await git_warnings.warn_of_fields(transport, obj, kept_in_git)
    return WriteResult(obj=stored, is_changed=written is not None)


async def _create_node_spec(
    transport: Transport, clock: Clock, obj: ApiObject, edit: Callable[[Any], Any]
) -> bool:
    """Write the spec of a node that has none yet, as the reconciler does for a new node; return whether it is written.

    Raises:
        FleetctlError: the object is gone.

    """
    if not isinstance(obj, Node) or obj.status is None:
        raise FleetctlError(f"{object_ref(obj)} is gone: it was deleted meanwhile") from None
    metadata = ObjectMeta(
        name=obj.name, uid=obj.status.uid, generation=1, creation_timestamp=clock.now()
    )
    node: Node | None = edit(Node(metadata=metadata))
    if node is None:
        return True
    put = codec.put_spec(node)
    try:
        await transport.commit([ModRevisionGuard(key=put.key, mod_revision=0)], [put])
    except ConflictError:
        return False  # the reconciler was faster: change its version
    except UnavailableError as error:
        if not error.ambiguous:
            raise
        return False  # it may be written: read it again
    return True


def patchable_tree(obj: ApiObject) -> dict[str, Tree]:
    """Return the object as patches see it: with the fleet's metadata, without managedFields and status."""
    tree = object_tree(obj)
    tree.pop("status", None)
    return {**tree, "metadata": _without(_metadata(tree), (_HIDDEN,))}


def editable_tree(obj: ApiObject) -> dict[str, Tree]:
    """Return the part of the object that a user may change, with its kind and name."""
    tree = patchable_tree(obj)
    metadata = _without(_metadata(tree), _FLEET_FIELDS)
    annotations = metadata.get("annotations")
    if isinstance(annotations, dict):
        own = {
            key: text for key, text in annotations.items() if not key.startswith(FLEET_ANNOTATIONS)
        }
        metadata = {
            **_without(metadata, ("annotations",)),
            **({"annotations": own} if own else {}),
        }
    return {**tree, "metadata": metadata}


def load_patched(now: ApiObject, tree: Tree, source: str) -> LoadedObject:
    """Return the object of a changed `patchable_tree`. `source` names the tree in errors.

    Raises:
        FleetctlError: the tree changes a field of the fleet, or has another resourceVersion.
        ManifestErrors: the tree is invalid.

    """
    before = patchable_tree(now)
    if not isinstance(tree, dict) or not isinstance(tree.get("metadata"), dict):
        raise FleetctlError(f"{source}: is not an object; metadata and spec are required")
    new_metadata, old_metadata = _metadata(tree), _metadata(before)
    for field, was, new in (
        ("apiVersion", before["apiVersion"], tree.get("apiVersion")),
        ("kind", before["kind"], tree.get("kind")),
        ("metadata.name", old_metadata["name"], new_metadata.get("name")),
    ):
        if was != new:
            raise FleetctlError(
                f"{source}: {field} cannot be changed; it is {was}. Create another object, and delete this one"
            )
    version = new_metadata.get("resourceVersion")
    if version is not None and version != old_metadata.get("resourceVersion"):
        raise FleetctlError(
            f"{source}: resourceVersion is {version}, but the object has {old_metadata.get('resourceVersion')}: "
            "it was changed since. Read it again; nothing was changed"
        )
    for key in (*_FLEET_FIELDS, "status"):
        inside = key != "status"
        was, new = (old_metadata, new_metadata) if inside else (before, tree)
        if was.get(key) != new.get(key):
            name = f"metadata.{key}" if inside else key
            raise FleetctlError(f"{source}: {name} is written by the fleet; remove it")
    metadata: dict[str, Tree] = _without(new_metadata, _FLEET_FIELDS)
    return _load_tree({**tree, "metadata": metadata}, source)


def load_edited(now: ApiObject, tree: Tree) -> ApiObject:
    """Return the object of a changed `editable_tree`, with the fleet's annotations of `now`.

    Raises:
        ManifestErrors: the tree is invalid.

    """
    assert isinstance(tree, dict)
    api_object = _load_tree(tree, f"{now.kind.lower()}/{now.name}, as edited").obj
    fleets = {k: v for k, v in now.metadata.annotations.items() if k.startswith(FLEET_ANNOTATIONS)}
    annotations = {**api_object.metadata.annotations, **fleets}
    metadata = api_object.metadata.model_copy(update={"annotations": annotations})
    return api_object.model_copy(update={"metadata": metadata})


def _load_tree(tree: dict[str, Tree], source: str) -> LoadedObject:
    [root] = parser.parse(parser.dump(tree), source).documents
    try:
        [loaded_object] = read_objects([Document(source=source, root=root)])
    except ManifestErrors as errors:
        raise ManifestErrors(without_positions(errors.problems)) from None
    return loaded_object


def without_positions(problems: Sequence[ManifestError]) -> list[ManifestError]:
    """Return the problems without line numbers, for a text that the user has not seen."""
    return [replace(problem, line=0, column=0) for problem in problems]


def merge_onto(now: ApiObject, target: ApiObject) -> ApiObject | None:
    """Return `now` with the labels, annotations and spec of `wanted`; None if nothing changes. Pure.

    Raises:
        FleetctlError: an annotation of the fleet differs.

    """
    ours, theirs = now.metadata, target.metadata
    refuse_fleet_annotations(now, ours.annotations, theirs.annotations)
    is_same_spec = spec_of(now) == spec_of(target)
    if is_same_spec and (ours.labels, ours.annotations) == (theirs.labels, theirs.annotations):
        return None
    metadata = ours.model_copy(
        update={
            "labels": theirs.labels,
            "annotations": theirs.annotations,
            "generation": ours.generation + (not is_same_spec),
        }
    )
    return now.model_copy(update={"metadata": metadata, "spec": spec_of(target)})


def refuse_fleet_annotations(
    obj: ApiObject, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Refuse changes of annotations that only the fleet and its verbs write, such as the time of a restart.

    Raises:
        FleetctlError: one of them differs.

    """
    for key in sorted({*before, *after}):
        if key.startswith(FLEET_ANNOTATIONS) and before.get(key) != after.get(key):
            raise FleetctlError(
                f"{object_ref(obj)}: annotation {key} is written by the fleet and by commands such as "
                "`fleetctl rollout restart`; leave it unchanged"
            )


async def check_objects(transport: Transport, loaded: Sequence[LoadedObject]) -> None:
    """Check objects against each other and against the store.

    Raises:
        ManifestErrors: an object refers to an object that does not exist, or cannot be written.

    """
    observed_objects = await observe(transport, [item.key for item in loaded])
    problems = [
        *validate(loaded, observed_objects.known),
        *plan.find_refusals(loaded, observed_objects.objects),
    ]
    if problems:
        raise ManifestErrors(problems)


def _metadata(tree: Mapping[str, Tree]) -> dict[str, Tree]:
    trees = tree["metadata"]
    assert isinstance(trees, dict)
    return trees


def _without(tree: Mapping[str, Tree], keys: Sequence[str]) -> dict[str, Tree]:
    return {key: value for key, value in tree.items() if key not in keys}


async def create_all(
    transport: Transport,
    loaded: Sequence[LoadedObject],
    clock: Clock,
    *,
    manager: str,
    report: ReportCreated,
    is_dry: bool = False,
) -> None:
    """Create objects as an apply does, and call `report` for each.

    Raises:
        ManifestErrors: an object exists, or is invalid; nothing was written.
        FleetctlError: another writer created one meanwhile, or the store did not answer; it says what was written.

    """
    observed_objects = await observe(transport, [item.key for item in loaded])
    existing = [_exists_problem(item) for item in loaded if item.key in observed_objects.objects]
    if existing:
        raise ManifestErrors(existing)
    options = ApplyOptions(manager=manager, server_dry_run=is_dry)
    changes = await applying.prepare(transport, loaded, clock, options)
    # An object that another writer creates meanwhile changes the plan: it is never changed here.
    options = replace(options, expected_plan=plan.plan_id(changes))
    try:
        applied = await applying.apply(transport, loaded, clock, options)
    except PlanChangedError as error:
        names = join_names(error.missing)
        raise FleetctlError(
            f"another writer created or changed an object meanwhile; not created: {names}. Run the command again"
        ) from error
    except ApplyError as error:
        raise FleetctlError(str(error)) from error
    for outcome in applied.outcomes:
        report(outcome.obj)


def _exists_problem(item: LoadedObject) -> ManifestError:
    name = f"{item.key.kind.lower()}/{item.key.name}"
    hint = f"Change it with `fleetctl apply` or `fleetctl edit {name}`"
    return item.document.problem(("metadata", "name"), f"{name} already exists", hint)
