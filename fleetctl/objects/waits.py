"""Waits for the store: the next state that a command is for, and the changes below a prefix. Outages are waited through."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from store.errors import CompactedError, ReplacedError, UnavailableError
from store.port import KeyValue, Transport

_POLL_S = 0.1
_BACKOFF = Backoff(first_s=0.2, limit_s=4.0)

T = TypeVar("T")


async def poll(
    look: Callable[[], Awaitable[T | None]],
    clock: Clock,
    limit_s: float,
    *,
    on_outage: Callable[[], None] = lambda: None,
) -> T | None:
    """Return the first result of `look` that is not None; None if there is none within the time.

    Raises:
        UnavailableError: the store does not answer at the end of the time.

    """
    deadline_s = clock.monotonic() + limit_s
    while True:
        is_last = clock.monotonic() >= deadline_s
        try:
            result = await look()
        except UnavailableError:
            if is_last:
                raise
            on_outage()
        else:
            if result is not None or is_last:
                return result
        await clock.sleep(_POLL_S)


async def follow(transport: Transport, clock: Clock, prefix: str) -> AsyncGenerator[list[KeyValue]]:
    """Yield the items below a prefix, then each new or changed one, without end. No change is yielded twice.

    Raises:
        UnavailableError: the store does not answer the first time.

    """
    revision, is_listed = 0, False
    retries = Retries(_BACKOFF, clock)
    while True:
        try:
            if not is_listed:
                listing = await transport.list(prefix)
                missed = [item for item in listing.items if item.mod_revision > revision]
                revision, is_listed = listing.revision, True
                if missed:
                    yield missed
            async with aclosing(transport.watch(prefix, after_revision=revision)) as batches:
                async for batch in batches:
                    retries.reset()
                    revision = batch.revision
                    if items := [change.now for change in batch.changes if change.now is not None]:
                        yield items
        except UnavailableError:
            if not revision:
                raise
            await retries.wait()
        except ReplacedError:
            # In another store the same revisions mean other changes.
            revision, is_listed = 0, False
        except CompactedError:
            is_listed = False
