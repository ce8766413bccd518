"""Failures of a fetch: each has the reason that a condition shows, and a message that says what to do."""

from typing import ClassVar, Literal, TypeAlias

FetchReason: TypeAlias = Literal[
    "NotFound",
    "Gated",
    "Unauthorized",
    "RateLimited",
    "SourceUnreachable",
    "ListingRefused",
    "HashMismatch",
    "NoSpace",
]


class ModelFetchError(Exception):
    """A model could not be fetched."""

    reason: ClassVar[FetchReason]
    is_transient: ClassVar[bool] = False
    """True if the same fetch may succeed later without a person."""


class ModelMissingError(ModelFetchError):
    """The hub has no such repository, revision or file, or hides it from this token."""

    reason = "NotFound"


class ModelGatedError(ModelFetchError):
    """The repository's terms must be accepted by the token's account first."""

    reason = "Gated"


class HubUnauthorizedError(ModelFetchError):
    """The hub refused the token, or asks for one."""

    reason = "Unauthorized"


class HubRateLimitedError(ModelFetchError):
    """The hub asks to wait."""

    reason = "RateLimited"
    is_transient = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HubUnreachableError(ModelFetchError):
    """The hub did not answer, broke off, or answered with a failure of its own."""

    reason = "SourceUnreachable"
    is_transient = True


class ListingRefusedError(ModelFetchError):
    """The hub's list of files is unsafe, contradictory or too long, or has no file that is wanted."""

    reason = "ListingRefused"


class HashMismatchError(ModelFetchError):
    """A file came whole, and its content is not what the hub's list names."""

    reason = "HashMismatch"


class InsufficientDiskError(ModelFetchError):
    """The disk has no room for what is missing."""

    reason = "NoSpace"

    def __init__(self, message: str, *, missing_bytes: int, collectable_bytes: int) -> None:
        """`missing_bytes` is the shortfall; `collectable_bytes` is what a collection would free."""
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.collectable_bytes = collectable_bytes
