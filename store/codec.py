"""Encoding of API objects to the store's bytes, and decoding. Pure.

Spec and status are separate documents under separate keys, so that their writers never conflict.
"""

from functools import cache
from typing import Final, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from schemas.meta import ApiModel, ApiObject, Status
from store import errors, keys, versions
from store.document_decoder import DocumentDecoder
from store.port import KeyValue, ModRevisionGuard, Put

Obj = TypeVar("Obj", bound=ApiObject)
M = TypeVar("M", bound=ApiModel)

# A batch of changes, and some more.
_RECENT: Final = 128
_NOT_IN_SPEC: dict[str, bool | set[str]] = {"status": True, "metadata": {"resource_version"}}


# Re-exported for callers that import this module anyway; `store.errors` imports no models.
UndecodableError = errors.UndecodableError
NewerDocumentError = errors.NewerDocumentError


def encode(model: BaseModel) -> bytes:
    """Return the document: JSON without None values, with its stored version first."""
    raw = model.model_dump_json(by_alias=True, exclude_none=True).encode()
    return versions.stamp_version(raw, versions.version_of(type(model).__name__))


def encode_spec(obj: ApiObject) -> bytes:
    """Return the document of the object's spec key: everything but status and version."""
    raw = obj.model_dump_json(by_alias=True, exclude_none=True, exclude=_NOT_IN_SPEC).encode()
    return versions.stamp_version(raw, versions.version_of(type(obj).__name__))


def encode_copy(obj: ApiObject) -> bytes:
    """Return the document of a copy of the object under another key: that of its spec key, and its resourceVersion."""
    raw = obj.model_dump_json(by_alias=True, exclude_none=True, exclude={"status"}).encode()
    return versions.stamp_version(raw, versions.version_of(type(obj).__name__))


class _ModelDecoder(Generic[M]):
    """Decodes the documents of one model. Values that watches of one process share are decoded once."""

    def __init__(self, model: type[M]) -> None:
        self._decode = DocumentDecoder(model).decode
        self._version = versions.version_of(model.__name__)
        # By identity: equal watches deliver the same objects, each to its own cache.
        self._recent: dict[int, tuple[KeyValue, M]] = {}

    def decode(self, item: KeyValue) -> M:
        """Return the document; raises `VersionError` and `ValidationError`."""
        known = self._recent.get(id(item))
        if known is not None and known[0] is item:
            return known[1]
        found = self._decode(versions.unstamp(item.value, self._version))
        if len(self._recent) >= _RECENT:
            self._recent.clear()
        self._recent[id(item)] = item, found
        return found


@cache
def _decoder(model: type[M]) -> _ModelDecoder[M]:
    return _ModelDecoder(model)


def decode(model: type[M], item: KeyValue) -> M:
    """Return the document under a key.

    Raises:
        NewerDocumentError: a newer mlx-fleet wrote it.
        UndecodableError: this process cannot read it for another reason.

    """
    try:
        decoder: _ModelDecoder[M] = _decoder(model)
        return decoder.decode(item)
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


def decode_object(kind: type[Obj], item: KeyValue) -> Obj:
    """Return the object under a spec key, with its resourceVersion.

    Raises:
        UndecodableError: as `decode` does.

    """
    found = decode(kind, item)
    # Bypasses pydantic's frozen guard: the object is not shared yet, and a copy would double the cost of reading fifty
    # thousand.
    object.__setattr__(found.metadata, "resource_version", str(item.mod_revision))
    return found


def decode_copy(kind: type[Obj], item: KeyValue) -> Obj:
    """Return the object that `encode_copy` copied, with the resourceVersion that it had.

    Raises:
        UndecodableError: as `decode` does, or there is no resourceVersion.

    """
    copy = decode(kind, item)
    if not copy.metadata.resource_version.isdecimal():
        raise UndecodableError(f"{item.key}: a copy without resourceVersion; delete the key")
    return copy


def with_version(obj: Obj, revision: int) -> Obj:
    """Return the object as it is after the write at the revision."""
    metadata = obj.metadata.model_copy(update={"resource_version": str(revision)})
    return obj.model_copy(update={"metadata": metadata})


def refuse_newer(model: type[ApiModel], item: KeyValue | None) -> None:
    """Refuse to overwrite a document of a newer mlx-fleet; for writers that do not read first.

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
    """Return the object with the status from its status key."""
    model = status_type(type(obj))
    if model is None or item is None:
        return obj
    return obj.model_copy(update={"status": decode(model, item)})


def put_spec(obj: ApiObject) -> Put:
    """Return the operation that writes the object's spec."""
    return Put(key=keys.spec_key(obj.kind, obj.name), value=encode_spec(obj))


def unchanged_guard(obj: ApiObject) -> ModRevisionGuard:
    """Return the guard that the object's spec is as it was read, or does not exist if it is new."""
    version = int(obj.metadata.resource_version or 0)
    return ModRevisionGuard(key=keys.spec_key(obj.kind, obj.name), mod_revision=version)
