"""What etcd's refusals mean: gRPC codes and texts, whatever way they came, to our errors. Pure."""

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


def exception_of(code: int, text: str) -> StoreError:
    """Return our error for etcd's; matched on code and text, for HTTP statuses differ by build."""
    low = text.lower()
    for codes, phrases, error in _MEANINGS:
        if code in codes or any(phrase in low for phrase in phrases):
            if error is UnavailableError:
                return UnavailableError(text, ambiguous=True)
            return error(text)
    return StoreError(f"etcd: {text} (code {code})")
