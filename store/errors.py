"""What can go wrong with the store, named after what the caller should do."""


class StoreError(Exception):
    """Base of everything the store raises."""


class UnavailableError(StoreError):
    """The store did not answer: try again later, on another endpoint.

    `ambiguous` says that a write may have been applied all the same: read before writing again.
    """

    def __init__(self, message: str, *, ambiguous: bool = False) -> None:
        super().__init__(message)
        self.ambiguous = ambiguous


class UnknownOutcomeError(UnavailableError):
    """A write may have been applied, and nobody can say any more: look, then decide again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ambiguous=True)


class ConflictError(StoreError):
    """What was read has changed since: look again, then decide again."""


class FencedError(ConflictError):
    """The right to write is gone, for somebody else leads: do not try again."""


class NotFoundError(StoreError):
    """There is no such object: a person must write it first, or it is gone and nothing is left to do."""


class CompactedError(StoreError):
    """The history asked for is gone: list again."""


class ReplacedError(CompactedError):
    """The store is not the one that was listed: list again, and trust no version seen before."""


class PermissionDeniedError(StoreError):
    """The store knows us and refuses: a person must mend credentials or roles."""


class UnauthenticatedError(PermissionDeniedError):
    """The token is stale or missing: authenticate again."""


class AuthOffError(StoreError):
    """The store has no users, or does not ask for them yet: go on without a token."""


class TooLargeError(StoreError):
    """The object or transaction is larger than the store takes: make it smaller."""


class NoSpaceError(StoreError):
    """The store has used up its quota: reads go on, writes wait for a person or a compaction."""


class LeaseLostError(StoreError):
    """The lease is gone: others think that its owner is dead, so it must act like it."""


class UndecodableError(ValueError):
    """The store holds a document that this process does not understand."""


class NewerDocumentError(UndecodableError):
    """A newer mlx-fleet wrote it: not to be overwritten by this process."""
