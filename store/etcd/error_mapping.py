"""etcd's errors and the errors of connections, mapped to the errors of `store.errors` and to advice for users. Pure."""

from store.errors import (
    AuthOffError,
    CompactedError,
    LeaseLostError,
    NoSpaceError,
    PermissionDeniedError,
    SlowStoreError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)

# gRPC status codes: https://grpc.github.io/grpc/core/md_doc_statuscodes.html
_UNKNOWN, _DEADLINE, _NOT_FOUND, _DENIED, _EXHAUSTED, _RANGE, _UNAVAILABLE, _UNAUTHENTICATED = (
    2,
    4,
    5,
    7,
    8,
    11,
    14,
    16,
)

# Texts that versions of etcd have used for the same error, and gRPC codes; first match wins.
_MEANINGS: tuple[tuple[tuple[int, ...], tuple[str, ...], type[StoreError]], ...] = (
    ((_RANGE,), ("compacted",), CompactedError),
    ((), ("too large", "larger than max", "too many operations"), TooLargeError),
    ((), ("space exceeded",), NoSpaceError),
    ((_NOT_FOUND,), ("lease not found",), LeaseLostError),
    # A token of type jwt contains the revision of users and roles; each change of those invalidates it.
    (
        (_UNAUTHENTICATED,),
        (
            "user name is empty",
            "revision of auth store is old",
            "revision in header is old",
            "invalid auth token",
        ),
        UnauthenticatedError,
    ),
    ((), ("authentication is not enabled",), AuthOffError),
    ((), ("authentication failed",), PermissionDeniedError),
    ((_DENIED,), ("permission denied",), PermissionDeniedError),
    (
        (_UNAVAILABLE, _DEADLINE, _EXHAUSTED),
        (
            "deadline exceeded",
            "timed out",
            "no leader",
            "leader changed",
            "http request to an https server",
        ),
        UnavailableError,
    ),
)


def error_from_status(code: int, text: str) -> StoreError:
    """Return the error for etcd's code and text; both count, because HTTP statuses differ by build."""
    lower_text = text.lower()
    for codes, phrases, error in _MEANINGS:
        if code in codes or any(phrase in lower_text for phrase in phrases):
            if error is UnavailableError:
                return UnavailableError(text, ambiguous=True)
            return error(text)
    return StoreError(f"etcd: {explain_connection_error('', text)} (code {code})")


def slow_error(
    where: str, limit_s: float, what: str = "", *, ambiguous: bool = False
) -> SlowStoreError:
    """Return the error for an etcd that is there and did not answer in time; `what` it was asked."""
    asked = f" {what}" if what else ""
    return SlowStoreError(
        f"no answer from etcd at {where}{asked} within {limit_s:g} s: it is there but slow",
        ambiguous=ambiguous,
    )


def connection_error(where: str, text: str, *, ambiguous: bool = False) -> UnavailableError:
    """Return the error for a connection that failed, with its explanation for users."""
    why = explain_connection_error(where, text)
    if why == _SILENT:
        return SlowStoreError(f"no answer from etcd at {where}: {why}", ambiguous=ambiguous)
    is_absent = why in (_REFUSED, _NO_SOCKET)
    return UnavailableError(f"etcd at {where}: {why}", ambiguous=ambiguous, absent=is_absent)


def is_refusal(text: str) -> bool:
    """Return whether a watch was cancelled because of its token, or of its user's rights."""
    return isinstance(error_from_status(_UNKNOWN, text), PermissionDeniedError)


_REFUSED = "connection refused: no etcd listens there"
_NO_SOCKET = "no etcd runs there"
_SILENT = "something listens there, but it does not speak: it is slow or stopped"

# Phrases of grpc, of aiohttp, and of the TLS libraries of Go, OpenSSL and BoringSSL, without underscores; the first match
# wins.
_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("hostname verification check failed", "hostname mismatch", "ip address mismatch"),
        "hostname mismatch: etcd's certificate is for another name. Connect by a name in its "
        "subjectAltName, or issue a certificate for this name",
    ),
    (
        ("certificate has expired", "certificate is not yet valid"),
        "certificate verify failed: etcd's certificate is expired or not yet valid. Issue a new one, or set "
        "this machine's clock",
    ),
    (
        ("certificate verify failed",),
        "certificate verify failed: etcd's certificate is not signed by a known authority. Give etcd's "
        "CA with --etcd-ca, or the folder that `fleetctl join` wrote with --identity-dir",
    ),
    (
        (
            "tsi data corrupted",
            "alert certificate required",
            "alert bad certificate",
            "alert unknown ca",
            "alert certificate expired",
            "decrypt error",
        ),
        "etcd requires a client certificate of its own authority, and this one is missing, expired or from "
        "another authority. Give one with --etcd-cert and --etcd-key",
    ),
    (
        ("http request to an https server",),
        "this port speaks TLS. Write https://",
    ),
    (
        ("wrong version number", "record layer failure"),
        "this port does not speak TLS. Write http://",
    ),
    (
        ("expected settings frame", "http1.x server", "received http2 header with status"),
        "this port does not speak etcd's gRPC (a web server, a proxy?). Check the URL; where "
        "only plain HTTP passes, give --etcd-transport http",
    ),
    (
        ("domain name not found", "name or service not known", "nodename nor servname"),
        "unknown host name. Check the URL of --etcd",
    ),
    (("connection refused",), _REFUSED),
    (("error: no such file or directory",), _NO_SOCKET),
    (("before receiving settings frame",), _SILENT),
    (
        ("no route to host", "host is down", "network is unreachable"),
        "its machine cannot be reached. Check the address of --etcd, and that machine's network",
    ),
    (
        ("timeout occurred", "connection timed out", "timed out"),
        "its machine does not answer. Is it up, and is the address of --etcd right?",
    ),
)

# aiohttp's "[None]" means that the other side closed the connection during the TLS handshake.
_HUNG_UP = ("socket closed", "disconnected", "connection reset", "ssl:default [none]")


def explain_connection_error(url: str, text: str) -> str:
    """Return an explanation of a connection error at the URL, or the error's own text if it is unknown."""
    lower_text = text.lower().replace("_", " ")
    for phrases, meaning in _HINTS:
        if any(phrase in lower_text for phrase in phrases):
            return meaning
    if any(phrase in lower_text for phrase in _HUNG_UP):
        likely = (
            "Either the port speaks http://, or it does not accept the client certificate "
            "(--etcd-cert)"
            if url.startswith("https:")
            else "Does the port speak https://?"
        )
        return f"the connection was closed ({_last(text)}). {likely}"
    return _last(text)


def _last(text: str) -> str:
    """Return the last part of a gRPC error, which holds the cause."""
    return text.rpartition("last error: ")[2]
