"""The read half of the port: keys, and listings in pages at one revision. Does no I/O itself."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol, TypeVar

from store.errors import CompactedError, ReplacedError

T = TypeVar("T")


class KeyValue(NamedTuple):
    """One key at some revision. A tuple, because there are tens of thousands of them."""

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
    """The id of the store; revisions of another store are not comparable."""


class StoreReader(Protocol):
    """The read half of the port, for callers that write nothing."""

    async def get(self, key: str) -> KeyValue | None:
        """Return the current value of the key; see `Transport`."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return every key that begins with `prefix`; see `Transport`."""
        ...

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        """Yield the same in pages; see `Transport`."""
        ...


# Keys in the first page, as client-go's reflector requests.
PAGE = 500
# etcd before 3.5 walks all following keys for every page, so many small pages are expensive: 50,000 keys in pages of
# 500 cost four times as much as in pages of 5,000. Later pages are sized by the first one's values: a reader holds a page
# five times while it is decoded, and pages of 4 MiB cost etcd as much as those of 1 MiB.
_LARGEST_PAGE = 5_000
_PAGE_BYTES = 2**20
# A history that is compacted during a list four times in a row means a store in trouble.
_ATTEMPTS = 4


class Page(NamedTuple):
    """One answer of the store; `more` means that keys follow it."""

    items: tuple[KeyValue, ...]
    revision: int
    """The newest revision of the store when it answered, not the one that was read."""
    store: str
    more: bool


class FetchPage(Protocol):
    """Reads at most `limit` keys from `start` on, as of `revision`; 0 means now."""

    async def __call__(self, *, start: str, revision: int, limit: int) -> Page: ...


async def pages(prefix: str, fetch: FetchPage) -> AsyncGenerator[Listing]:
    """Yield every page below the prefix as of the first page's revision; at least one.

    Raises:
        CompactedError: the revision was compacted between two pages; ReplacedError: the store was replaced.
        StoreError: raised by `fetch`.

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
    """Return the number of keys of this size that make a page of 1 MiB; at least a hundred."""
    mean = sum(len(item.value) for item in items) // len(items) + 1
    return max(100, min(_LARGEST_PAGE, _PAGE_BYTES // mean))


async def collect(read: Callable[[], AsyncGenerator[Listing]]) -> Listing:
    """Return all pages as one listing; `read` is called again when the history was compacted.

    Raises:
        CompactedError: it was compacted four times in a row.
        StoreError: raised by reading.

    """
    items: list[KeyValue] = []
    revision, store = 0, ""
    for page in await collect_converted(read, lambda page: page):
        revision, store = page.revision, page.store
        items.extend(page.items)
    return Listing(revision=revision, items=tuple(items), store=store)


async def collect_converted(
    read: Callable[[], AsyncGenerator[Listing]], convert: Callable[[Listing], T]
) -> list[T]:
    """Return what `convert` makes of each page, so that no two pages need be in memory; raises as `collect` does."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            async with aclosing(read()) as listings:
                return [convert(page) async for page in listings]
        except CompactedError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")
