"""What etcd's refusals mean: gRPC codes and texts, whatever way they came, to our errors. Pure.

What to do about a connection that does not come about: from a library's words to ours. Pure.
"""

from store.errors import (
    AuthOffError,
    CompactedError,
    LeaseLostError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)

# gRPC status codes: https://grpc.github.io/grpc/core/md_doc_statuscodes.html
_DEADLINE, _NOT_FOUND, _DENIED, _EXHAUSTED, _RANGE, _UNAVAILABLE, _UNAUTHENTICATED = (
    4,
    5,
    7,
    8,
    11,
    14,
    16,
)

# Texts that etcd has used for the same thing over the years, and gRPC codes; first match wins.
_MEANINGS: tuple[tuple[tuple[int, ...], tuple[str, ...], type[StoreError]], ...] = (
    ((_RANGE,), ("compacted",), CompactedError),
    ((), ("too large", "larger than max", "too many operations"), TooLargeError),
    ((), ("space exceeded",), NoSpaceError),
    ((_NOT_FOUND,), ("lease not found",), LeaseLostError),
    # Tokens of type jwt name the revision of users and roles; each change of those ends them.
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
    """Return our error for etcd's; matched on code and text, for HTTP statuses differ by build."""
    low = text.lower()
    for codes, phrases, error in _MEANINGS:
        if code in codes or any(phrase in low for phrase in phrases):
            if error is UnavailableError:
                return UnavailableError(text, ambiguous=True)
            return error(text)
    return StoreError(f"etcd: {text} (code {code})")


# Words of grpc, of aiohttp and of Go's TLS; the first match wins.
_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("hostname verification check failed", "hostname mismatch", "ip address mismatch"),
        "hostname mismatch: etcd's certificate is for another name. Connect by a name that it "
        "has (subjectAltName), or issue it for this one",
    ),
    (
        ("certificate has expired", "certificate is not yet valid"),
        "certificate verify failed: etcd's certificate is out of date. Issue it anew, or set this "
        "machine's clock",
    ),
    (
        ("certificate_verify_failed", "certificate verify failed"),
        "certificate verify failed: etcd's certificate is not signed by an authority that we "
        "know. Give etcd's with --etcd-ca",
    ),
    (
        (
            "tsi_data_corrupted",
            "alert certificate required",
            "alert bad certificate",
            "alert unknown ca",
            "alert certificate expired",
            "decrypt error",
        ),
        "etcd wants a client certificate of its own authority, and ours is missing, expired or "
        "another's. Give one with --etcd-cert and --etcd-key",
    ),
    (
        ("http request to an https server",),
        "etcd speaks TLS there. Write https://",
    ),
    (
        ("wrong_version_number", "wrong version number", "record layer failure"),
        "etcd does not speak TLS there. Write http://",
    ),
    (
        ("expected settings frame", "http1.x server", "received http2 header with status"),
        "what listens there does not speak etcd's gRPC (a web server, a proxy?). Check the URL; where "
        "only plain HTTP passes, give --etcd-transport http",
    ),
    (
        ("domain name not found", "name or service not known", "nodename nor servname"),
        "nobody knows this host name. Check the URL of --etcd",
    ),
    (("connection refused",), "connection refused: no etcd listens there"),
    (("error: no such file or directory",), "no etcd runs there"),
)

# Of aiohttp's "[None]": the other side ended the connection in the middle of TLS's handshake.
_HUNG_UP = ("socket closed", "disconnected", "connection reset", "ssl:default [none]")


def explain_connection_error(url: str, said: str) -> str:
    """Return what was said about the URL, made plain where it is known what it means."""
    low = said.lower()
    for phrases, meaning in _HINTS:
        if any(phrase in low for phrase in phrases):
            return meaning
    if any(phrase in low for phrase in _HUNG_UP):
        likely = (
            "Either it speaks http:// there, or it does not take our client certificate "
            "(--etcd-cert)"
            if url.startswith("https:")
            else "Does it speak https:// there?"
        )
        return f"it hung up on us ({_last(said)}). {likely}"
    return _last(said)


def _last(said: str) -> str:
    """Return the part of grpc's words that says something."""
    return said.rpartition("last error: ")[2]
