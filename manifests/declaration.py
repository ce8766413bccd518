"""Objects as declarations: the fields that a manifest applies, all that it may have, and a clean manifest. Pure."""

import json
from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

from pydantic import BaseModel, ValidationError

from manifests.trees import Tree, declared_tree, spec_of
from schemas.meta import API_VERSION, FLEET_ANNOTATIONS, ApiObject

Fields: TypeAlias = dict[str, Tree]


def applied_fields(obj: ApiObject) -> Fields:
    """Return the fields that a manifest sets: labels, annotations and spec, without defaults.

    Lists are compared as a whole, so their items include defaults. Annotations below `fleet/` are left out: manifests
    do not set them.
    """
    meta = obj.metadata
    declared = spec_of(obj) if "spec" in obj.model_fields_set else None
    spec = _given_fields(declared) if isinstance(declared, BaseModel) else {}
    annotations: Fields = dict(_user_annotations(meta.annotations))
    return {"metadata": {"labels": dict(meta.labels), "annotations": annotations}, "spec": spec}


def _given_fields(spec: BaseModel) -> Tree:
    raw = spec.model_dump_json(by_alias=True, exclude_unset=True)
    if "[{" in raw:  # a list of mappings, or a text with these signs
        return _explicit_fields(
            spec, spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        )
    tree: Tree = json.loads(raw)
    return tree


def _explicit_fields(value: object, full: Tree) -> Tree:
    if not isinstance(
        full, dict
    ):  # checked first: most values are scalars, and isinstance of a model is slow
        return full
    if isinstance(value, BaseModel):
        names = value.model_fields_set
        return {
            alias: _explicit_fields(getattr(value, name), full.get(alias))
            for name, alias in _aliases(type(value))
            if name in names
        }
    if isinstance(value, dict):
        return {key: _explicit_fields(one, full.get(key)) for key, one in value.items()}
    return full


@cache
def _aliases(model: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    return tuple((name, field.alias or name) for name, field in model.model_fields.items())


def declarable_fields(obj: ApiObject) -> Fields:
    """Return every field that a manifest may set, with defaults."""
    tree: Fields = obj.model_dump(mode="json", by_alias=True, exclude_none=True, include={"spec"})
    full = {"spec": tree.get("spec") or {}}
    labels: Fields = dict(obj.metadata.labels)
    annotations: Fields = dict(_user_annotations(obj.metadata.annotations))
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": full["spec"]}


def _user_annotations(annotations: Mapping[str, str]) -> Mapping[str, str]:
    return {k: v for k, v in annotations.items() if not k.startswith(FLEET_ANNOTATIONS)}


def clean_manifest(obj: ApiObject) -> dict[str, Tree]:
    """Return a manifest for users, without defaults; loading it gives the same labels, annotations and spec.

    Annotations below `fleet/` are left out: verbs write them, and manifests may not.
    """
    short = _manifest(obj, json.loads(obj.model_dump_json(by_alias=True, exclude_defaults=True)))
    # Some defaults must be written (`reserved: {memory: "0"}`); then the manifest has all fields.
    return short if _says_the_same(short, obj) else _manifest(obj, declared_tree(obj))


def is_bare(obj: ApiObject) -> bool:
    """Return whether the object has nothing but a name, as a node without settings."""
    tree = clean_manifest(obj)
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
        api_object = type(obj).model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
    except ValidationError:
        return False
    return spec_of(api_object) == spec_of(obj)
