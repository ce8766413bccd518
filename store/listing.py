"""The part of the port that looks, once. Beside it, for it is imported in a tenth of the time (see `store.etcd.quick`)."""

from typing import NamedTuple, Protocol


class KeyValue(NamedTuple):
    """One key as it was at some revision. A tuple, for there are tens of thousands of them."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Listing(NamedTuple):
    """Keys below a prefix in the order of their bytes (all, or one page), as of one revision."""

    revision: int
    items: tuple[KeyValue, ...]
    store: str = ""
    """Which store this is: revisions of another one mean nothing here."""


class Reads(Protocol):
    """The part of the port that looks, once: every transport has it, and `store.etcd.quick` has nothing else."""

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now; see `Transport`."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`; see `Transport`."""
        ...
