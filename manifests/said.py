"""What manifests say of objects, and all that they may say, as trees. Pure."""

from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

from pydantic import BaseModel

from manifests.tree import Tree, spec_of
from schemas.meta import FLEET_ANNOTATIONS, ApiObject

Said: TypeAlias = dict[str, Tree]


def said_of(obj: ApiObject) -> Said:
    """Return what a manifest says of an object: labels, annotations and spec, without defaults.

    Lists are whole, with the defaults of their items: they are compared whole. What lies below `fleet/` among the
    annotations is not for manifests to say.
    """
    full = _dumped(obj)
    meta = obj.metadata
    spec = _said(spec_of(obj), full["spec"]) if "spec" in obj.model_fields_set else {}
    annotations: Said = dict(_not_ours(meta.annotations))
    return {"metadata": {"labels": dict(meta.labels), "annotations": annotations}, "spec": spec}


def _said(value: object, full: Tree) -> Tree:
    if not isinstance(
        full, dict
    ):  # asked first: most are, and whether something is a model is dear
        return full
    if isinstance(value, BaseModel):
        names = value.model_fields_set
        return {
            alias: _said(getattr(value, name), full.get(alias))
            for name, alias in _aliases(type(value))
            if name in names
        }
    if isinstance(value, dict):
        return {key: _said(one, full.get(key)) for key, one in value.items()}
    return full


@cache
def _aliases(model: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    return tuple((name, field.alias or name) for name, field in model.model_fields.items())


def there(obj: ApiObject) -> Said:
    """Return all that manifests may say of an object, with defaults."""
    full = _dumped(obj)
    labels: Said = dict(obj.metadata.labels)
    annotations: Said = dict(_not_ours(obj.metadata.annotations))
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": full["spec"]}


def _dumped(obj: ApiObject) -> Said:
    tree: Said = obj.model_dump(mode="json", by_alias=True, exclude_none=True, include={"spec"})
    return {"spec": tree.get("spec") or {}}


def _not_ours(annotations: Mapping[str, str]) -> Mapping[str, str]:
    return {k: v for k, v in annotations.items() if not k.startswith(FLEET_ANNOTATIONS)}
