"""API objects to and from the store's bytes. Pure.

Spec and status are two documents under two keys, so that their writers never meet.
"""

from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError

from schemas.meta import ApiModel, ApiObject, Status
from store import keys
from store.port import KeyValue, Put, Unchanged

Obj = TypeVar("Obj", bound=ApiObject)
M = TypeVar("M", bound=ApiModel)


class UndecodableError(ValueError):
    """The store holds a document that this version does not understand."""


def encode(model: BaseModel) -> bytes:
    """Return the model as JSON, without what is None."""
    return model.model_dump_json(by_alias=True, exclude_none=True).encode()


def encode_spec(obj: ApiObject) -> bytes:
    """Return what belongs under the object's spec key: everything but status and version."""
    bare = obj.model_copy(
        update={"metadata": obj.metadata.model_copy(update={"resource_version": ""})}
    )
    return bare.model_dump_json(by_alias=True, exclude_none=True, exclude={"status"}).encode()


def decode(model: type[M], item: KeyValue) -> M:
    """Return the document under a key.

    Raises:
        UndecodableError: it was written by another version, or by hand.

    """
    try:
        return model.model_validate_json(item.value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UndecodableError(
            f"{item.key}: {where or 'document'}: {first['msg']}. It was written by another version "
            "of mlx-fleet or by hand; run the newer version, or delete the key"
        ) from error


def decode_object(kind: type[Obj], item: KeyValue) -> Obj:
    """Return the object under a spec key, with its resourceVersion."""
    found = decode(kind, item)
    metadata = found.metadata.model_copy(update={"resource_version": str(item.mod_revision)})
    return found.model_copy(update={"metadata": metadata})


def status_type(kind: type[ApiObject]) -> type[Status] | None:
    """Return the kind's status model; None for kinds without a status of their own."""
    field = kind.model_fields.get("status")
    if field is None:
        return None
    found = [arg for arg in get_args(field.annotation) if isinstance(arg, type)]
    return next((arg for arg in found if issubclass(arg, Status)), None)


def with_status(obj: Obj, item: KeyValue | None) -> Obj:
    """Return the object with the status that lies under its status key."""
    model = status_type(type(obj))
    if model is None or item is None:
        return obj
    return obj.model_copy(update={"status": decode(model, item)})


def put_spec(obj: ApiObject) -> Put:
    """Return the operation that writes the object's spec."""
    return Put(key=keys.spec_key(obj.kind, obj.name), value=encode_spec(obj))


def unchanged(obj: ApiObject) -> Unchanged:
    """Return the guard that nobody wrote the object's spec since it was read (or created it)."""
    version = int(obj.metadata.resource_version or 0)
    return Unchanged(key=keys.spec_key(obj.kind, obj.name), mod_revision=version)
