"""An object of the store as a manifest that people would write: nothing that the fleet keeps, no defaults. Pure."""

import json

from pydantic import ValidationError

from manifests.tree import Tree, declared, spec_of
from schemas.meta import API_VERSION, FLEET_ANNOTATIONS, ApiObject


def clean(obj: ApiObject) -> dict[str, Tree]:
    """Return the manifest; loading it gives the object's labels, annotations and spec again.

    Annotations below `fleet/` are left out: verbs write them, and manifests may not.
    """
    short = _manifest(obj, json.loads(obj.model_dump_json(by_alias=True, exclude_defaults=True)))
    # A default that must be said (`reserved: {memory: "0"}`) would be missed; then everything is said.
    return short if _says_the_same(short, obj) else _manifest(obj, declared(obj))


def is_bare(obj: ApiObject) -> bool:
    """Return whether the object says nothing beside its name, as a node's that nobody touched."""
    tree = clean(obj)
    return not tree.get("spec") and tree["metadata"] == {"name": obj.name}


def _manifest(obj: ApiObject, tree: dict[str, Tree]) -> dict[str, Tree]:
    meta = obj.metadata
    notes = {k: v for k, v in meta.annotations.items() if not k.startswith(FLEET_ANNOTATIONS)}
    metadata: dict[str, Tree] = {"name": meta.name}
    if meta.labels:
        metadata["labels"] = {**meta.labels}
    if notes:
        metadata["annotations"] = {**notes}
    spec = tree.get("spec", {})
    return {"apiVersion": API_VERSION, "kind": obj.kind, "metadata": metadata, "spec": spec}


def _says_the_same(tree: dict[str, Tree], obj: ApiObject) -> bool:
    try:
        found = type(obj).model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
    except ValidationError:
        return False
    return spec_of(found) == spec_of(obj)
