"""Values in the answers of etcd's JSON gateway, after parsing. Pure."""

from base64 import b64decode, b64encode
from typing import Any

from store.errors import UnavailableError
from store.reads import KeyValue

Json = dict[str, Any]

MAX_ANSWER_BYTES = 2**28
"""The largest answer that is read: many times the pages that the fleet requests, 1 MiB of values each."""


def not_etcd_error(answer: object) -> UnavailableError:
    """Return the error for an answer that etcd would not give; a write may have been applied."""
    return UnavailableError(f"not an answer of etcd: {str(answer)[:80]}", ambiguous=True)


def too_large_error(where: str, limit: int) -> UnavailableError:
    """Return the error for an answer that is not read to its end; a write may have been applied."""
    return UnavailableError(
        f"etcd at {where} sent more than {limit >> 10} KiB as one answer, which etcd would not do. Is it a web server?",
        ambiguous=True,
    )


def field_at(tree: Json, *path: str) -> Any:
    """Return a required value of an answer.

    Raises:
        UnavailableError: it is missing, so the answer is not etcd's.

    """
    field: Any = tree
    for name in path:
        if not isinstance(field, dict) or name not in field:
            raise not_etcd_error(tree)
        field = field[name]
    return field


def b64(text: str | bytes) -> str:
    # A key that was written by hand need not be UTF-8, and must not break a list.
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
        raise not_etcd_error(tree) from error


def error_body(tree: Json) -> tuple[int, str]:
    """Return the gRPC code and the text of an error's body, for every build of etcd."""
    nested = tree.get("error")
    if isinstance(nested, dict):  # streams nest it
        tree = nested
    text = tree.get("message") or tree.get("error") or "no reason given"
    code = tree.get("grpc_code") or tree.get("code")
    return code if isinstance(code, int) else 2, str(text)
