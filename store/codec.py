"""API objects to and from the store's bytes. Pure.

Spec and status are two documents under two keys, so that their writers never meet.
"""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from schemas.meta import ApiModel, ApiObject, Status
from store import errors, keys, versions
from store.port import KeyValue, ModRevisionGuard, Put
from store.versions import HISTORIES, VersionHistory

Obj = TypeVar("Obj", bound=ApiObject)
M = TypeVar("M", bound=ApiModel)
Histories: TypeAlias = Mapping[str, VersionHistory]

_NOT_IN_SPEC: dict[str, bool | set[str]] = {"status": True, "metadata": {"resource_version"}}


# As most know them; whoever needs no types finds them in `store.errors`.
UndecodableError = errors.UndecodableError
NewerDocumentError = errors.NewerDocumentError


def encode(model: BaseModel, histories: Histories = HISTORIES) -> bytes:
    """Return the document: JSON without what is None, its stored version first."""
    raw = model.model_dump_json(by_alias=True, exclude_none=True).encode()
    return versions.stamp_version(raw, versions.history_of(type(model).__name__, histories).current)


def encode_spec(obj: ApiObject) -> bytes:
    """Return what belongs under the object's spec key: everything but status and version."""
    raw = obj.model_dump_json(by_alias=True, exclude_none=True, exclude=_NOT_IN_SPEC).encode()
    return versions.stamp_version(raw, versions.history_of(type(obj).__name__).current)


def decode(model: type[M], item: KeyValue, histories: Histories = HISTORIES) -> M:
    """Return the document under a key; one that an earlier mlx-fleet wrote is migrated.

    Raises:
        NewerDocumentError: a newer mlx-fleet wrote it.
        UndecodableError: this process cannot read it, for that reason or another.

    """
    try:
        raw = versions.migrate(item.value, versions.history_of(model.__name__, histories))
        return model.model_validate_json(raw)
    except versions.VersionError as error:
        kind = NewerDocumentError if error.is_newer else UndecodableError
        raise kind(f"{item.key} ({model.__name__}): {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UndecodableError(
            f"{item.key}: {where or 'document'}: {first['msg']}. It was written by another version "
            "of mlx-fleet or by hand; run the newer version, or delete the key"
        ) from error


def decode_object(kind: type[Obj], item: KeyValue, histories: Histories = HISTORIES) -> Obj:
    """Return the object under a spec key, with its resourceVersion.

    Raises:
        UndecodableError: as `decode` does.

    """
    found = decode(kind, item, histories)
    # Past pydantic's guard, for the object is ours alone yet: two copies would double the cost of
    # reading fifty thousand.
    object.__setattr__(found.metadata, "resource_version", str(item.mod_revision))
    return found


def with_version(obj: Obj, revision: int) -> Obj:
    """Return the object as it is when it was written at the revision."""
    metadata = obj.metadata.model_copy(update={"resource_version": str(revision)})
    return obj.model_copy(update={"metadata": metadata})


def refuse_newer(model: type[ApiModel], item: KeyValue | None) -> None:
    """Refuse to replace what a newer mlx-fleet wrote; whoever writes without reading asks first.

    Raises:
        NewerDocumentError: a newer mlx-fleet wrote the document under the key.

    """
    if item is None:
        return
    try:
        decode(model, item)
    except NewerDocumentError:
        raise
    except UndecodableError:
        return


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


def unchanged_guard(obj: ApiObject) -> ModRevisionGuard:
    """Return the guard that nobody wrote the object's spec since it was read (or created it)."""
    version = int(obj.metadata.resource_version or 0)
    return ModRevisionGuard(key=keys.spec_key(obj.kind, obj.name), mod_revision=version)
