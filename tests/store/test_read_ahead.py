"""Tests of `store.read_ahead`: every page in order, errors in their place, and an end when the reader leaves."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from store.errors import CompactedError
from store.read_ahead import read_ahead
from store.reads import Listing


class Pages:
    """Pages with the revisions 1 to 5, each requested when the one before it was taken."""

    def __init__(self, *, fails_after: int = 5) -> None:
        self.requested = 0
        self.is_closed = False
        self._fails_after = fails_after

    async def read(self) -> AsyncGenerator[Listing]:
        try:
            for revision in range(1, 6):
                self.requested += 1
                await asyncio.sleep(0)
                if revision > self._fails_after:
                    raise CompactedError("the history is gone")
                yield Listing(revision=revision, items=())
        finally:
            self.is_closed = True


async def test_pages_come_in_order_and_the_next_one_is_on_its_way() -> None:
    pages, found = Pages(), []
    async with read_ahead(pages.read()) as ahead:
        async for page in ahead:
            found.append(page.revision)
            assert pages.requested <= page.revision + 3
    assert found == [1, 2, 3, 4, 5]
    assert pages.is_closed


async def take(pages: Pages, found: list[int]) -> None:
    async with read_ahead(pages.read()) as ahead:
        async for page in ahead:
            found += [100 // (3 - page.revision)]


async def test_an_error_comes_after_the_pages_before_it() -> None:
    found: list[int] = []
    with pytest.raises(CompactedError, match="history"):
        await take(Pages(fails_after=2), found)
    assert found == [50, 100]


async def test_a_reader_that_fails_ends_the_list() -> None:
    pages = Pages()
    with pytest.raises(ZeroDivisionError):
        await take(pages, [])
    assert pages.is_closed
