"""Errors of the store, named after what the caller should do."""


class StoreError(Exception):
    """Base class of the store's errors."""


class UnavailableError(StoreError):
    """The store did not answer: try again later, on another endpoint.

    If `ambiguous` is true, a write may have been applied: read before writing again. If `absent` is true, no store
    listens at the address.
    """

    def __init__(self, message: str, *, ambiguous: bool = False, absent: bool = False) -> None:
        super().__init__(message)
        self.ambiguous = ambiguous
        self.absent = absent


class SlowStoreError(UnavailableError):
    """The store is there but did not answer in time: wait, and ask less often."""


class UnknownOutcomeError(UnavailableError):
    """A write may have been applied, and the history no longer tells: read, then decide again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ambiguous=True)


class ConflictError(StoreError):
    """The data has changed since it was read: read again, then decide again."""


class FencedError(ConflictError):
    """The right to write is lost, because another process leads: do not try again."""


class NotFoundError(StoreError):
    """There is no such object: it was never written, or it was deleted."""


class CompactedError(StoreError):
    """The requested history was compacted: list again."""


class ReplacedError(CompactedError):
    """The store is not the one that was listed: list again, and trust no revision from before."""


class PermissionDeniedError(StoreError):
    """The store knows the user and denies the request: fix credentials or roles."""


class UnauthenticatedError(PermissionDeniedError):
    """The token is stale or missing: authenticate again."""


class AuthOffError(StoreError):
    """The store has no users, or does not require them yet: continue without a token."""


class TooLargeError(StoreError):
    """The object or transaction exceeds the store's limit: make it smaller."""


class NoSpaceError(StoreError):
    """The store's quota is used up: reads work, writes fail until space is freed."""


class LeaseLostError(StoreError):
    """The lease is lost: other processes consider its owner dead, so it must stop acting."""


class UndecodableError(ValueError):
    """The store holds a document that this process cannot read."""


class NewerDocumentError(UndecodableError):
    """A newer mlx-fleet wrote the document: this process must not overwrite it."""


class EditRefusedError(Exception):
    """An edit that makes no sense for the object as it is; the message says why, and what to do."""
