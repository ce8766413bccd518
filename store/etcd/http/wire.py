"""etcd's JSON gateway as text: requests to bytes, answers to values. Pure.

Formats differ between builds (spacing, grpc-gateway v1 and v2 error bodies); int64 are strings,
bytes are base64, zeros and empty values are left out.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, assert_never

import orjson

from store.errors import UnavailableError
from store.port import Change, CreatedAt, Delete, Guard, KeyValue, Operation, Put, Unchanged

Json = dict[str, Any]


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
        raise _not_etcd(raw) from error
    if not isinstance(value, dict):
        raise _not_etcd(raw)
    return value


def _not_etcd(said: object) -> UnavailableError:
    """Return the error for an answer that makes no sense; a write may have been applied."""
    return UnavailableError(f"not an answer of etcd: {str(said)[:80]}", ambiguous=True)


def at(tree: Json, *path: str) -> Any:
    """Return what must be there in an answer of etcd.

    Raises:
        UnavailableError: it is not there, so whoever answered is not etcd.

    """
    found: Any = tree
    for name in path:
        if not isinstance(found, dict) or name not in found:
            raise _not_etcd(tree)
        found = found[name]
    return found


def b64(text: str | bytes) -> str:
    # A key that somebody wrote by hand need not be text, and must not stop who lists it.
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return b64encode(raw).decode()


def key_value(tree: Json) -> KeyValue:
    try:
        return KeyValue(
            key=b64decode(tree["key"]).decode("utf-8", "surrogateescape"),
            value=b64decode(tree.get("value", "")),
            create_revision=int(tree.get("create_revision", 0)),
            mod_revision=int(tree.get("mod_revision", 0)),
            lease=int(tree.get("lease", 0)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_etcd(tree) from error


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
        tree = loads(raw)
    except UnavailableError:
        return 2, raw[:200].decode("utf-8", "replace")
    nested = tree.get("error")
    if isinstance(nested, dict):  # streams nest it
        tree = nested
    text = tree.get("message") or tree.get("error") or "no reason given"
    code = tree.get("grpc_code") or tree.get("code")
    return code if isinstance(code, int) else 2, str(text)
