"""Reading of a list's next page while the one before it is being decoded."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from store.errors import StoreError
from store.reads import Listing


@asynccontextmanager
async def read_ahead(
    listings: AsyncGenerator[Listing],
) -> AsyncIterator[AsyncGenerator[Listing]]:
    """Yield the pages; the next one is requested before a page is handed out, so that etcd and the reader work at once.

    Raises:
        StoreError: raised by reading; the generator raises it in its place.

    """
    # One page is in hand, one is ready, one is on its way: each has a few megabytes.
    ready: asyncio.Queue[Listing | StoreError | None] = asyncio.Queue(maxsize=1)

    async def read() -> None:
        end: StoreError | None = None
        try:
            async with aclosing(listings):
                async for page in listings:
                    await ready.put(page)
        except StoreError as error:
            end = error
        await ready.put(end)

    async def received() -> AsyncGenerator[Listing]:
        while (found := await ready.get()) is not None:
            if isinstance(found, StoreError):
                raise found
            yield found

    try:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            async with aclosing(received()) as pages:
                yield pages
            reader.cancel()
    except BaseExceptionGroup as errors:
        # The one of the reader's block: `read` passes its own on.
        raise errors.exceptions[0] from None
