"""The part of the port that looks, once. Beside it, for it is imported in a tenth of the time (see `store.etcd.sync_reader`).

Listing in pages, all as of one revision: the part that every adapter shares. Does no I/O itself.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol

from store.errors import CompactedError, ReplacedError


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


class StoreReader(Protocol):
    """The part of the port that looks, once: every transport has it, and `store.etcd.sync_reader` has nothing else."""

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now; see `Transport`."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`; see `Transport`."""
        ...


# Keys in the first answer, as client-go's reflector asks for.
PAGE = 500
# Etcd before 3.5 walks all that follows for every page, so many small pages are dear: 50,000 keys in
# pages of 500 cost it four times what they cost in pages of 5,000. Later pages are made to measure.
_LARGEST_PAGE = 5_000
_PAGE_BYTES = 4 * 2**20
# A history that goes away under a list four times in a row is a store in trouble.
_ATTEMPTS = 4


class Page(NamedTuple):
    """One answer of the store; `more` says that keys follow it."""

    items: tuple[KeyValue, ...]
    revision: int
    """The newest revision of the store when it answered, not the one that was read."""
    store: str
    more: bool


class FetchPage(Protocol):
    """Reads at most `limit` keys from `start` on, as of `revision`; 0 means as of now."""

    async def __call__(self, *, start: str, revision: int, limit: int) -> Page: ...


async def pages(prefix: str, fetch: FetchPage) -> AsyncGenerator[Listing]:
    """Yield every page below the prefix as of the first one's revision; one at least.

    Raises:
        CompactedError: that revision went away between two pages; ReplacedError: the store did.
        StoreError: what `fetch` raises.

    """
    start, revision, store, limit = prefix, 0, "", PAGE
    while True:
        page = await fetch(start=start, revision=revision, limit=limit)
        if revision == 0:
            revision, store = page.revision, page.store
        elif page.store != store:
            raise ReplacedError("the store was replaced between two pages of a list")
        yield Listing(revision=revision, items=page.items, store=store)
        if not page.more or not page.items:
            return
        start, limit = page.items[-1].key + "\0", _next_limit(page.items)


def _next_limit(items: tuple[KeyValue, ...]) -> int:
    """Return how many keys of the size of these make a page of 4 MiB; a hundred at least."""
    mean = sum(len(item.value) for item in items) // len(items) + 1
    return max(100, min(_LARGEST_PAGE, _PAGE_BYTES // mean))


async def collect(read: Callable[[], AsyncGenerator[Listing]]) -> Listing:
    """Return all pages as one listing; `read` is called again when the history went away.

    Raises:
        CompactedError: it went away four times in a row.
        StoreError: what reading raises.

    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await _collect_once(read)
        except CompactedError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _collect_once(read: Callable[[], AsyncGenerator[Listing]]) -> Listing:
    items: list[KeyValue] = []
    revision, store = 0, ""
    async with aclosing(read()) as listings:
        async for page in listings:
            revision, store = page.revision, page.store
            items.extend(page.items)
    return Listing(revision=revision, items=tuple(items), store=store)
