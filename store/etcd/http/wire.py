"""etcd's JSON gateway as text: requests to bytes, answers to values. Pure.

Formats differ between builds (spacing, grpc-gateway v1 and v2 error bodies); int64 are strings,
bytes are base64, zeros and empty values are left out.
"""

from collections.abc import Sequence
from typing import assert_never

import orjson

from store.errors import UnavailableError
from store.etcd.answers import Json, at, b64, key_value, not_etcd, refusal
from store.port import Change, CreatedAt, Delete, Guard, Operation, Put, Unchanged

__all__ = [
    "Json",
    "at",
    "b64",
    "change",
    "dumps",
    "error_of",
    "is_object",
    "key_value",
    "loads",
    "transaction",
]


def dumps(body: Json) -> bytes:
    return orjson.dumps(body)


def loads(raw: bytes) -> Json:
    """Return the object that the text says.

    Raises:
        UnavailableError: it is not JSON, so whoever answered is not etcd, or broke off.

    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise not_etcd(raw) from error
    if not isinstance(value, dict):
        raise not_etcd(raw)
    return value


def change(tree: Json) -> Change:
    """Return one event of a watch; a put carries no type."""
    now = key_value(at(tree, "kv"))
    gone = tree.get("type") == "DELETE"
    return Change(key=now.key, mod_revision=now.mod_revision, now=None if gone else now)


def transaction(guards: Sequence[Guard], operations: Sequence[Operation]) -> Json:
    return {
        "compare": [_compare(guard) for guard in guards],
        "success": [_operation(operation) for operation in operations],
    }


def _compare(guard: Guard) -> Json:
    match guard:
        case Unchanged(key=key, mod_revision=revision):
            return {
                "key": b64(key),
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": str(revision),
            }
        case CreatedAt(key=key, create_revision=revision):
            return {
                "key": b64(key),
                "target": "CREATE",
                "result": "EQUAL",
                "create_revision": str(revision),
            }
        case _:
            assert_never(guard)


def _operation(operation: Operation) -> Json:
    match operation:
        case Put(key=key, value=value, lease=lease):
            put = {"key": b64(key), "value": b64(value)}
            return {"request_put": {**put, "lease": str(lease)} if lease else put}
        case Delete(key=key):
            return {"request_delete_range": {"key": b64(key)}}
        case _:
            assert_never(operation)


def is_object(raw: bytes) -> bool:
    """Return whether the body can be etcd's: its answers and refusals are objects."""
    return raw.lstrip().startswith(b"{")


def error_of(raw: bytes) -> tuple[int, str]:
    """Return the gRPC code and the text of an error body, whatever build wrote it."""
    try:
        return refusal(loads(raw))
    except UnavailableError:
        return 2, raw[:200].decode("utf-8", "replace")
